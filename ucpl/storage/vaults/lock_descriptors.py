"""Descriptors of locks that a fork does not keep.

A lock of flock belongs to the open file, and a fork shares it: data loader workers would hold the lock of their trainer
long after its death.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

__all__ = ["open_unshared"]


class _Opened:
    def __init__(self, fd: int) -> None:
        self.fd = fd
        state = os.fstat(fd)
        self.file = state.st_dev, state.st_ino

    def close(self) -> None:
        """Close it; if others closed it, its number may be another file."""
        with suppress(OSError):
            state = os.fstat(self.fd)
            if (state.st_dev, state.st_ino) == self.file:
                os.close(self.fd)


_opened: set[_Opened] = set()
_changing = threading.RLock()  # no fork sees a descriptor that is open and not listed, or listed and not open


@contextmanager
def open_unshared(path: Path, flags: int, within: int | None = None) -> Iterator[int]:
    """A descriptor of this process, until its end or a fork.

    within: the descriptor of the folder.
    Raises: OSError.
    """
    with _changing:
        mine = _Opened(os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600, dir_fd=within))
        _opened.add(mine)
    try:
        yield mine.fd
    finally:
        with _changing:
            if mine in _opened:  # in a child its number may be another file
                _opened.remove(mine)
                mine.close()


def _in_child() -> None:
    try:
        for one in _opened:
            one.close()  # keeps the lock if the parent has it too
    finally:
        _opened.clear()
        _changing.release()


os.register_at_fork(before=_changing.acquire, after_in_parent=_changing.release, after_in_child=_in_child)
