"""Memory of the data plane: fixed buffers within one budget.

A worker owns a `tile` (bytes of the target as they are assembled), a `staging` (bytes of a source that must be read
together with others) and a `scratch` (values on their way through a cast or an accumulation). NumPy's allocations
during these steps are reserved here, too.
"""

from __future__ import annotations

import mmap
import threading

import numpy as np
from numpy.typing import NDArray

from ucpl.errors import Label, fail
from ucpl.records import frozen

__all__ = ["MEMORY_MIN", "TILE_MAX", "Budget", "WorkerMemory", "Workspace", "share_of"]

TILE_MAX = 1 << 20
_GRAIN = 4096
_VALUE_COST = 64  # bytes of NumPy temporaries and scratch for one element whose value changes, at most
MEMORY_MIN = 32 * _GRAIN  # for one worker

U8 = NDArray[np.uint8]


@frozen
class WorkerMemory:
    """Bytes that one worker may use.

    Together they are at most memory / workers, less a tile.
    """

    tile: int
    staging: int
    scratch: int  # `block` elements of up to 16 bytes
    temporaries: int
    block: int  # elements whose value changes at a time
    band: int  # of several tiles that are assembled at once, in place of a tile: a multiple of one

    @property
    def total(self) -> int:
        return self.band + self.staging + self.scratch + self.temporaries


def share_of(memory: int, workers: int) -> WorkerMemory:
    """Divide a budget.

    A tile is 1 MiB if there is room: larger ones were measured to be slower (they leave the cache). The room of one
    more tile is left over, for a tile that is read back while others move.

    Raises: UcplError E508 if the budget is too small for any tile.
    """
    each = memory // workers
    if each < MEMORY_MIN:
        fail(
            "E508",
            f"{memory} bytes of memory are too few for {workers} workers",
            Label("<command line>", where="--memory, --workers"),
            remedy=f"Give at least {MEMORY_MIN * workers} bytes (--memory), or fewer workers.",
        )
    tile = min(TILE_MAX, each // 4 // _GRAIN * _GRAIN)
    block = min(1 << 16, each // 4 // (_VALUE_COST + 16) // 64 * 64)
    others = tile + block * (16 + _VALUE_COST)
    band = (each - tile - others) // tile * tile
    return WorkerMemory(tile, tile, block * 16, block * _VALUE_COST, block, band)


class Budget:
    """Count of the live bytes of buffers.

    Tests compare its peak, `live_max`, with the budget.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.live = 0
        self.live_max = 0
        self._lock = threading.Lock()

    def take(self, size: int) -> None:
        with self._lock:
            self.live += size
            self.live_max = max(self.live_max, self.live)
            if self.live > self.limit:
                raise AssertionError(f"{self.live} bytes of buffers live, {self.limit} allowed")

    def give(self, size: int) -> None:
        with self._lock:
            self.live -= size


class Workspace:
    """Buffers of one worker, made once and reused for every tile.

    A context manager: leaving it returns the bytes.
    """

    def __init__(self, share: WorkerMemory, budget: Budget) -> None:
        self.share = share
        self._budget = budget
        self._taken = 0
        self.tile = self._array(share.tile)
        self.tile_view = self.tile.data
        self._staging: U8 | None = None
        self._scratch: U8 | None = None

    def __enter__(self) -> Workspace:
        return self

    def __exit__(self, *_: object) -> None:
        self._budget.give(self._taken)
        self._taken = 0

    def _take(self, size: int) -> None:
        self._budget.take(size)
        self._taken += size

    def _array(self, size: int) -> U8:
        """Anonymous memory with its own pages: positional reads land page by page."""
        self._take(size)
        return np.frombuffer(mmap.mmap(-1, size), dtype=np.uint8)

    def hold(self, size: int) -> None:
        """Make `tile` as large as a band, at most `share.band`."""
        if size <= len(self.tile):
            return
        old, self.tile, self.tile_view = len(self.tile), np.zeros(0, np.uint8), memoryview(b"")
        self._budget.give(old)
        self._taken -= old
        self.tile = self._array(size)
        self.tile_view = self.tile.data

    @property
    def staging(self) -> U8:
        if self._staging is None:
            self._staging = self._array(self.share.staging)
        return self._staging

    @property
    def scratch(self) -> U8:
        if self._scratch is None:
            self._scratch = self._array(self.share.scratch)
            self._take(self.share.temporaries)
        return self._scratch
