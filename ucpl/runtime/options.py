"""Options of a run, and the state that its threads share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from ucpl.records import frozen
from ucpl.runtime.buffers import Budget, WorkerMemory
from ucpl.runtime.counters import Counters

__all__ = ["DataPlane", "Progress", "RunOptions"]

Progress = Callable[[int, int], None]  # (bytes of the target that are done, all of them)


@frozen
class RunOptions:
    """Options of the caller, with their defaults: the one list of them.

    Keywords of Python have these names.
    """

    memory: int = 512 << 20  # bytes of all buffers together
    workers: int = 2  # threads that move data
    resume: bool = False  # continue from an interrupted run
    force: bool = False  # replace a target that exists
    verify_source: bool = False  # read the rest of every storage that is touched, however much it is
    read_back: bool = True  # all that was written, from the disk, before it is published
    reflink: bool = True  # share complete blocks with the source if the file system can
    progress: Progress | None = None
    tag: str | None = None  # of the target's step, where its framework has one
    allow_globals: Sequence[str] = ()  # classes that its pickles may name
    look: Callable[[Path], None] | None = None  # called with the written files; its error keeps them from appearing


@frozen(eq=False)
class DataPlane:
    """Shared state of the workers of one run.

    The bytes that each may use, the count of all of them, and their costs.
    """

    workers: int
    share: WorkerMemory
    budget: Budget
    counters: Counters
