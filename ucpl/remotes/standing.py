"""For how long a folder stands for what lies elsewhere: as long as who asked for it, or else this process.

Who makes such a folder leaves with `ends()` what is let go of with it: its files, descriptors, names and room. Without that, a
job that reads a vault again and again keeps every generation that it has seen open.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar

__all__ = ["ending_with", "ends", "meanwhile"]

_process = ExitStack()  # never closed: what is left goes with the folder of the process
_now: ContextVar[ExitStack] = ContextVar("ends", default=_process)


def ends() -> ExitStack:
    """Where what stands for something else from now on ends."""
    return _now.get()


@contextmanager
def meanwhile() -> Iterator[None]:
    """What is made meanwhile ends with this. As a decorator: with each call."""
    mine, process = ExitStack(), os.getpid()
    before = _now.set(mine)
    try:
        yield
    finally:
        _now.reset(before)
        _end(mine, process)


@contextmanager
def ending_with(owner: object) -> Iterator[Callable[[], None]]:
    """What is made meanwhile ends with `owner`, or when what this gives is called, or here where an error comes through."""
    mine = ExitStack()
    end = weakref.finalize(owner, _end, mine, os.getpid())
    end.atexit = False
    before = _now.set(mine)
    try:
        yield end
    except BaseException:
        end()
        raise
    finally:
        _now.reset(before)


def _end(mine: ExitStack, process: int) -> None:
    if os.getpid() == process:  # a fork has what its parent goes on with
        mine.close()
