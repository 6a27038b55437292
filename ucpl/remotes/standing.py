"""For how long a folder stands for what lies elsewhere: as long as who asked for it, or else this process.

Who makes such a folder leaves with `ends()` what is to be let go of with it: its files, descriptors, names and room. Without
that, a job that reads a vault again and again keeps every generation that it has seen open. What is left there may be called in
the midst of anything, since garbage is collected whenever Python likes: it waits for no lock that who is interrupted may hold.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar

__all__ = ["Standing", "apart", "ends", "meanwhile", "owned"]

_process = ExitStack()  # never closed: what is left goes with the folder of the process
_now: ContextVar[ExitStack] = ContextVar("ends", default=_process)


def ends() -> ExitStack:
    """Where what stands for something else from now on ends."""
    return _now.get()


class Standing:
    """What was made `apart`: it ends when this is closed, or when nobody has it any more."""

    def __init__(self, mine: ExitStack) -> None:
        self._end = weakref.finalize(self, _end, mine, os.getpid())
        self._end.atexit = False

    def close(self) -> None:
        self._end()


@contextmanager
def meanwhile() -> Iterator[None]:
    """What is made meanwhile ends with this. As a decorator: with each call."""
    with apart():
        yield


@contextmanager
def apart() -> Iterator[Standing]:
    """What is made meanwhile ends with what this gives, or here where an error comes through."""
    stack = ExitStack()
    mine = Standing(stack)
    before = _now.set(stack)
    try:
        yield mine
    except BaseException:
        mine.close()
        raise
    finally:
        _now.reset(before)


@contextmanager
def owned() -> Iterator[Standing | None]:
    """`apart`, for what is given to a caller who keeps what it is read from; None: it ends with a call that goes on."""
    if _now.get() is not _process:
        yield None
        return
    with apart() as mine:
        yield mine


def _end(mine: ExitStack, process: int) -> None:
    if os.getpid() == process:  # a fork has what its parent goes on with
        mine.close()
