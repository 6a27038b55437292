"""Read-back: every written byte is read from the disk and compared.

Tiles are compared with their digests, bytes that are no payload with themselves. Tiles that are durable are read back
while later ones are moved and synced: by a thread of its own, and by those that have no more to move. Pages that have
bytes that are written after all tiles are left for the end. If tiles end within a page, it holds bytes of several: a
tile is ready once nothing more is written to its pages.
"""

from __future__ import annotations

import mmap
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import numpy as np
import xxhash
from numpy.typing import NDArray

from ucpl.digests import crc32
from ucpl.errors import Label, fail
from ucpl.runtime.buffers import Workspace
from ucpl.runtime.failpoints import failpoint
from ucpl.runtime.options import DataPlane
from ucpl.runtime.targets import TargetFiles
from ucpl.runtime.tiles import DoneTiles
from ucpl.runtime.worker_pool import EVERY, Queue, run_through

__all__ = ["Parts", "ReadBack", "holds"]

_PAGE_BITS = mmap.PAGESIZE.bit_length() - 1
_FILE_BITS = 63 - 23  # pages of a file of 2^52 bytes

Number = TypeVar("Number", int, NDArray[np.int64])
Parts = Sequence[tuple[int, bytes]]  # (byte position, bytes) of one file


class ReadBack:
    """Tiles of a target that are read back, or can be.

    One thread calls `durable`, in between the others' calls.
    """

    def __init__(self, files: TargetFiles, known: DoneTiles, plane: DataPlane) -> None:
        self._files, self._known, self._plane = files, known, plane
        tiles = known.tiles
        self._first = _page(tiles.file, tiles.position)  # (tiles,) ascending, as the next
        self._last = _page(tiles.file, tiles.position + tiles.size - 1)
        self._is_read = np.zeros(len(tiles), np.bool_)
        self._waiting: list[int] = []  # durable, and a neighbour in one of their pages is not
        self._is_late = np.zeros(len(tiles), np.bool_)  # something is written to a page of theirs when all is moved
        self._ready: deque[int] = deque()
        self._news = threading.Condition()  # some are ready

    def durable(self, indexes: Iterable[int]) -> None:
        """These tiles were synced, and `known` says so. Raises: UcplError E503."""
        tiles = self._known.tiles
        waiting: list[int] = []
        some: list[int] = []
        for i in (*self._waiting, *indexes):
            if self._is_late[i]:
                continue
            mates = self._sharing(self._first[i], self._last[i])
            (some if self._known.done[mates].all() else waiting).append(i)
        self._waiting = waiting
        for i in sorted(some):
            self._files.forget(int(tiles.file[i]), int(tiles.position[i]), int(tiles.size[i]))
            self._ready.append(i)
        self.look()

    def look(self) -> None:
        """Wake waiting threads: there are more tiles, or all are moved."""
        with self._news:
            self._news.notify_all()

    def read_along(self, stop: threading.Event, moved: threading.Event, space: Workspace) -> None:
        """Read back durable tiles until all are moved and read back.

        Raises: UcplError E505.
        """
        while not stop.is_set():
            is_all = moved.is_set()  # before it is looked whether there is more
            if (i := self._take()) is None:
                if is_all:
                    return
                with self._news:
                    self._news.wait(EVERY)
                continue
            begin = time.perf_counter()
            self._one(i, space)
            if not is_all:
                self._plane.counters.add(beside=time.perf_counter() - begin)

    def _take(self) -> int | None:
        """A tile that is ready, for the first thread that asks."""
        try:
            return self._ready.popleft()
        except IndexError:
            return None

    def late(self, file: int, position: int, size: int) -> None:
        """Reserve a range that is written when all tiles are moved.

        Tiles that share a page with it wait until then.
        """
        first, last = _page(file, position), _page(file, position + size - 1)
        self._is_late[self._sharing(first, last)] = True

    def _sharing(self, first: int, last: int) -> slice:
        """Tiles that have bytes in these pages."""
        return slice(np.searchsorted(self._last, first), np.searchsorted(self._first, last, "right"))

    def rest(
        self, beside: Sequence[Parts], mine: NDArray[np.bool_], meanwhile: Callable[[], None] | None = None
    ) -> None:
        """Read back the rest of `mine`.

        `beside[f]` are the bytes of file f that are no payload. meanwhile: called from time to time. Raises: UcplError
        E505, and errors of `meanwhile`.
        """
        left = np.flatnonzero(~self._is_read & mine)
        queue = Queue(len(left) + len(beside))

        def work(stop: threading.Event) -> None:
            with Workspace(self._plane.share, self._plane.budget) as space:
                while not stop.is_set() and (i := queue.take()) is not None:
                    if i < len(left):
                        self._one(int(left[i]), space)
                    else:
                        self._parts(i - len(left), beside[i - len(left)])

        run_through(queue, work, self._plane.workers, meanwhile)

    def _parts(self, file: int, parts: Parts) -> None:
        for position, data in parts:
            if not holds(self._files, file, position, data):
                _differs(self._files, file, position, len(data))
            self._plane.counters.add(read_back=len(data))

    def _one(self, i: int, space: Workspace) -> None:
        files, known, tiles = self._files, self._known, self._known.tiles
        size, file, position = int(tiles.size[i]), int(tiles.file[i]), int(tiles.position[i])
        failpoint("read-back")
        view = space.tile_view[:size]
        if files.read(file, view, position) != size or xxhash.xxh3_64_intdigest(view) != int(known.xxh3[i]):
            _differs(files, file, position, size)
        if known.from_journal[i] and crc32(view) != int(known.crc[i]):  # the CRC that readers will hold it against
            _differs(files, file, position, size)
        self._is_read[i] = True
        self._plane.counters.add(read_back=size)


def _page(file: Number, position: Number) -> Number:
    """Numbers of pages, over all files."""
    return (file << _FILE_BITS) + (position >> _PAGE_BITS)


def holds(files: TargetFiles, file: int, position: int, data: bytes) -> bool:
    """True if a file has these bytes at this position.

    Raises: UcplError E503.
    """
    found = bytearray(len(data))
    return files.read(file, memoryview(found), position) == len(data) and found == data


def _differs(files: TargetFiles, file: int, position: int, size: int) -> None:
    path = files.path(file)
    fail("E505", f"{path}: bytes {position} to {position + size} differ from the written ones", Label(str(path)))
