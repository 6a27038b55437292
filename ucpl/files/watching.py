"""Headers are read under watch: what the disk refuses is an error with a place, and each file is known as it was when opened.

A trainer that saves into the same place again writes other files under the same names: whoever moves data by the headers of the
old ones must see that.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from pathlib import Path
from typing import ParamSpec, Protocol, TypeVar

from ucpl.errors import Label, fail
from ucpl.records import frozen
from ucpl.storage.reading import identity_of

__all__ = ["Identity", "reading", "saw", "walked", "watched"]

P = ParamSpec("P")
Opened = TypeVar("Opened", bound="_Remembers")


class _Remembers(Protocol):
    """A checkpoint."""

    @property
    def opened(self) -> dict[str, Identity]: ...


@frozen
class Identity:
    """What tells that a file is still the one that was opened."""

    size: int
    mtime_ns: int
    inode: int
    device: int

    @staticmethod
    def of(status: os.stat_result) -> Identity:
        """Of a remote file: what the store says of it. Raises: OSError, where it is gone there."""
        known = identity_of(status)
        if known is not None:
            return Identity(*known)
        return Identity(status.st_size, status.st_mtime_ns, status.st_ino, status.st_dev)


_SEEN: ContextVar[dict[str, Identity] | None] = ContextVar("seen", default=None)


def saw(path: Path, status: os.stat_result) -> None:
    """A file was opened. The first look counts: what is read of it later must still be that."""
    if (seen := _SEEN.get()) is not None:
        seen.setdefault(str(path), Identity.of(status))


@contextmanager
def reading(path: str | Path) -> Iterator[None]:
    """What the operating system refuses within is an error with a place: the call's, or this one. Raises: UcplError E400."""
    try:
        yield
    except OSError as error:
        where = os.fsdecode(error.filename) if isinstance(error.filename, (str, bytes)) else str(path)
        fail("E400", f"{where} cannot be read: {error.strerror or error}", Label(where))


def walked(top: Path) -> Iterator[tuple[str, list[str], list[str]]]:
    """As `os.walk`, from the top; but a folder that cannot be listed is no empty one. Raises: UcplError E400."""

    def refuse(error: OSError) -> None:
        with reading(top):
            raise error

    return os.walk(top, onerror=refuse)


def watched(call: Callable[P, Opened]) -> Callable[P, Opened]:
    """A function that reads headers of what its first path names: the files that it opens are remembered in the checkpoint."""

    @wraps(call)
    def under_watch(*args: P.args, **more: P.kwargs) -> Opened:
        path = next(a for a in args if isinstance(a, Path))
        outer = _SEEN.get()
        seen: dict[str, Identity] = {} if outer is None else outer
        token = _SEEN.set(seen)
        try:
            with reading(path):
                made = call(*args, **more)
                made.opened.update(seen)
                return made
        finally:
            _SEEN.reset(token)

    return under_watch
