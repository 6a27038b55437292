"""A cache of the parsed texts of domains.

Servers read the texts many times a second, and texts of large jobs are long. Only texts that exist in a domain's folder
are kept: a removed generation would need as much memory as the current one. Equal texts of several domains are parsed
once.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from contextlib import suppress
from threading import RLock
from typing import TypeVar
from weakref import WeakValueDictionary

from ucpl.storage.vaults.records import text_digest

__all__ = ["keep", "cached", "keep_only"]

T = TypeVar("T")
FOLDERS_MAX = 4096  # those that were asked for last: more than a vault's domains
Known = dict[tuple[str, object], tuple[object, object]]  # name and question -> stamp of the text, content

_folders: dict[Hashable, Known] = {}
_asking = RLock()  # servers answer others in threads
_same: WeakValueDictionary[tuple[str, object, str], object] = WeakValueDictionary()


def cached(folder: Hashable, name: str, question: object) -> tuple[object, object] | None:
    """The stamp and content of a text at its last read.

    None: it was not read, or had no content.
    """
    with _asking:
        return _of(folder).get((name, question))


def keep(
    folder: Hashable, name: str, question: object, stamp: object, data: bytes, made: Callable[[bytes], T | None]
) -> T | None:
    """Parse and cache a text. question: the question that `made` answers."""
    key = name, question, text_digest(data)
    found: T | None = _same.get(key)  # type: ignore[assignment]  # an answer to the same question
    if found is None:
        found = made(data)
    if found is not None:
        with _asking, suppress(TypeError):  # objects without weak references are short
            _of(folder)[name, question] = stamp, found
            _same[key] = found
    return found


def keep_only(folder: Hashable, names: Iterable[str]) -> None:
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
