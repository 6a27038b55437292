"""Finds the cause of an error: a trial value or the spec.

`pad(r, 0)` is wrong at every degree; `r@tp` with r = 6 is wrong at tp = 4. Names at the place of an error are followed to their
definitions. If the cause is not clear, the error counts as one of the trial value: a legal spec that only suits other degrees
is never rejected.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from attrs import AttrsInstance

from ucpl.errors import Diagnostic, Label
from ucpl.language import nodes
from ucpl.language.walk import walk
from ucpl.layout import Library
from ucpl.layout.axes import UnevenCut
from ucpl.layout.scope import at

__all__ = ["depends_on_trials", "same_place"]

# Errors that a spec can cause alone: by the number, the condition or the range at the place of the error.
_SAID_ALONE = frozenset(("E104", "E108", "E132", "E140", "E145", "E160", "E161", "E204", "E210"))


def same_place(one: Diagnostic, other: Diagnostic) -> bool:
    """The same thing at the same place of the text."""
    return one.code == other.code and [_place(x) for x in one.labels] == [_place(x) for x in other.labels]


def _place(label: Label) -> tuple[str, int | None, int | None, int]:
    return label.file, label.line, label.column, label.length


def depends_on_trials(found: Diagnostic, library: Library, given: Collection[str], *, has_config: bool) -> bool:
    """True if the error might be absent at other degrees.

    given: names that -D gives. has_config: the values `config.x` come from the caller.
    """
    if found.labels and found.labels[0].file == "<command line>":  # an error in -D
        return False
    if found.code not in _SAID_ALONE or not found.labels or found.labels[0].file not in library.files:
        return True
    file = library.files[found.labels[0].file]
    blamed = next((n for n in walk(*file.statements) if _spans(n, found.labels[0])), None)
    read = None if blamed is None else _read_by(blamed, found)
    if blamed is None or read is None:
        return True
    conditions = [c for holder in _around(file, blamed) for c in _conditions(holder)]
    names = {*_names(read), *_names(conditions)}
    return not all(_Fixed(library, given, has_config).has(name) for name in names)


def _spans(node: AttrsInstance, label: Label) -> bool:
    span = getattr(node, "span", nodes.NOWHERE)
    return bool(span.line) and _place(at(span)) == _place(label)


def _read_by(node: AttrsInstance, found: Diagnostic) -> list[AttrsInstance] | None:
    """The nodes at the place of an error that cause it.

    None: the error depends on the degrees.
    """
    match node:
        case nodes.Pad(multiple=multiple) if found.code == "E145":
            return [multiple]
        case nodes.Split() if found.code in ("E104", "E145"):
            return _numbers_of([node])
        case nodes.Assert(condition=condition):
            return [condition]
        case nodes.States(clauses=clauses) if found.code == "E210":
            return [*(c for c in clauses if c.word == "buckets")]
        case nodes.Entry(shape=shape) if found.code == "E204":
            splits = [n for n in walk(*(shape or ())) if isinstance(n, nodes.Split)]
            unnamed = any(isinstance(n, nodes.Any_ | nodes.Rest) for n in walk(*(shape or ())))
            if unnamed or len(splits) != 1 or not _is_stated(found):
                return None  # a cut in front of it takes a part of the dim, as many as it has ranks
            return [n for n in walk(*(shape or ())) if isinstance(n, nodes.Dim)] + _numbers_of(shape or ())
    return None if found.code == "E204" else [node]


def _is_stated(found: Diagnostic) -> bool:
    """True if a cut's sizes or units are wrong at every degree."""
    if not isinstance(found.about, UnevenCut):
        return False
    split = found.about.split
    return split.kind == "spread" or (split.kind == "sizes" and sum(split.sizes) != found.about.length)


def _numbers_of(shape: Iterable[AttrsInstance]) -> list[AttrsInstance]:
    """Numbers in an entry's pattern: of padding, pieces and grains."""
    found: list[AttrsInstance] = []
    for node in walk(*shape):
        match node:
            case nodes.Pad(multiple=multiple):
                found.append(multiple)
            case nodes.Split(sizes=sizes, grain=grain):
                found += [*sizes, *([grain] if grain is not None else [])]
    return found


def _around(file: nodes.File, node: AttrsInstance) -> Iterator[AttrsInstance]:
    """The statement at the place, and the statements around it."""
    open_ones: list[AttrsInstance] = list(file.statements)
    while open_ones:
        one = open_ones.pop()
        if any(inner is node for inner in walk(one)):
            yield one
            open_ones = list(getattr(one, "items", ()))


def _conditions(item: AttrsInstance) -> list[AttrsInstance]:
    when = getattr(item, "when", None)
    clauses = [c for c in getattr(item, "clauses", ()) if isinstance(c, nodes.Clause) and c.word == "when"]
    return [*([when] if when is not None else []), *clauses]


def _names(read: Iterable[AttrsInstance]) -> Iterator[str]:
    """All names in these nodes and in their parts."""
    for node in walk(*read):
        match node:
            case nodes.Name(path=name):
                yield name
            case nodes.Dim(name=name) | nodes.Index(name=name):
                yield name
            case nodes.Dimension(name=str(name)):
                yield name
            case nodes.Split(mesh_axis=name):
                yield name
            case nodes.Mesh(axes=axes):
                yield from axes


class _Fixed:
    """Names with a value from the specs or the caller.

    Their values do not depend on parameters without a default.
    """

    def __init__(self, library: Library, given: Collection[str], has_config: bool) -> None:
        self.given, self.has_config = given, has_config
        self.values: dict[str, list[nodes.Expr]] = {}
        self.placed: set[str] = set()  # parameters: a call may set them
        self.seen: set[str] = set()
        for node in walk(*(s for file in library.files.values() for s in file.statements)):
            match node:
                case nodes.Binding(name=name, value=value):
                    self.values.setdefault(name, []).append(value)
                case nodes.Parameter(name=name):
                    self.placed.add(name)
                case nodes.Index(axis=axis):  # the size of one digit may be computed from the size of the dim
                    self.placed.update(n.name for n in walk(axis) if isinstance(n, nodes.Dim) and n.name != node.name)

    def has(self, name: str) -> bool:
        if name.startswith("config."):
            return self.has_config
        if name in self.placed:
            return False
        if name in self.given or name in self.seen:
            return True
        self.seen.add(name)
        return name in self.values and all(self.has(inner) for v in self.values[name] for inner in _names([v]))
