"""A watch on headers.

Errors of the disk have a place, files an identity. A trainer that saves to the same place again writes other files
under the same names: code that moves data by the headers of the old ones must see that.
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
    """The identity of a file, which changes with its content."""

    size: int
    mtime_ns: int
    inode: int
    device: int

    @staticmethod
    def of(status: os.stat_result) -> Identity:
        """The identity of a file; of a remote one, from the store.

        Raises: OSError if it is missing there.
        """
        known = identity_of(status)
        if known is not None:
            return Identity(*known)
        return Identity(status.st_size, status.st_mtime_ns, status.st_ino, status.st_dev)


_SEEN: ContextVar[dict[str, Identity] | None] = ContextVar("seen", default=None)


def saw(path: Path, status: os.stat_result) -> None:
    """Record an opened file; later reads must find this identity."""
    if (seen := _SEEN.get()) is not None:
        seen.setdefault(str(path), Identity.of(status))


@contextmanager
def reading(path: str | Path) -> Iterator[None]:
    """Turn errors of the operating system into errors with a place.

    It is the call's place, or this one. Raises: UcplError E400.
    """
    try:
        yield
    except OSError as error:
        where = os.fsdecode(error.filename) if isinstance(error.filename, (str, bytes)) else str(path)
        fail("E400", f"{where} cannot be read: {error.strerror or error}", Label(where))


def walked(top: Path) -> Iterator[tuple[str, list[str], list[str]]]:
    """As `os.walk`, with an error for folders that cannot be listed.

    Raises: UcplError E400.
    """

    def refuse(error: OSError) -> None:
        with reading(top):
            raise error

    return os.walk(top, onerror=refuse)


def watched(call: Callable[P, Opened]) -> Callable[P, Opened]:
    """A function that reads headers, and records the files that it opens.

    They are recorded in the checkpoint.
    """

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
