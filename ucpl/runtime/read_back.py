"""What was written, once more from the disk: every tile against its digest, and every byte that is no payload as it is.

Tiles that are durable are read back beside those that are still moved, the rest once all are synced. A page holds bytes of
several tiles where they end within it: a tile counts once nothing is written any more to a page that it has bytes in.
"""

from __future__ import annotations

import mmap
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import TypeVar

import numpy as np
import xxhash
from numpy.typing import NDArray

from ucpl.digests import crc32
from ucpl.errors import Label, fail
from ucpl.runtime.buffers import Workspace
from ucpl.runtime.crew import EVERY, Queue, run_crew
from ucpl.runtime.known import Known
from ucpl.runtime.options import DataPlane
from ucpl.runtime.targets import TargetFiles

__all__ = ["Parts", "ReadBack", "holds"]

_PAGE_BITS = mmap.PAGESIZE.bit_length() - 1
_FILE_BITS = 63 - 23  # pages of a file of 2^52 bytes

Number = TypeVar("Number", int, NDArray[np.int64])
Parts = Sequence[tuple[int, bytes]]  # (byte position, bytes) of one file


class ReadBack:
    """Which tiles of a target were read back, and which can be. `durable` is called by one thread, in between the others'."""

    def __init__(self, files: TargetFiles, known: Known, plane: DataPlane) -> None:
        self._files, self._known, self._plane = files, known, plane
        tiles = known.tiles
        self._first = _page(tiles.file, tiles.position)  # (tiles,) ascending, as the next
        self._last = _page(tiles.file, tiles.position + tiles.size - 1)
        self._is_read = np.zeros(len(tiles), np.bool_)
        self._waiting: list[int] = []  # durable, and a neighbour in one of their pages is not
        self._ready: deque[int] = deque()

    def durable(self, indexes: Iterable[int]) -> None:
        """These tiles were synced, and `known` says so. Raises: UcplError E503."""
        waiting: list[int] = []
        some: list[int] = []
        for i in (*self._waiting, *indexes):
            first, last = self._first[i], self._last[i]
            mates = slice(np.searchsorted(self._last, first), np.searchsorted(self._first, last, "right"))
            (some if self._known.done[mates].all() else waiting).append(i)
        self._waiting = waiting
        tiles = self._known.tiles
        for i in sorted(some):
            self._files.forget(int(tiles.file[i]), int(tiles.position[i]), int(tiles.size[i]))
            self._ready.append(i)

    def beside(self, stop: threading.Event, moved: threading.Event) -> None:
        """Read back what is durable, until all is moved. Raises: UcplError E505."""
        with Workspace(self._plane.share, self._plane.budget) as space:
            while not (stop.is_set() or moved.is_set()):
                if not self._ready:
                    moved.wait(EVERY)
                    continue
                begin = time.perf_counter()
                self._one(self._ready.popleft(), space)
                self._plane.counters.add(beside=time.perf_counter() - begin)

    def written(self, file: int, position: int, size: int) -> None:
        """Bytes that are no payload were written: what shares a page with them is read back once more."""
        first, last = _page(file, position), _page(file, position + size - 1)
        self._is_read[np.searchsorted(self._last, first) : np.searchsorted(self._first, last, "right")] = False

    def rest(self, beside: Sequence[Parts]) -> None:
        """All that was not read back yet. `beside[f]` are the bytes of file f that are no payload. Raises: UcplError E505."""
        left = np.flatnonzero(~self._is_read)
        queue = Queue(len(left))

        def work(stop: threading.Event) -> None:
            with Workspace(self._plane.share, self._plane.budget) as space:
                while not stop.is_set() and (i := queue.take()) is not None:
                    self._one(int(left[i]), space)

        run_crew([work] * self._plane.workers)
        for file, parts in enumerate(beside):
            for position, data in parts:
                if not holds(self._files, file, position, data):
                    _differs(self._files, file, position, len(data))
                self._plane.counters.add(read_back=len(data))

    def _one(self, i: int, space: Workspace) -> None:
        files, known, tiles = self._files, self._known, self._known.tiles
        size, file, position = int(tiles.size[i]), int(tiles.file[i]), int(tiles.position[i])
        view = space.tile_view[:size]
        if files.read(file, view, position) != size or xxhash.xxh3_64_intdigest(view) != int(known.xxh3[i]):
            _differs(files, file, position, size)
        if known.told[i] and crc32(view) != int(known.crc[i]):  # the CRC that readers will hold it against
            _differs(files, file, position, size)
        self._is_read[i] = True
        self._plane.counters.add(read_back=size)


def _page(file: Number, position: Number) -> Number:
    """Numbers of pages, over all files."""
    return (file << _FILE_BITS) + (position >> _PAGE_BITS)


def holds(files: TargetFiles, file: int, position: int, data: bytes) -> bool:
    """Whether a file has these bytes there. Raises: UcplError E503."""
    found = bytearray(len(data))
    return files.read(file, memoryview(found), position) == len(data) and found == data


def _differs(files: TargetFiles, file: int, position: int, size: int) -> None:
    path = files.path(file)
    fail("E505", f"{path}: bytes {position} to {position + size} are not what was written", Label(str(path)))
