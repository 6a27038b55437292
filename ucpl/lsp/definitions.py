"""The names that a statement defines, each with its place."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from ucpl.lsp.outline import BLOCKS, Outline, Statement, TextBlock
from ucpl.lsp.tokens import Token
from ucpl.records import frozen

__all__ = ["Definition", "Symbol", "definitions_of", "lefts_of", "split_at_commas", "symbols"]


@frozen(eq=False)
class Definition:
    """A name, its kind and its place.

    `block` is the block that knows it; a model or layout has its own.
    """

    kind: str
    name: str
    token: Token
    statement: Statement
    block: TextBlock


def definitions_of(outline: Outline, block: TextBlock) -> list[Definition]:
    """Everything that a block defines. These are parameters and names of statements.

    At the top, models, layouts and plans, too.
    """
    found: list[Definition] = []
    if block.header is not None:
        found += [Definition("parameter", t.value, t, block.header, block) for t in parameters_of(block.header)]
    for statement in block.statements:
        found += [Definition(kind, t.value, t, statement, block) for kind, t in _of(statement, block.kind)]
    if block.kind == "top":
        for one in outline.blocks:
            if one.header is not None and len(one.header.tokens) > 1:
                found.append(Definition(one.kind, one.name, one.header.tokens[1], one.header, one))
    return found


def parameters_of(header: Statement) -> list[Token]:
    """The parameters in the header of a layout or model.

    Without those of the one that it extends.
    """
    words = header.tokens
    if len(words) < 3 or words[2].text != "(":
        return []
    depth, inner = 0, []
    for token in words[2:]:
        depth += (token.text in ("(", "[")) - (token.text in (")", "]"))
        if depth == 0:
            break
        inner.append(token)
    return [part[0] for part in split_at_commas(inner[1:]) if part and part[0].is_name]


def split_at_commas(words: Sequence[Token]) -> list[list[Token]]:
    """The runs of tokens between commas that stand outside brackets."""
    out: list[list[Token]] = [[]]
    depth = 0
    for token in words:
        depth += (token.text in ("(", "[")) - (token.text in (")", "]"))
        if token.text == "," and depth <= 0:
            out.append([])
        else:
            out[-1].append(token)
    return out


Named = Iterator[tuple[str, Token]]


def _bindings(statement: Statement) -> Named:
    for part in split_at_commas(statement.tokens[1:]):
        if len(part) > 1 and part[0].is_name and part[1].text in ("=", "["):
            yield statement.word, part[0]


def _first_name(statement: Statement) -> Named:
    if len(statement.tokens) > 1 and statement.tokens[1].is_name:
        yield statement.word, statement.tokens[1]


def _imports(statement: Statement) -> Named:
    for token in statement.after("import"):
        if token.is_name:
            yield "import", token


def _mesh(statement: Statement) -> Named:
    words = statement.tokens[1:]
    if len(words) > 1 and words[1].text == ":":
        yield "mesh", words[0]
        words = words[2:]
    for token in words:
        if token.is_name:
            yield "axis", token


def _state(statement: Statement) -> Named:
    for token in statement.tokens[1:]:
        if token.text == ":":
            return
        if token.is_name:
            yield "state", token


def _use(statement: Statement) -> Named:
    rest = statement.after("as")
    if rest and rest[0].is_name:
        yield "prefix", rest[0]


def lefts_of(statement: Statement) -> list[Token]:
    """The names on the left of a tensor's or an entry's sign."""
    words = statement.tokens
    stop = next((n for n, token in enumerate(words) if token.text in (":", "=")), 1)
    return [part[0] for part in split_at_commas(words[:stop]) if part and part[0].is_name]


def _left(statement: Statement) -> Named:
    yield from ((statement.word, token) for token in lefts_of(statement))


_COMMON: dict[str, Callable[[Statement], Named]] = {
    "let": _bindings,
    "dim": _bindings,
    "index": _first_name,
    "group": _first_name,
    "use": _use,
}
_READERS: dict[str, dict[str, Callable[[Statement], Named]]] = {
    "top": {"let": _bindings, "plan": _first_name, "from": _imports, **dict.fromkeys(BLOCKS, _first_name)},
    "model": {**_COMMON, "alias": _first_name, "state": _state, "tensor": _left},
    "layout": {**_COMMON, "mesh": _mesh, "file": _first_name, "blob": _first_name, "entry": _left},
}


def _of(statement: Statement, kind: str) -> Named:
    read = _READERS[kind].get(statement.word)
    if read is not None:
        yield from read(statement)


# ---- the outline of a file -------------------------------------------------------------------------------------------

_LISTED = (
    "let",
    "dim",
    "tensor",
    "alias",
    "state",
    "group",
    "index",
    "mesh",
    "axis",
    "file",
    "prefix",
    "entry",
    "blob",
    "plan",
)


@frozen
class Symbol:
    """A name. Characters first .. last are its statement, start ..

    Stop the name.
    """

    name: str
    kind: str
    first: int
    last: int
    start: int
    stop: int
    children: tuple[Symbol, ...] = ()


def symbols(outline: Outline) -> list[Symbol]:
    """The symbols of a text, in its order."""
    top = [_symbol(d) for d in definitions_of(outline, outline.top) if d.kind in _LISTED]
    blocks = [_block(outline, block) for block in outline.blocks if block.header is not None and block.name]
    return sorted([*top, *blocks], key=lambda s: s.first)


def _symbol(one: Definition) -> Symbol:
    statement, token = one.statement, one.token
    return Symbol(one.name or "?", one.kind, statement.start, statement.stop, token.start, token.stop)


def _block(outline: Outline, block: TextBlock) -> Symbol:
    assert block.header is not None
    name = block.header.tokens[1]
    inner = tuple(_symbol(d) for d in definitions_of(outline, block) if d.kind in _LISTED)
    return Symbol(block.name, block.kind, block.start, max(block.stop, name.stop), name.start, name.stop, inner)
