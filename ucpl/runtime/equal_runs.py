"""Comparison of byte runs that two checkpoints should share.

A target tensor whose elements all are runs of the source, unchanged, needs no assembly: its runs are read from both
sides, many at once, and compared as bytes. Tensors with a difference, or with other moves, are left to the assembler,
which names the element.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from ucpl.records import frozen
from ucpl.runtime.buffers import Workspace
from ucpl.runtime.reading import CALL_BYTES
from ucpl.runtime.rows import Place, Rows
from ucpl.runtime.sources import SourceFiles
from ucpl.tables import within
from ucpl.tables.operations import Check

__all__ = ["EqualRuns", "Met"]

I64 = NDArray[np.int64]
Bools = NDArray[np.bool_]
U8 = NDArray[np.uint8]
Met = Callable[[int, int, U8], None]  # row, target, bytes of its run
SHORT = 1024  # bytes of a run below which many are compared by an index of their bytes


@frozen(eq=False)
class EqualRuns:
    """Runs of the source, and equal ones of the target.

    They are in the order of the target's bytes. Units: bytes.
    """

    files: SourceFiles
    row: I64  # of the check
    target: I64
    file: tuple[I64, I64]
    position: tuple[I64, I64]
    size: I64

    @classmethod
    def of(
        cls, rows: Rows, places: Sequence[Place], base: int, files: SourceFiles, file_of: Sequence[int]
    ) -> EqualRuns:
        """The runs of targets without other moves.

        `places[base:]` are those of the target. file_of: the file of each place.
        """
        itemsize = np.array([p.itemsize for p in places] or [1], np.int64)
        moved, held = _paired(rows, itemsize[rows.source], base)
        file = np.array(file_of, np.int64)
        size = (rows.high[held] - rows.low[held]) * itemsize[rows.source[held]]
        order = np.lexsort((rows.position[held], file[rows.source[held]]))
        moved, held, size = moved[order], held[order], size[order]
        return cls(
            files,
            held,
            rows.target[held].astype(np.int64),
            (file[rows.source[moved]], file[rows.source[held]]),
            (rows.position[moved], rows.position[held]),
            size,
        )

    def cut(self, most: int) -> tuple[EqualRuns, I64]:
        """The same with runs of at most `most` bytes, in parts.

        Returns the begin of each part, too.

        A part is read at once: its runs, and small gaps between them, have about so many bytes.
        """
        count = -(-self.size // most)
        run = np.repeat(np.arange(len(count)), count)
        at = within(count) * most
        size = np.minimum(self.size[run] - at, most)
        file = (self.file[0][run], self.file[1][run])
        position = (self.position[0][run] + at, self.position[1][run] + at)
        made = EqualRuns(self.files, self.row[run], self.target[run], file, position, size)
        widest = np.maximum(*(size + np.minimum(made._gaps(side), self.gap) for side in (0, 1)))
        ends = np.cumsum(widest)
        begins = [0]
        while begins[-1] < len(size):
            done = int(ends[begins[-1] - 1]) if begins[-1] else 0
            begins.append(max(begins[-1] + 1, int(np.searchsorted(ends, done + most, "right"))))
        return made, np.array(begins, np.int64)

    @property
    def gap(self) -> int:
        """Bytes that are read in the time of one more call."""
        return max(CALL_BYTES, self.files.call_bytes)

    def _gaps(self, side: int) -> I64:
        """Bytes between a run and the one before it.

        It is `gap` if a new read begins.
        """
        file, position = self.file[side], self.position[side]
        out = np.full(len(file), self.gap, np.int64)
        out[1:] = position[1:] - position[:-1] - self.size[:-1]
        out[1:][(file[1:] != file[:-1]) | (out[1:] < 0)] = self.gap
        return out

    def unequal(self, part: slice, space: Workspace, met: Met | None) -> set[int]:
        """Targets of a part that differ.

        met: takes the bytes of each equal run.
        """
        try:
            ours, theirs = self._read(part, 0, space.staging), self._read(part, 1, space.tile)
        except _TooWide:  # its runs are in another order in the source
            middle = (part.start + part.stop) // 2
            halves = slice(part.start, middle), slice(middle, part.stop)
            return set().union(*(self.unequal(half, space, met) for half in halves))
        size = self.size[part]
        found = self._apart(part, space, (ours, theirs))
        if met is not None:
            for n, (begin, length) in enumerate(zip(theirs.tolist(), size.tolist(), strict=True), part.start):
                if (target := int(self.target[n])) not in found:
                    met(int(self.row[n]), target, space.tile[begin : begin + length])
        return found

    def _apart(self, part: slice, space: Workspace, places: tuple[I64, I64]) -> set[int]:
        """Targets with different bytes.

        places: of each run, in the buffers of both sides.
        """
        (ours, theirs), size, target = places, self.size[part], self.target[part]
        head = np.ones(len(size), np.bool_)
        head[1:] = (np.diff(ours) != size[:-1]) | (np.diff(theirs) != size[:-1])
        first = np.flatnonzero(head)
        together = np.add.reduceat(size, first)
        found: set[int] = set()
        if together.sum() < SHORT * len(first):
            stop, step = np.cumsum(size), len(space.scratch) // 32  # bytes whose indices are made at a time
            for low in range(0, int(stop[-1]), step):
                every = np.arange(low, min(low + step, int(stop[-1])))
                run = np.searchsorted(stop, every, "right")
                inner = every - (stop[run] - size[run])
                differ = space.staging[ours[run] + inner] != space.tile[theirs[run] + inner]
                found.update(target[run[differ]].tolist())
            return found
        ends = [*first[1:].tolist(), len(size)]
        for n, end, length in zip(first.tolist(), ends, together.tolist(), strict=True):
            a, b = int(ours[n]), int(theirs[n])
            if not np.array_equal(space.staging[a : a + length], space.tile[b : b + length]):
                found.update(target[n:end].tolist())
        return found

    def _read(self, part: slice, side: int, room: U8) -> I64:
        """Read one side of a part.

        Returns the place of each run in the buffer.
        """
        file, position, size = self.file[side][part], self.position[side][part], self.size[part]
        order = np.lexsort((position, file))
        file, position, size = file[order], position[order], size[order]
        head = np.ones(len(file), np.bool_)
        head[1:] = (file[1:] != file[:-1]) | (position[1:] - (position + size)[:-1] > self.gap)
        first = np.flatnonzero(head)
        low = position[first]
        high = np.maximum.reduceat(position + size, first)
        length = high - low
        begin = np.cumsum(length) - length
        if int(length.sum()) > len(room):
            raise _TooWide
        view = room.data
        for f, p, b, n in zip(file[first].tolist(), low.tolist(), begin.tolist(), length.tolist(), strict=True):
            self.files.read_into(f, p, [view[b : b + n]], n)
        window = np.cumsum(head) - 1
        out = np.empty(len(file), np.int64)
        out[order] = begin[window] + position - low[window]
        return out


class _TooWide(Exception):
    """Runs of a part that are too far from each other."""


def _paired(rows: Rows, itemsize: I64, base: int) -> tuple[I64, I64]:
    """Rows that move a run, each with the row that compares it."""
    is_check = np.array([isinstance(r.node, Check) and r.keeps_values and not r.half for r in rows.rules] or [False])
    is_run = (rows.shape[:, 1:] == 1).all(axis=1)
    is_run &= ((rows.source_step[:, 0] == itemsize) & (rows.target_step[:, 0] == 1)) | (rows.shape[:, 0] == 1)
    held = is_check[rows.rule] & is_run & (rows.source >= base)
    moved = rows.run & ~held
    targets = len(rows.starts) - 1
    alone = np.bincount(rows.target[~(held | moved)], minlength=targets) == 0
    alone &= np.bincount(rows.target[held], minlength=targets) == np.bincount(rows.target[moved], minlength=targets)
    a, b = (np.flatnonzero(mask & alone[rows.target]) for mask in (moved, held))
    other = (rows.low[a] != rows.low[b]) | (rows.high[a] != rows.high[b])
    alone[rows.target[a[other]]] = False
    return a[alone[rows.target[a]]], b[alone[rows.target[b]]]
