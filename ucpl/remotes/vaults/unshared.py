"""Descriptors of locks, which a process that is forked does not keep.

A lock of flock's is the open file's, and a fork has the same one: workers that load data would hold what their trainer held,
long after it died.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

__all__ = ["unshared"]


class _Opened:
    def __init__(self, fd: int) -> None:
        self.fd = fd
        state = os.fstat(fd)
        self.file = state.st_dev, state.st_ino

    def close(self) -> None:
        """Where others closed it, its number may be another file's."""
        with suppress(OSError):
            state = os.fstat(self.fd)
            if (state.st_dev, state.st_ino) == self.file:
                os.close(self.fd)


_opened: set[_Opened] = set()
_changing = threading.RLock()  # no fork sees a descriptor that is open and not listed, or listed and not open


@contextmanager
def unshared(path: Path, flags: int, within: int | None = None) -> Iterator[int]:
    """A descriptor, until the end of this or a fork, of this process alone. within: the folder's. Raises: OSError."""
    with _changing:
        mine = _Opened(os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600, dir_fd=within))
        _opened.add(mine)
    try:
        yield mine.fd
    finally:
        with _changing:
            if mine in _opened:  # in a child its number may be another file's by now
                _opened.remove(mine)
                mine.close()


def _in_child() -> None:
    try:
        for one in _opened:
            one.close()  # which lets go of nothing as long as the parent has it, too
    finally:
        _opened.clear()
        _changing.release()


os.register_at_fork(before=_changing.acquire, after_in_parent=_changing.release, after_in_child=_in_child)
