"""What texts of domains said when they were read last: servers look many times a second, and texts of large jobs are long.

Kept is what is in a domain's folder, and nothing else: a generation that counts no more would be as large as the one that does.
A text that several domains have is taken apart once.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from contextlib import suppress
from threading import RLock
from typing import TypeVar
from weakref import WeakValueDictionary

from ucpl.remotes.vaults.records import mark_of

__all__ = ["keep", "known", "only"]

T = TypeVar("T")
FOLDERS_MAX = 4096  # those that were asked for last: more than a vault's domains
Known = dict[tuple[str, object], tuple[object, object]]  # name and question -> stamp of the text, what it says

_folders: dict[Hashable, Known] = {}
_asking = RLock()  # servers answer others in threads
_same: WeakValueDictionary[tuple[str, object, str], object] = WeakValueDictionary()


def known(folder: Hashable, name: str, what: object) -> tuple[object, object] | None:
    """The stamp of a text as it was read last, and what it said; None: it was not read, or said nothing."""
    with _asking:
        return _of(folder).get((name, what))


def keep(
    folder: Hashable, name: str, what: object, stamp: object, data: bytes, made: Callable[[bytes], T | None]
) -> T | None:
    """What a text says. what: which question `made` answers."""
    key = name, what, mark_of(data)
    found: T | None = _same.get(key)  # type: ignore[assignment]  # an answer to the same question
    if found is None:
        found = made(data)
    if found is not None:
        with _asking, suppress(TypeError):  # what no weak reference can be had of is short
            _of(folder)[name, what] = stamp, found
            _same[key] = found
    return found


def only(folder: Hashable, names: Iterable[str]) -> None:
    """Keep nothing of other texts."""
    there = set(names)
    with _asking:
        mine = _of(folder)
        for key in [key for key in mine if key[0] not in there]:
            del mine[key]


def _of(folder: Hashable) -> Known:
    mine = _folders.pop(folder, None)
    if mine is None:
        mine = {}
        while len(_folders) >= FOLDERS_MAX:
            _folders.pop(next(iter(_folders)), None)
    _folders[folder] = mine  # it was asked for last
    return mine
