"""How a plan is run: what the caller may choose, and what the threads of one run share."""

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
    """What a caller chooses: the one list of it, with what holds where nothing is said. Keywords of Python have these names."""

    memory: int = 512 << 20  # bytes of all buffers together
    workers: int = 2  # threads that move data
    resume: bool = False  # go on from what an interrupted run left
    force: bool = False  # replace a target that exists
    verify_source: bool = False  # read the rest of every storage that is touched, however much it is
    read_back: bool = True  # all that was written, from the disk, before it is published
    reflink: bool = True  # share whole blocks with the source where the file system can
    progress: Progress | None = None
    tag: str | None = None  # of the target's step, where its framework has one
    allow_globals: Sequence[str] = ()  # classes that its pickles may name
    look: Callable[[Path], None] | None = None  # at what was written; what it raises keeps that from appearing


@frozen(eq=False)
class DataPlane:
    """What the workers of one run share: the bytes that each may use, the count of all of them, and what they cost."""

    workers: int
    share: WorkerMemory
    budget: Budget
    counters: Counters
