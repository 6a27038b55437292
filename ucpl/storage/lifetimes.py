"""Lifetimes of temporary folders: those of their users, or of this process.

The creator of such a folder registers with `current_scope()` all that is released with it: files, descriptors, names and space.
Without that, a job that reads a vault again and again would keep open every generation that it has read. A callback may
run in the middle of anything, because Python collects garbage at any time: it must not wait for a lock that the
interrupted code may hold.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar

__all__ = ["Lifetime", "separate", "current_scope", "scoped", "owned_scope"]

_process = ExitStack()  # never closed: the rest is removed with the folder of the process
_now: ContextVar[ExitStack] = ContextVar("ends", default=_process)


def current_scope() -> ExitStack:
    """The stack of callbacks for folders that are created from now on."""
    return _now.get()


class Lifetime:
    """Folders that were created in `separate`.

    They are released when this is closed or collected.
    """

    def __init__(self, mine: ExitStack) -> None:
        self._end = weakref.finalize(self, _end, mine, os.getpid())
        self._end.atexit = False

    def close(self) -> None:
        self._end()


@contextmanager
def scoped() -> Iterator[None]:
    """Release at the end all that is created in the block.

    As a decorator: at the end of each call.
    """
    with separate():
        yield


@contextmanager
def separate() -> Iterator[Lifetime]:
    """Bind all that is created in the block to the result.

    If the block raises, it is released at once.
    """
    stack = ExitStack()
    mine = Lifetime(stack)
    before = _now.set(stack)
    try:
        yield mine
    except BaseException:
        mine.close()
        raise
    finally:
        _now.reset(before)


@contextmanager
def owned_scope() -> Iterator[Lifetime | None]:
    """`separate` for results of a call that the caller keeps.

    None: an outer call releases them.
    """
    if _now.get() is not _process:
        yield None
        return
    with separate() as mine:
        yield mine


def _end(mine: ExitStack, process: int) -> None:
    if os.getpid() == process:  # a fork leaves the folders to its parent
        mine.close()
