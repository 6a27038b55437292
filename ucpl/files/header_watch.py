"""Headers: a watch on their reads, and reads ahead in a store.

Errors of the disk have a place, files an identity. A trainer that saves to the same place again writes other files
under the same names: code that moves data by the headers of the old ones must see that.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from functools import wraps
from pathlib import Path
from typing import ParamSpec, Protocol, TypeVar

from ucpl.errors import Label, UcplError, fail
from ucpl.records import frozen
from ucpl.storage.reading import has_latency, identity_of

__all__ = ["Identity", "reading", "saw", "walked", "watched", "ahead"]

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


# ---- headers in an object store --------------------------------------------------------------------------------------


AT_ONCE = 16


def ahead(path: Path, reads: Sequence[Callable[[], object]]) -> None:
    """Do all of these reads at once, in an object store.

    `path` is one of the files. Raises: UcplError E685 if the store does not deliver the data.
    """
    if len(reads) < 2 or not _is_elsewhere(path):
        return
    from concurrent.futures import ThreadPoolExecutor  # most checkpoints are local files

    stop = threading.Event()

    def work(read: Callable[[], object]) -> None:
        if stop.is_set():
            return
        try:
            read()
        except UcplError as error:
            if error.is_of_the_disk:  # every other error is raised when the file is read in turn
                stop.set()
                raise

    with ThreadPoolExecutor(AT_ONCE, thread_name_prefix="ucpl-ahead") as pool:
        for done in [pool.submit(copy_context().run, work, read) for read in reads]:
            done.result()


def _is_elsewhere(path: Path) -> bool:
    try:
        return has_latency(os.stat(path))
    except OSError:  # who reads it says so
        return False
