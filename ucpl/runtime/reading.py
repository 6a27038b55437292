"""Reading of strided boxes with as few bytes and calls as possible.

Four ways, chosen per box: straight into place (one run on both sides), scattered into place (one run of the file,
several runs of the buffer: one preadv with many parts), run by run (the file has gaps that are worth skipping), or
covered: the span is read into the staging buffer, gaps and all, and copied with strides.

Not here: values that change on the way (values), and the list of boxes (assemble).
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
from attrs import evolve
from numpy.typing import NDArray

from ucpl.digests import crc32
from ucpl.records import frozen
from ucpl.runtime.joined_crcs import crc_of_comb
from ucpl.runtime.sources import SourceFiles

__all__ = ["Fragments", "Reader", "Window", "packed", "strided"]

U8 = NDArray[np.uint8]
Ints = tuple[int, ...]

RUN_MIN = 2048  # bytes of a run from which on it is read alone rather than with the gap behind it
TURNED_MIN = 512  # the same for runs of a transposed box: other bands read the gaps
SCATTER_MIN = 512  # bytes of a run from which on one part of a preadv is cheaper than staging
CALL_BYTES = 6144  # bytes that could be read in the time of one more call
SPREAD_BYTES = 1 << 19  # of runs that are spread at once: they stay in the cache
_CALL_RUNS = CALL_BYTES // RUN_MIN
_APART = 64  # between runs in the staging: a power of two would put them all on the same lines of the cache
WASTE_MAX = 64  # a gap of at most 1/64 of a span is read with it
IOV_MAX = 1024

_CELLS: dict[int, np.dtype[Any]] = {1: np.dtype("u1"), 2: np.dtype("<u2"), 4: np.dtype("<u4"), 8: np.dtype("<u8")}


def strided(buffer: U8 | memoryview, at: int, shape: Ints, step: Ints, itemsize: int) -> NDArray[Any]:
    """Elements of a buffer as integers of their size.

    Bits are copied, and compared, as they are. Units: bytes. Elements of 16 bytes become two of eight, in a dim of
    their own.
    """
    if itemsize == 16:
        return np.ndarray((*shape, 2), _CELLS[8], buffer, at, (*step, 8))
    return np.ndarray(shape, _CELLS[itemsize], buffer, at, step)


class Fragments:
    """Runs of source files that were read, with their CRC-32s.

    They are evidence for the CRCs of complete members. A row is `count` runs of `size` bytes that begin `step` bytes
    apart. Its CRC is that of the complete span, with zeros between the runs.
    """

    def __init__(self) -> None:
        self.file = array("I")
        self.position = array("Q")
        self.size = array("Q")
        self.crc = array("I")
        self.count = array("Q")
        self.step = array("Q")
        self.columns = (self.file, self.position, self.size, self.crc, self.count, self.step)

    def add(self, file: int, position: int, size: int, crc: int, comb: tuple[int, int] = (1, 0)) -> None:
        """Add runs.

        `comb`: their number, and the bytes from the start of one to the next.
        """
        for column, value in zip(self.columns, (file, position, size, crc, *comb), strict=True):
            column.append(value)

    def __len__(self) -> int:
        return len(self.file)

    def extend(self, other: Fragments) -> None:
        for mine, more in zip(self.columns, other.columns, strict=True):
            mine.extend(more)

    def clear(self) -> None:
        for column in self.columns:
            del column[:]

    def all_bytes(self) -> list[bytes]:
        """All of it, for another process."""
        return [column.tobytes() for column in self.columns]

    @classmethod
    def of(cls, told: Sequence[bytes]) -> Fragments:
        """Fragments from a record. Raises: ValueError for any other value."""
        made = cls()
        for column, data in zip(made.columns, told, strict=True):
            column.frombytes(data)
        if len({len(column) for column in made.columns}) != 1:
            raise ValueError("columns of unequal lengths")
        return made


@frozen
class Window:
    """Bytes [low, high) of a file that are held for several boxes.

    Those below `seen` are of another window, too.
    """

    file: int
    low: int
    seen: int
    high: int

    @property
    def size(self) -> int:
        return self.high - self.low


class Reader:
    """Reader of one worker.

    `bytes_read` and `fragments` are taken, and reset, once a group of tiles. keeps: fragments and their CRCs, which a
    caller does without if it reads only parts of members.
    """

    def __init__(self, sources: SourceFiles, *, keeps: bool = True) -> None:
        self.sources = sources
        self._keeps = keeps
        self.fragments = Fragments()
        self.bytes_read = 0
        self.digest = 0.0  # seconds in CRCs
        self._call_bytes = sources.call_bytes or CALL_BYTES
        self._held: list[tuple[Window, U8]] = []

    @property
    def holds(self) -> bool:
        """True if windows are held."""
        return bool(self._held)

    def hold(self, windows: Sequence[Window], room: U8) -> None:
        """Read windows into a buffer, one behind the other.

        `gather` takes bytes from there until other windows are held.
        """
        self._held = []
        at = 0
        for window in windows:
            there = room[at : at + window.size]
            for low, high in ((window.low, window.seen), (window.seen, window.high)):
                if low < high:
                    self.run(window.file, low, there.data[low - window.low : high - window.low])
            self._held.append((window, there))
            at += window.size

    def run(self, file: int, position: int, view: memoryview) -> int | None:
        """Read one run of a file into one run of a buffer.

        Returns its CRC; None if it was held and not read, or not kept.
        """
        size = len(view)
        for window, held in self._held:
            if window.file == file and window.low <= position and position + size <= window.high:
                view[:] = held.data[position - window.low : position - window.low + size]
                return None
        self.sources.read_into(file, position, [view], size)
        self.bytes_read += size
        if not self._keeps:
            return None
        begin = time.perf_counter()
        crc = crc32(view)
        self.digest += time.perf_counter() - begin
        self.fragments.add(file, position, size, crc)
        return crc

    def comb(self, file: int, position: int, step: int, views: list[memoryview]) -> None:
        """Runs of one size, `step` bytes apart, each read alone."""
        self._record_comb(file, position, step, len(views[0]), self._runs(file, position, step, views))

    def _runs(self, file: int, position: int, step: int, views: list[memoryview]) -> list[int]:
        """CRC of each run.

        `_tell_comb` records the runs.
        """
        self.sources.read_runs(file, position, step, views)
        self.bytes_read += len(views[0]) * len(views)
        if not self._keeps:
            return []
        begin = time.perf_counter()
        crcs = [crc32(view) for view in views]
        self.digest += time.perf_counter() - begin
        return crcs

    def _record_comb(self, file: int, position: int, step: int, size: int, crcs: list[int]) -> None:
        """Record all runs of one comb at once.

        To join a few CRCs takes as long as to join thousands.
        """
        if not crcs:
            return
        begin = time.perf_counter()
        crc = crc_of_comb(crcs, size, step)
        self.digest += time.perf_counter() - begin
        self.fragments.add(file, position, size, crc, (len(crcs), step))

    def scatter(self, file: int, position: int, views: list[memoryview]) -> None:
        """One run of a file into several runs of a buffer."""
        for i in range(0, len(views), IOV_MAX):
            some = views[i : i + IOV_MAX]
            size = sum(map(len, some))
            self.sources.read_into(file, position, some, size)
            self.bytes_read += size
            if self._keeps:
                begin = time.perf_counter()
                crc = 0
                for view in some:
                    crc = crc32(view, crc)
                self.digest += time.perf_counter() - begin
                self.fragments.add(file, position, size, crc)
            position += size

    def gather(
        self,
        file: int,
        position: int,
        shape: Ints,
        step: Ints,
        out: U8,
        at: int,
        out_step: Ints,
        itemsize: int,
        staging: U8,
    ) -> None:
        """Read a box, in units of bytes.

        Element j comes from `position + sum(j * step)` of the file and goes to `at + sum(j * out_step)`.
        """
        strip = _Strip(file, position, *_merged(shape, step, out_step), at, itemsize)
        for window, held in self._held:
            if window.file == file and window.low <= position and position + strip.span <= window.high:
                there = strided(out, at, strip.shape, strip.out_step, itemsize)
                there[...] = strided(held, position - window.low, strip.shape, strip.step, itemsize)
                return
        self._gather(strip, out, staging)

    def _gather(self, s: _Strip, out: U8, staging: U8) -> None:
        if not s.shape:
            self.run(s.file, s.position, out.data[s.at : s.at + s.itemsize])
            return
        span, needed, run = s.span, s.needed, s.run
        if run == needed:
            self.run(s.file, s.position, out.data[s.at : s.at + needed])
        elif span == needed and s.is_run and run >= SCATTER_MIN and _is_row_major(s.shape, s.step, s.itemsize):
            view = out.data
            starts = _starts(s.at, s.shape[:-1], s.out_step[:-1])
            self.scatter(s.file, s.position, [view[i : i + run] for i in starts])
        elif span - needed > needed // WASTE_MAX and (turned := _turned(s)) is not None and _is_worth(turned):
            self._turn(turned, out, staging)
        elif span - needed > needed // WASTE_MAX and (
            run >= self._call_bytes // _CALL_RUNS or span > self._call_bytes * (needed // run)
        ):
            self._skip_gaps(s, out, staging)
        elif span > len(staging):
            axis = max(range(len(s.shape)), key=lambda i: (s.shape[i] - 1) * s.step[i])
            half = s.shape[axis] // 2
            for low, high in ((0, half), (half, s.shape[axis])):
                part = s.part(axis, low, high)
                merged = _merged(part.shape, part.step, part.out_step)
                self._gather(_Strip(part.file, part.position, *merged, part.at, part.itemsize), out, staging)
        else:
            self.run(s.file, s.position, staging.data[:span])
            there = strided(out, s.at, s.shape, s.out_step, s.itemsize)
            there[...] = strided(staging, 0, s.shape, s.step, s.itemsize)

    def _turn(self, s: _Strip, out: U8, staging: U8) -> None:
        """Read a box in the order of the file, then spread it.

        Its runs go to many places of the buffer: a few are read at a time.
        """
        depth, run = s.depth, s.together
        if depth > 1:
            axis = min(range(depth), key=lambda i: s.shape[i])
            for i in range(s.shape[axis]):
                self._gather(s.slice(axis, i), out, staging)
            return
        if not depth or run + _APART > len(staging):  # one run, or runs that are longer than the staging
            axis, half = 0, s.shape[0] // 2
            for low, high in ((0, half), (half, s.shape[0])):
                self._gather(s.part(axis, low, high), out, staging)
            return
        apart = run + _APART
        most = max(1, min(len(staging), SPREAD_BYTES) // apart)
        views = [staging.data[at : at + run] for at in range(0, most * apart, apart)]
        crcs: list[int] = []
        for low in range(0, s.shape[0], most):
            part = s.part(0, low, min(low + most, s.shape[0]))
            count = part.shape[0]
            crcs += self._runs(s.file, part.position, s.step[0], views[:count])
            there = strided(out, part.at, part.shape, part.out_step, s.itemsize)
            there[...] = strided(staging, 0, part.shape, (apart, *s.step[1:]), s.itemsize)
        self._record_comb(s.file, s.position, s.step[0], run, crcs)

    def _skip_gaps(self, s: _Strip, out: U8, staging: U8) -> None:
        """Read a box without its gaps, along the widest dim.

        So bytes that are contiguous in the file stay together.
        """
        axis = max(range(len(s.shape)), key=lambda i: s.step[i])
        if len(s.shape) == 1 or (s.is_run and len(s.shape) == 2 and axis == 0):
            size = s.itemsize if len(s.shape) == 1 else s.run
            starts = range(s.at, s.at + s.shape[0] * s.out_step[0], s.out_step[0])
            self.comb(s.file, s.position, s.step[0], [out.data[begin : begin + size] for begin in starts])
            return
        for i in range(s.shape[axis]):
            self._gather(s.slice(axis, i), out, staging)


@frozen
class _Strip:
    """A box of a file and its target, with merged dims.

    In bytes, but for `shape`.
    """

    file: int
    position: int
    shape: Ints
    step: Ints
    out_step: Ints
    at: int
    itemsize: int

    @property
    def span(self) -> int:
        """From the first byte to the last, gaps and all."""
        return self.itemsize + sum((n - 1) * s for n, s in zip(self.shape, self.step, strict=True))

    @property
    def needed(self) -> int:
        return prod(self.shape) * self.itemsize

    @property
    def is_run(self) -> bool:
        """True if the last dim is contiguous on both sides."""
        return self.step[-1] == self.itemsize == self.out_step[-1]

    @property
    def run(self) -> int:
        """Contiguous bytes on both sides."""
        return self.shape[-1] * self.itemsize if self.is_run else self.itemsize

    @property
    def depth(self) -> int:
        """Number of first dims that step over gaps in the file.

        Dims are in the file's order.
        """
        depth, run = len(self.shape), self.itemsize
        while depth and self.step[depth - 1] == run:
            depth -= 1
            run *= self.shape[depth]
        return depth

    @property
    def together(self) -> int:
        """Contiguous bytes in the file, if dims are in its order."""
        return prod(self.shape[self.depth :]) * self.itemsize

    def part(self, axis: int, low: int, high: int) -> _Strip:
        shape = (*self.shape[:axis], high - low, *self.shape[axis + 1 :])
        position, at = self.position + low * self.step[axis], self.at + low * self.out_step[axis]
        return evolve(self, shape=shape, position=position, at=at)

    def slice(self, axis: int, i: int) -> _Strip:
        """One index of a dim, which is gone."""
        shape, step, out_step = (
            (*of[:axis], *of[axis + 1 :]) for of in (self.shape, self.step, self.out_step)
        )  # fmt: skip
        position, at = self.position + i * self.step[axis], self.at + i * self.out_step[axis]
        return _Strip(self.file, position, shape, step, out_step, at, self.itemsize)


def _turned(s: _Strip) -> _Strip | None:
    """The same box in the order of the file.

    It is used if more bytes are contiguous there than in the order of the buffer.
    """
    order = sorted(range(len(s.shape)), key=lambda i: -s.step[i])
    if order == list(range(len(s.shape))):
        return None
    shape, step, out_step = (tuple(of[i] for i in order) for of in (s.shape, s.step, s.out_step))
    turned = evolve(s, shape=shape, step=step, out_step=out_step)
    return turned if turned.together > s.run else None


def _is_worth(s: _Strip) -> bool:
    """True if runs are read one by one, without the gaps."""
    run = s.together
    return run >= TURNED_MIN or s.span > CALL_BYTES * (s.needed // run)


def _is_row_major(shape: Ints, step: Ints, itemsize: int) -> bool:
    expected = itemsize
    for n, s in zip(reversed(shape), reversed(step), strict=True):
        if s != expected:
            return False
        expected *= n
    return True


def _starts(at: int, shape: Ints, step: Ints) -> list[int]:
    found = [at]
    for n, s in zip(shape, step, strict=True):
        found = [start + i * s for start in found for i in range(n)]
    return found


def _merged(shape: Ints, step: Ints, out_step: Ints) -> tuple[Ints, Ints, Ints]:
    """Drop dims of size 1 and join neighbours with one common step."""
    kept: list[tuple[int, int, int]] = []
    for n, s, o in zip(shape, step, out_step, strict=True):
        if n == 1:
            continue
        if kept and kept[-1][1] == n * s and kept[-1][2] == n * o:
            kept[-1] = (kept[-1][0] * n, s, o)
        else:
            kept.append((n, s, o))
    if not kept:
        return (), (), ()
    a, b, c = zip(*kept, strict=True)
    return a, b, c


def packed(shape: Ints, itemsize: int) -> Ints:
    """Bytes that each dim steps if elements are contiguous, row-major."""
    steps = [itemsize]
    for n in reversed(shape[1:]):
        steps.append(steps[-1] * n)
    return tuple(reversed(steps)) if shape else ()
