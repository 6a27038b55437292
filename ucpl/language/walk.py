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

__all__ = ["inside", "lowest_version", "rewritten", "walk"]

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


class _Readers(dict[type, Callable[[object], object] | None]):
    """Of each kind of record: the reader of these fields.

    It gives one value, or a tuple of several. None: there are no such fields.
    """

    def __missing__(self, kind: type) -> Callable[[object], object] | None:
        names = _fields(kind)
        self[kind] = attrgetter(*names) if names else None
        return self[kind]


_VALUES = _Readers()


def walk(*roots: AttrsInstance) -> list[AttrsInstance]:
    """Each record, then all that it holds, depth first."""
    found: list[AttrsInstance] = []
    todo: list[object] = [roots]  # records, tuples of them, and values that are neither
    while todo:
        one = todo.pop()
        kind = type(one)
        if type(one) is tuple:
            todo += one[::-1]
        elif kind not in _ATOMS:
            found.append(one)  # type: ignore[arg-type]
            values = _VALUES[kind]
            if values is not None:
                held = values(one)
                todo += held[::-1] if type(held) is tuple else (held,)
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
