"""Walk through every tree: records inside a record, and replacements.

The meaning of a record is not known here. A function that is for two kinds of record names these two, and no other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import TypeVar, cast

import attrs
from attrs import AttrsInstance

from ucpl.language.nodes import Copies, Span, Without

__all__ = ["children", "inside", "lowest_version", "rewritten", "walk"]

Record = TypeVar("Record", bound=AttrsInstance)
Change = Callable[[AttrsInstance], AttrsInstance | None]


@cache
def _fields(kind: type) -> tuple[str, ...]:
    """Fields of a kind of record that can hold records.

    Its span never does.
    """
    return tuple(f.name for f in attrs.fields(kind) if f.name != "span")


_RECORDS: dict[type, bool] = {}  # of each kind of value that was met in a tree


def _is_record(value: object) -> bool:
    kind = type(value)
    known = _RECORDS.get(kind)
    if known is None:
        known = _RECORDS[kind] = attrs.has(kind) and not issubclass(kind, Span)
    return known


def children(node: AttrsInstance) -> list[AttrsInstance]:
    """Records directly inside a record, in the order of the text."""
    found: list[AttrsInstance] = []
    for name in _fields(type(node)):
        value = getattr(node, name)
        if type(value) is not str and value is not None:  # most hold a word, or nothing
            _gather(value, found)
    return found


def _gather(value: object, found: list[AttrsInstance]) -> None:
    if isinstance(value, tuple):
        for one in value:
            _gather(one, found)
    elif _is_record(value):
        found.append(cast(AttrsInstance, value))


def walk(*roots: AttrsInstance) -> Iterator[AttrsInstance]:
    """Each record, then all that it holds, depth first."""
    todo = [*reversed(roots)]
    while todo:
        node = todo.pop()
        yield node
        todo += reversed(children(node))


def rewritten(node: Record, change: Change) -> Record:
    """The tree with records replaced by the results of `change`.

    If it gives None, the contents of the record are walked. A record that is replaced is not walked again. An unchanged
    part is the same object as before.
    """
    made = change(node)
    return cast(Record, made) if made is not None else inside(node, change)


def inside(node: Record, change: Change) -> Record:
    """The record itself, with its contents rewritten."""
    changed: dict[str, object] = {}
    for name in _fields(type(node)):
        before = getattr(node, name)
        after = _rewritten(before, change)
        if after is not before:
            changed[name] = after
    return attrs.evolve(node, **changed) if changed else node  # type: ignore[misc]


def _rewritten(value: object, change: Change) -> object:
    if isinstance(value, tuple):
        new = tuple([_rewritten(one, change) for one in value])
        return new if any(a is not b for a, b in zip(new, value, strict=True)) else value
    return rewritten(cast(AttrsInstance, value), change) if _is_record(value) else value


def lowest_version(*roots: AttrsInstance) -> int:
    """The lowest version of the language that can say these statements."""
    return 2 if any(isinstance(node, Copies | Without) for node in walk(*roots)) else 1
