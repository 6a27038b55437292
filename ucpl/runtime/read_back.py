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
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import xxhash
from numpy.typing import NDArray

from ucpl.digests import crc32
from ucpl.errors import Label, fail
from ucpl.runtime.buffers import Workspace
from ucpl.runtime.failpoints import failpoint
from ucpl.runtime.options import DataPlane
from ucpl.runtime.targets import NEAR, SPAN, Parts, TargetFiles, clusters
from ucpl.runtime.tiles import DoneTiles
from ucpl.runtime.worker_pool import EVERY, Queue, run_through

__all__ = ["ReadBack", "holds"]

_PAGE_BITS = mmap.PAGESIZE.bit_length() - 1
_FILE_BITS = 63 - 23  # pages of a file of 2^52 bytes

I64 = NDArray[np.int64]


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
        self._waiting = np.zeros(0, np.int64)  # durable, and a neighbour in one of their pages is not
        self._is_late = np.zeros(len(tiles), np.bool_)  # something is written to a page of theirs when all is moved
        self._ready: deque[range] = deque()
        self._news = threading.Condition()  # some are ready

    def durable(self, indexes: Iterable[int]) -> None:
        """These tiles were synced, and `known` says so. Raises: UcplError E503."""
        tiles = self._known.tiles
        some = np.concatenate([self._waiting, np.fromiter(indexes, np.int64)])
        some = some[~self._is_late[some]]
        low, high = self._sharing(self._first[some], self._last[some])
        undone = np.append(0, np.cumsum(~self._known.done))  # before each tile
        is_ready = undone[low] == undone[high]
        self._waiting = some[~is_ready]
        for near in self._neighbours(np.sort(some[is_ready])):
            begin, last = int(tiles.position[near[0]]), near[-1]
            end = int(tiles.position[last] + tiles.size[last])
            self._files.forget(int(tiles.file[last]), begin, end - begin)
            self._ready.append(near)
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
            if (some := self._take()) is None:
                if is_all:
                    return
                with self._news:
                    self._news.wait(EVERY)
                continue
            begin = time.perf_counter()
            self._some(some, space)
            if not is_all:
                self._plane.counters.add(beside=time.perf_counter() - begin)

    def _take(self) -> range | None:
        """Tiles that are ready, for the first thread that asks."""
        try:
            return self._ready.popleft()
        except IndexError:
            return None

    def _neighbours(self, some: I64) -> Iterator[range]:
        """Divide tiles into runs of neighbours, each for one read."""
        tiles = self._known.tiles
        file, position = tiles.file[some], tiles.position[some]
        stop = position + tiles.size[some]
        apart = (np.diff(some) != 1) | (np.diff(file) != 0) | (position[1:] - stop[:-1] > NEAR)
        rows = zip(some.tolist(), position.tolist(), stop.tolist(), [True, *apart.tolist()], strict=False)
        first = begin = end = 0
        most = min(SPAN, self._plane.share.tile)
        for i, low, high, is_apart in rows:
            if is_apart or high - begin > most:
                if end:
                    yield range(first, end)
                first, begin = i, low
            end = i + 1
        if end:
            yield range(first, end)

    def late(self, file: int, parts: Parts) -> None:
        """Reserve parts of a file that are written last.

        Tiles that share a page with them wait until then.
        """
        position = np.array([at for at, data in parts if data], np.int64)
        size = np.array([len(data) for _, data in parts if data], np.int64)
        low, high = self._sharing(_page(file, position), _page(file, position + size - 1))
        open_ = np.zeros(len(self._is_late) + 1, np.int64)  # parts that begin at a tile, less those that end there
        np.add.at(open_, low, 1)
        np.add.at(open_, high, -1)
        self._is_late |= np.cumsum(open_)[:-1] > 0

    def _sharing(self, first: I64, last: I64) -> tuple[I64, I64]:
        """Tiles with bytes in these pages: the first, and the end."""
        return np.searchsorted(self._last, first), np.searchsorted(self._first, last, "right")

    def rest(
        self, beside: Sequence[Parts], mine: NDArray[np.bool_], meanwhile: Callable[[], None] | None = None
    ) -> None:
        """Read back the rest of `mine`.

        `beside[f]` are the bytes of file f that are no payload. meanwhile: called from time to time. Raises: UcplError
        E505, and errors of `meanwhile`.
        """
        left = list(self._neighbours(np.flatnonzero(~self._is_read & mine)))
        queue = Queue(len(left) + len(beside))

        def work(stop: threading.Event) -> None:
            with Workspace(self._plane.share, self._plane.budget) as space:
                while not stop.is_set() and (i := queue.take()) is not None:
                    if i < len(left):
                        self._some(left[i], space)
                    else:
                        self._parts(i - len(left), beside[i - len(left)])

        run_through(queue, work, self._plane.workers, meanwhile)

    def _parts(self, file: int, parts: Parts) -> None:
        for some in clusters(parts):
            begin, size = some[0][0], some[-1][0] + len(some[-1][1]) - some[0][0]
            room = bytearray(size)
            if self._files.read(file, memoryview(room), begin) != size:
                _differs(self._files, file, begin, size)
            for position, data in some:
                at = position - begin
                if room[at : at + len(data)] != data:
                    _differs(self._files, file, position, len(data))
            self._plane.counters.add(read_back=sum(len(data) for _, data in some))

    def _some(self, some: range, space: Workspace) -> None:
        """Read neighbours, or a single tile, at once. Raises: UcplError E505."""
        files, known, tiles = self._files, self._known, self._known.tiles
        cut = slice(some.start, some.stop)
        file, begin = int(tiles.file[some.start]), int(tiles.position[some.start])
        positions, sizes = tiles.position[cut].tolist(), tiles.size[cut].tolist()
        whole = space.tile_view[: positions[-1] + sizes[-1] - begin]
        failpoint("read-back")
        got = files.read(file, whole, begin)
        rows = zip(
            positions, sizes, known.xxh3[cut].tolist(), known.crc[cut].tolist(), known.from_journal[cut].tolist(),
            strict=True,
        )  # fmt: skip
        for position, size, xxh3, crc, is_old in rows:
            view = whole[position - begin : position - begin + size]
            if position - begin + size > got or xxhash.xxh3_64_intdigest(view) != xxh3:
                _differs(files, file, position, size)
            if is_old and crc32(view) != crc:  # the CRC that readers will hold it against
                _differs(files, file, position, size)
        self._is_read[cut] = True
        self._plane.counters.add(read_back=sum(sizes))


def _page(file: I64 | int, position: I64) -> I64:
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
