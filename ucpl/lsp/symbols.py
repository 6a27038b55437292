"""The outline of a file as an editor lists it: models and layouts, and what each of them defines."""

from __future__ import annotations

from ucpl.lsp.definitions import Definition, definitions_of
from ucpl.lsp.outline import Block, Outline
from ucpl.records import frozen

__all__ = ["Symbol", "symbols"]

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
    """A name: characters first .. last are all of it, start .. stop the name."""

    name: str
    kind: str
    first: int
    last: int
    start: int
    stop: int
    children: tuple[Symbol, ...] = ()


def symbols(outline: Outline) -> list[Symbol]:
    """Of a whole text, in the order in which they stand."""
    top = [_symbol(d) for d in definitions_of(outline, outline.top) if d.kind in _LISTED]
    blocks = [_block(outline, block) for block in outline.blocks if block.header is not None and block.name]
    return sorted([*top, *blocks], key=lambda s: s.first)


def _symbol(one: Definition) -> Symbol:
    statement, token = one.statement, one.token
    return Symbol(one.name or "?", one.kind, statement.start, statement.stop, token.start, token.stop)


def _block(outline: Outline, block: Block) -> Symbol:
    assert block.header is not None
    name = block.header.tokens[1]
    inner = tuple(_symbol(d) for d in definitions_of(outline, block) if d.kind in _LISTED)
    return Symbol(block.name, block.kind, block.start, max(block.stop, name.stop), name.start, name.stop, inner)
