"""Open files of several threads: each thread has its own descriptors.

Together they stay below the limit of the process. Shards may be thousands and `ulimit -n` 256; the data plane leaves
some for sockets, journals and modules. Not here: opening a file.
"""

from __future__ import annotations

import os
import resource
import threading
from collections import OrderedDict
from contextlib import nullcontext, suppress

from attrs import field

from ucpl.records import define
from ucpl.runtime.disk import disk

__all__ = ["Descriptors"]

OPEN_MAX = 128  # of one thread: more gain nothing
OPEN_MIN = 2
RESERVED = 56  # for all else that a run opens
SETS = 2  # of descriptors that a run has: a source's and a target's
THREADS = 4  # that are reckoned with at least: so a share does not shrink as they come


def _open_now() -> int:
    """Number of descriptors of this process.

    If the system does not report it, the three that every process has.
    """
    with suppress(OSError):
        return len(os.listdir("/dev/fd"))
    return 3


@define(eq=False)
class Descriptors:
    """Descriptors by file number, for each thread.

    The least recently used are closed.
    """

    _local: threading.local = field(factory=threading.local)
    _all: list[OrderedDict[int, int]] = field(factory=list)
    _lock: threading.Lock = field(factory=threading.Lock)
    _taken: int = field(factory=_open_now)  # of the process: a job may have most of its own open already

    def _table(self) -> OrderedDict[int, int]:
        table: OrderedDict[int, int] | None = getattr(self._local, "table", None)
        if table is None:
            table = self._local.table = OrderedDict()
            with self._lock:
                self._all.append(table)
        return table

    def get(self, file: int) -> int | None:
        """The descriptor that this thread has of a file."""
        table = self._table()
        fd = table.get(file)
        if fd is not None:
            table.move_to_end(file)
        return fd

    def keep(self, file: int, fd: int) -> int:
        """Have one more; the oldest are closed where they are too many."""
        table = self._table()
        table[file] = fd
        share = self._share()
        while len(table) > share:
            disk().close(table.popitem(last=False)[1])
        return fd

    def _share(self) -> int:
        """Number of descriptors that this thread may have."""
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft == resource.RLIM_INFINITY:
            return OPEN_MAX
        threads = max(THREADS, len(self._all), threading.active_count())
        return max(OPEN_MIN, min(OPEN_MAX, (soft - self._taken - RESERVED) // (SETS * threads)))

    def close(self, *, quietly: bool = False) -> None:
        """Close all; quietly, if errors in closing do not matter.

        No other thread may be using one. Raises: OSError.
        """
        with self._lock:
            for table in self._all:
                while table:
                    with suppress(OSError) if quietly else nullcontext():
                        disk().close(table.popitem()[1])
