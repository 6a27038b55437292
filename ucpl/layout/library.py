"""Library of models and layouts: texts, their imports, and the shipped specs.

Not here: the disk. A caller with files gives a `Reader`; without one, imports are found among the shipped specs alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from functools import cache
from posixpath import dirname, join
from typing import Generic, NoReturn, TypeVar, cast

from attrs import AttrsInstance, evolve, field

from ucpl.errors import Label, UcplError, fail
from ucpl.language import nodes, parse
from ucpl.language.walk import rewritten, walk
from ucpl.layout.name_remedies import alike_names, nearest
from ucpl.layout.numbered_names import with_single_names
from ucpl.layout.scope import at
from ucpl.records import define, frozen
from ucpl.registry import formats
from ucpl.resources import spec_files, spec_text

IMPORT_LIMIT = 32  # files deep
EXTENDS_LIMIT = 32
_NAMES_SHOWN = 6
_KINDS = {"model": nodes.Model, "layout": nodes.Layout, "plan": nodes.Plan}

Block = TypeVar("Block", nodes.Model, nodes.Layout)
Reader = Callable[[str], str | None]  # the text of a file by its path; None: there is none


@frozen
class KnownStatement:
    """A model, layout or plan, and the statements of its file.

    Lets and asserts are found there.
    """

    node: nodes.Model | nodes.Layout | nodes.Plan
    file: nodes.File


@frozen
class Link(Generic[Block]):
    """One layout, or one model, of a chain of `extends`."""

    node: Block
    file: nodes.File


@define
class Library:
    """Names that a text may use.

    Every file is parsed once, a shipped one when one of its names is used.
    """

    known: dict[str, KnownStatement] = field(factory=dict)
    files: dict[str, nodes.File] = field(factory=dict)
    shipped: bool = True
    keep: bool = False  # whether trees of texts are kept for the next process
    sections: dict[str, Sections] = field(factory=dict)  # sections of a config that each model and layout names
    written: dict[str, list[nodes.LayoutItem]] = field(factory=dict, init=False, eq=False)  # of layouts, as items_of

    def model(self, name: str, span: nodes.Span = nodes.NOWHERE) -> KnownStatement:
        return self.find(name, (nodes.Model,), "model", span)

    def layout(self, name: str, span: nodes.Span = nodes.NOWHERE) -> KnownStatement:
        return self.find(name, (nodes.Layout,), "layout", span)

    def plan(self, name: str, span: nodes.Span = nodes.NOWHERE) -> KnownStatement:
        return self.find(name, (nodes.Plan,), "plan", span)

    def chain(self, name: str, span: nodes.Span = nodes.NOWHERE) -> tuple[Link[nodes.Layout], ...]:
        """The layout and its bases, the outermost first.

        Raises E110, and E119 for one that extends itself.
        """
        return _chain(nodes.Layout, self.layout(name, span), self.layout)

    def models(self, first: KnownStatement) -> tuple[Link[nodes.Model], ...]:
        """The model and its bases, the outermost first.

        Raises E110, and E119 for one that extends itself.
        """
        return _chain(nodes.Model, first, self.model)

    def with_model(self, model: nodes.Model) -> Library:
        """A library in which the model of that name is this one.

        This library stays as it is.
        """
        known = self.model(model.name)
        return evolve(self, known={**self.known, model.name: evolve(known, node=model)}, files=dict(self.files))

    def find(self, name: str, kind: tuple[type, ...], word: str, span: nodes.Span) -> KnownStatement:
        """Definition of a name, of one of these kinds. Raises E110, E383."""
        found = self.known.get(name)
        if found is not None and isinstance(found.node, kind):
            return found
        if found is not None and not found.file.name.startswith("specs/"):
            _reject_kind(found, word, [k.node for k in self.known.values() if isinstance(k.node, kind)], span)
        shipped = _index() if self.shipped else {}
        files = shipped.get(name, ())
        if len(files) > 1:
            hint = _hints().get(name.casefold(), "") if word == "layout" else ""
            fail(
                "E383",
                f"`{name}` is in {len(files)} of the shipped files: {', '.join(files)}",
                at(span) if span.line else Label("<command line>", where=name),
                remedy=hint or f"say which: {files[0]}:{name}(...)",
            )
        if files and f"specs/{files[0]}" not in self.files:
            self._lend(_shipped(files[0]))
            return self.find(name, kind, word, span)
        names = [n for n, k in self.known.items() if isinstance(k.node, kind)]
        names += [n for n in shipped if n not in self.known]
        own = {n for n in names if n in self.known and isinstance(self.known[n].node, _KINDS[word])}
        mine = [n for n in names if n in own and not self.known[n].file.name.startswith("specs/")]
        alike = alike_names(name, sorted(_shipped_names(word) - set(mine)) if self.shipped else [])
        hints = _hints()
        folded = {re.sub("[-_. ]", "", n).casefold(): n for n in names}
        alike_but_signs = folded.get(re.sub("[-_. ]", "", name).casefold())
        close = nearest(name, names) if name.casefold() not in hints or word != "layout" else None
        close = alike_but_signs or close
        fail(
            "E110",
            f"no {word} is called `{name}`",
            at(span) if span.line else Label("<command line>", where=name),
            remedy=f"did you mean `{close}`?"
            if close
            else _instead(name, word, (mine, alike), is_called=not span.line),
            about=tuple(dict.fromkeys([*([close] if close else []), *alike, *({name.casefold()} & hints.keys())])),
        )

    def add(self, file: nodes.File) -> None:
        file = with_single_names(written_out(file, self.sections), self._models())
        self.files[file.name] = file
        self.written.clear()
        for item in file.statements:
            if isinstance(item, nodes.Model | nodes.Layout | nodes.Plan):
                self.known[item.name] = KnownStatement(item, file)

    def _models(self) -> dict[str, Sequence[nodes.ModelItem]]:
        return {name: one.node.items for name, one in self.known.items() if isinstance(one.node, nodes.Model)}

    def _lend(self, file: nodes.File) -> None:
        """Add a shipped file and its imports.

        Names that are known already keep their meaning.
        """
        known = dict(self.known)
        for item in file.statements:
            if isinstance(item, nodes.Import) and f"specs/{item.file}" not in self.files:
                self._lend(_shipped(item.file))
        self.add(file)
        self.known.update(known)


def _chain(
    kind: type[Block], known: KnownStatement, find: Callable[[str, nodes.Span], KnownStatement]
) -> tuple[Link[Block], ...]:
    out: list[Link[Block]] = []
    while True:
        node = known.node
        assert isinstance(node, kind)
        names: list[str] = [link.node.name for link in out]
        if node.name in names or len(names) > EXTENDS_LIMIT:
            fail("E119", f"`{node.name}` extends itself: {' -> '.join([*names, node.name])}", at(node.span))
        out.append(Link(node, known.file))
        if node.extends is None:
            return tuple(out)
        known = find(node.extends.name, node.extends.span)


def _hints() -> dict[str, str]:
    """Words that people write for a layout -> which layouts there are."""
    return {word: text for one in formats().values() for word, text in one.hints}


def _instead(name: str, word: str, names: tuple[list[str], list[str]], *, is_called: bool) -> str:
    """Remedy for an unknown name that is close to no other name.

    `names`: those of the texts at hand, and the most alike of those that ship. `is_called`: a command line calls it,
    and no text.
    """
    mine, alike = names
    tool = _hints().get(name.casefold())
    if tool and word == "layout":
        return tool
    texts = []
    if mine:
        more = f" and {len(mine) - _NAMES_SHOWN} more" if len(mine) > _NAMES_SHOWN else ""
        texts.append(f"the {word}s here are {', '.join(mine[:_NAMES_SHOWN])}{more}")
    if alike:
        texts.append(f"of those that ship, the most alike {'are' if len(alike) > 1 else 'is'} {', '.join(alike)}")
    if is_called and word == "layout" and not texts:
        return (
            f"a layout of a text is called with its file: FILE.ucpl:{name}(...); `ucpl formats` lists those that ship"
        )
    line = {"plan": f"plan {name} = x() -> y()", "model": f"model {name} {{", "layout": f"layout {name}() of ... {{"}
    return "; ".join(texts) or f'define it, `{line[word]}`, or import it: from "FILE.ucpl" import {name}'


def _reject_kind(
    found: KnownStatement, word: str, others: list[nodes.Model | nodes.Layout | nodes.Plan], span: nodes.Span
) -> NoReturn:
    """Of a name that is something else. Raises E110."""
    node, file = found.node, found.file.name
    mine = [o.name for o in others if o.span.file == node.span.file]
    what = "model" if isinstance(node, nodes.Model) else "layout" if isinstance(node, nodes.Layout) else "plan"
    if isinstance(node, nodes.Plan):
        remedy = f"a plan is planned: ucpl plan {file} {node.name}"
    else:
        remedy = f"{word}s of that file: {', '.join(mine)}" if mine else f"{file} has no {word}"
    place = at(span) if span.line else Label("<command line>", where=node.name)
    fail("E110", f"`{node.name}` is a {what}, and no {word}", place, remedy=remedy)


def load(*texts: tuple[str, str], shipped: bool = True, read: Reader | None = None, keep: bool = False) -> Library:
    """A library of (name, text) files, their imports, and the shipped specs.

    `name` is a path: an import is one of the texts, or read by `read` from the path next to it, or a shipped spec.
    `keep`: these texts are files, which later processes will read again (`syntax.parse`).
    """
    library = Library(shipped=shipped, keep=keep)
    given = dict(texts)

    def beside(path: str) -> str | None:
        return given[path] if path in given else read(path) if read is not None else None

    for name, text in texts:
        _load(library, name, text, beside, ())
    return library


_SHIPPED: dict[str, nodes.File] = {}
_HEAD = re.compile(r"^(model|layout|plan)[ \t]+(\w+|\"[^\"]+\")", re.MULTILINE)


@cache
def _index() -> dict[str, tuple[str, ...]]:
    """Shipped files by the names that they define.

    The lines that begin a statement are enough: nothing is parsed for it.
    """
    found: dict[str, list[str]] = {}
    for file, _ in spec_files():
        for name in dict.fromkeys(name for _, name in _HEAD.findall(spec_text(file))):
            found.setdefault(name.strip('"'), []).append(file)
    return {name: tuple(files) for name, files in found.items()}


def _shipped_names(word: str) -> set[str]:
    """The names of layouts, models or plans that ship."""
    heads = (head for file, _ in spec_files() for head in _HEAD.findall(spec_text(file)))
    return {name.strip('"') for kind, name in heads if kind == word}


def _shipped(name: str) -> nodes.File:
    if name not in _SHIPPED:
        _SHIPPED[name] = parse(spec_text(name), f"specs/{name}", keep=True)
    return _SHIPPED[name]


def _load(library: Library, name: str, text: str, read: Reader, chain: tuple[str, ...]) -> nodes.File:
    if len(chain) > IMPORT_LIMIT:
        fail("E111", "imports are nested too deep", Label(chain[0], where=" -> ".join(chain[-3:])))
    file = parse(text, name, keep=library.keep)
    for item in file.statements:
        if isinstance(item, nodes.Import):
            _import(library, file, item, read, (*chain, name))
    library.add(file)
    return file


def _import(library: Library, file: nodes.File, item: nodes.Import, read: Reader, chain: tuple[str, ...]) -> None:
    beside = join(dirname(file.name), item.file)
    if beside in chain:
        fail("E111", f"{item.file} imports itself: {' -> '.join([*chain, beside])}", at(item.span))
    try:
        text = read(beside)
    except UcplError as error:  # of a file that another names: both are shown
        raise UcplError(
            *(evolve(d, labels=(*d.labels, at(item.span, "imported here"))) for d in error.diagnostics)
        ) from None
    if text is not None:
        found = _load(library, beside, text, read, chain)
    elif item.file in dict(spec_files()):
        found = _shipped(item.file)
        library._lend(found)
        library.add(found)
    else:
        known = dict(spec_files())
        close = f"{item.file}.ucpl" if f"{item.file}.ucpl" in known else nearest(item.file, known)
        fail(
            "E112",
            f'no file "{item.file}" next to {file.name} or among the shipped specs',
            at(item.span),
            remedy=f'did you mean "{close}"?' if close else "correct the path: it counts from the importing file",
        )
    defined = {s.name for s in found.statements if isinstance(s, nodes.Model | nodes.Layout | nodes.Plan)}
    for name in item.names:
        if name not in defined and not (name in library.known and _reexports(found, name)):
            close = nearest(name, sorted(defined))
            fail(
                "E113",
                f'"{item.file}" defines no `{name}`',
                at(item.span),
                remedy=f"did you mean `{close}`?" if close else f"it defines {', '.join(sorted(defined))}",
            )


def _reexports(file: nodes.File, name: str) -> bool:
    return any(isinstance(s, nodes.Import) and name in s.names for s in file.statements)


# ---- sections of a config --------------------------------------------------------------------------------------------


Sections = Mapping[str, str]  # a name, and the key that it means: t, config.text_config
Item = TypeVar("Item", bound=AttrsInstance)


def written_out(file: nodes.File, known: MutableMapping[str, Sections]) -> nodes.File:
    """The file with the keys of sections in full.

    `known`: the sections of each model and layout, to which those of this file are added.
    """
    if not any(_is_key(b.value) for s in walk(*file.statements) if isinstance(s, nodes.Let) for b in s.bindings):
        if not any(known.values()):
            return file
    of_file = _sections(file.statements, {})
    here = {s.name: s for s in file.statements if isinstance(s, nodes.Model | nodes.Layout)}
    found: dict[str, Sections] = {}

    def sections(name: str) -> Sections:
        """Sections that a block may name.

        They are its own, those of its model, of its base and of the file.
        """
        if name not in here:
            return known.get(name, {})
        if name not in found:
            found[name] = of_file  # a block that extends itself is refused later
            block = here[name]
            bases = [block.extends.name] if block.extends is not None else []
            bases += [block.of] if isinstance(block, nodes.Layout) else []
            inherited = {t: key for base in reversed(bases) for t, key in sections(base).items()}
            found[name] = _sections(block.items, {**of_file, **inherited})
        return found[name]

    for name in here:
        known[name] = sections(name)
    of_blocks = {id(s): known[s.name] for s in here.values()}
    statements = tuple(_full(s, of_blocks.get(id(s), of_file)) for s in file.statements)
    return evolve(file, statements=statements) if any(of_blocks.values()) or of_file else file


def _sections(items: Iterable[AttrsInstance], outer: Sections) -> Sections:
    found = dict(outer)
    for item in items:
        for binding in item.bindings if isinstance(item, nodes.Let) else ():
            found.pop(binding.name, None)  # an inner name hides the outer one
            path = _key(binding.value.path, found) if isinstance(binding.value, nodes.Name) else ""
            if path.partition(".")[0] == "config":
                found[binding.name] = path
    return found


def _is_key(value: nodes.Expr) -> bool:
    return isinstance(value, nodes.Name) and value.path.partition(".")[0] == "config"


def _key(path: str, sections: Sections) -> str:
    head, _, rest = path.partition(".")
    return f"{sections[head]}.{rest}" if rest and rest != "size" and head in sections else path


def _full(statement: Item, sections: Sections) -> Item:
    """A statement with full keys.

    A `let` that only names a section is left out.
    """
    names = [n.path for n in walk(statement) if isinstance(n, nodes.Name)] if sections else []
    heads = {n.partition(".")[0] for n in names if _key(n, sections) != n}
    if not heads:
        return statement
    alone = heads - {*names}

    def change(node: AttrsInstance) -> AttrsInstance | None:
        return evolve(node, path=_key(node.path, sections)) if isinstance(node, nodes.Name) else None

    def kept(items: Sequence[nodes.ModelItem | nodes.LayoutItem]) -> tuple[nodes.ModelItem | nodes.LayoutItem, ...]:
        out: list[nodes.ModelItem | nodes.LayoutItem] = []
        for item in items:
            if isinstance(item, nodes.Let):
                item = evolve(item, bindings=tuple(b for b in item.bindings if b.name not in alone))
            if not isinstance(item, nodes.Let) or item.bindings:
                out.append(item)
        return tuple(out)

    made = rewritten(statement, change)
    return cast(Item, evolve(made, items=kept(made.items))) if isinstance(made, nodes.Model | nodes.Layout) else made  # type: ignore[arg-type]
