"""Where names of models and layouts come from: a file, what it imports, and the shipped specs."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from attrs import define, field, frozen

from ucpl.errors import Label, fail
from ucpl.layout.scope import at, nearest
from ucpl.resources import spec_files, spec_text
from ucpl.syntax import nodes, parse

IMPORT_LIMIT = 32  # files deep


@frozen
class Known:
    """A model, layout or plan, and the statements of the file that defines it (for its lets and asserts)."""

    node: nodes.Model | nodes.Layout | nodes.Plan
    file: nodes.File


@define
class Library:
    """Names that a text may use. Every file is parsed once, a shipped one when a name of it is asked for."""

    known: dict[str, Known] = field(factory=dict)
    files: dict[str, nodes.File] = field(factory=dict)
    shipped: bool = True

    def model(self, name: str, span: nodes.Span = nodes.NOWHERE) -> Known:
        return self._find(name, nodes.Model, "model", span)

    def layout(self, name: str, span: nodes.Span = nodes.NOWHERE) -> Known:
        return self._find(name, nodes.Layout, "layout", span)

    def plan(self, name: str, span: nodes.Span = nodes.NOWHERE) -> Known:
        return self._find(name, nodes.Plan, "plan", span)

    def _find(self, name: str, kind: type | tuple[type, ...], word: str, span: nodes.Span) -> Known:
        found = self.known.get(name)
        if found is not None and isinstance(found.node, kind):
            return found
        shipped = _index() if self.shipped else {}
        files = shipped.get(name, ())
        if len(files) > 1:
            fail(
                "E383",
                f"`{name}` is in {len(files)} of the shipped files: {', '.join(files)}",
                at(span) if span.line else Label("<command line>", where=name),
                remedy=f"say which: {files[0]}:{name}(...)",
            )
        if files and f"specs/{files[0]}" not in self.files:
            self._lend(_shipped(files[0]))
            return self._find(name, kind, word, span)
        names = [n for n, k in self.known.items() if isinstance(k.node, kind)]
        names += [n for n in shipped if n not in self.known]
        close = nearest(name, names)
        listed = ", ".join(sorted(names)[:20]) or "none"
        fail(
            "E110",
            f"no {word} is called `{name}`",
            at(span) if span.line else Label("<command line>", where=name),
            remedy=f"did you mean `{close}`?" if close else f"known {word}s: {listed}",
        )

    def add(self, file: nodes.File) -> None:
        self.files[file.name] = file
        for item in file.statements:
            if isinstance(item, nodes.Model | nodes.Layout | nodes.Plan):
                self.known[item.name] = Known(item, file)

    def _lend(self, file: nodes.File) -> None:
        """A shipped file and what it imports; names that are known already keep their meaning."""
        known = dict(self.known)
        for item in file.statements:
            if isinstance(item, nodes.Import) and f"specs/{item.file}" not in self.files:
                self._lend(_shipped(item.file))
        self.add(file)
        self.known.update(known)


def load(*texts: tuple[str, str], shipped: bool = True) -> Library:
    """A library of (name, text) files and what they import, over the shipped specs.

    `name` is a path: imports are found beside it, then among the shipped specs.
    """
    library = Library(shipped=shipped)
    for name, text in texts:
        _load(library, name, text, ())
    return library


_SHIPPED: dict[str, nodes.File] = {}
_HEAD = re.compile(r"^(?:model|layout|plan)[ \t]+(\w+|\"[^\"]+\")", re.MULTILINE)


@cache
def _index() -> dict[str, tuple[str, ...]]:
    """Which shipped files define a name, from the lines that begin a statement: nothing is parsed for it."""
    found: dict[str, list[str]] = {}
    for file, _ in spec_files():
        for name in dict.fromkeys(_HEAD.findall(spec_text(file))):
            found.setdefault(name.strip('"'), []).append(file)
    return {name: tuple(files) for name, files in found.items()}


def _shipped(name: str) -> nodes.File:
    if name not in _SHIPPED:
        _SHIPPED[name] = parse(spec_text(name), f"specs/{name}")
    return _SHIPPED[name]


def _load(library: Library, name: str, text: str, chain: tuple[str, ...]) -> nodes.File:
    if len(chain) > IMPORT_LIMIT:
        fail("E111", "imports are nested too deep", Label(chain[0], where=" -> ".join(chain[-3:])))
    file = parse(text, name)
    for item in file.statements:
        if isinstance(item, nodes.Import):
            _import(library, file, item, (*chain, name))
    library.add(file)
    return file


def _import(library: Library, file: nodes.File, item: nodes.Import, chain: tuple[str, ...]) -> None:
    beside = Path(file.name).parent / item.file
    if str(beside) in chain:
        fail("E111", f"{item.file} imports itself: {' -> '.join([*chain, str(beside)])}", at(item.span))
    if beside.is_file():
        found = _load(library, str(beside), beside.read_text(encoding="utf-8"), chain)
    elif item.file in dict(spec_files()):
        found = _shipped(item.file)
        library._lend(found)
        library.add(found)
    else:
        fail("E112", f'no file "{item.file}" beside {file.name} or among the shipped specs', at(item.span))
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
