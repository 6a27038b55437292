"""Walk through every tree: records inside a record, and replacements.

The meaning of a record is not known here. A function that is for two kinds of record names these two, and no other.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from operator import attrgetter
from typing import TypeVar, cast

import attrs
from attrs import AttrsInstance

from ucpl.language.nodes import Copies, Span, Without

__all__ = ["children", "inside", "lowest_version", "rewritten", "walk"]

Record = TypeVar("Record", bound=AttrsInstance)
Change = Callable[[AttrsInstance], AttrsInstance | None]
_ATOMS = frozenset((str, int, bool, float, type(None), Span))  # kinds of values that hold no record
_WORDS = re.compile(r"\"[^\"]*\"|\w+")
_PLAIN = frozenset(("str", "int", "bool", "float", "None", "tuple", "Literal", "Span"))


@cache
def _fields(kind: type) -> tuple[str, ...]:
    """Fields of a kind of record whose types allow records."""
    return tuple(f.name for f in attrs.fields(kind) if not _is_plain(f.type))


def _is_plain(of: object) -> bool:
    return isinstance(of, str) and all(word in _PLAIN or word[0] == '"' for word in _WORDS.findall(of))


class _Getters(dict[type, Callable[[AttrsInstance], tuple[object, ...]] | None]):
    """Of each kind of record: the reader of these fields.

    None without fields.
    """

    def __missing__(self, kind: type) -> Callable[[AttrsInstance], tuple[object, ...]] | None:
        names = _fields(kind)
        get = attrgetter(*names) if names else None
        self[kind] = get if get is None or len(names) > 1 else lambda node: (get(node),)
        return self[kind]


_VALUES = _Getters()


def children(node: AttrsInstance) -> list[AttrsInstance]:
    """Records directly inside a record, in the order of the text."""
    found: list[AttrsInstance] = []
    values = _VALUES[type(node)]
    if values is not None:
        _gather(values(node), found)
    return found


def _gather(values: tuple[object, ...], found: list[AttrsInstance]) -> None:
    for one in values:
        if type(one) is tuple:
            _gather(one, found)
        elif type(one) not in _ATOMS:
            found.append(cast(AttrsInstance, one))


def walk(*roots: AttrsInstance) -> list[AttrsInstance]:
    """Each record, then all that it holds, depth first."""
    found: list[AttrsInstance] = []
    todo = [*roots[::-1]]
    while todo:
        node = todo.pop()
        found.append(node)
        values = _VALUES[type(node)]
        if values is not None:
            inner: list[AttrsInstance] = []
            _gather(values(node), inner)
            todo += inner[::-1]
    return found


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
    return value if type(value) in _ATOMS else rewritten(cast(AttrsInstance, value), change)


def lowest_version(*roots: AttrsInstance) -> int:
    """The lowest version of the language that can say these statements."""
    return 2 if any(isinstance(node, Copies | Without) for node in walk(*roots)) else 1
