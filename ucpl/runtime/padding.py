"""Elements of stored tensors that belong to no tensor of the model: which they are.

A layout tells three kinds of padding apart: `zero` is held against the bytes, `live` is trained, `undefined` may hold anything.
Which elements of a stored tensor are padding is said by nobody: they are those that no box covers.

Not here: reading them (evidence).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from ucpl.extents import Extent, StoredTensor
from ucpl.runtime.rows import Place, Rows
from ucpl.runtime.sources import SourceFiles

__all__ = ["Blank", "blanks_of", "uncovered"]

I64 = NDArray[np.int64]


@frozen(eq=False)
class Blank:
    """The padding of one source tensor that must be zero. `start[i]` to `stop[i]` are bytes of its file."""

    place: Place
    state: str
    file: int  # index into the source files
    start: I64
    stop: I64

    @property
    def size(self) -> int:
        return int((self.stop - self.start).sum())

    @property
    def storage(self) -> str:
        return self.place.extent.storage if self.place.extent is not None else ""

    def element(self, at: int) -> int:
        """Which element of the tensor begins at a byte of the file."""
        assert self.place.extent is not None
        return (at - _base(self.place.extent, self.place.itemsize)) // self.place.itemsize


def uncovered(numel: int, start: I64, shape: I64, step: I64) -> tuple[I64, I64]:
    """The runs of a tensor's elements that no box covers: (starts, stops), in order.

    Row i is a box of `shape[i]` elements from `start[i]`, each dim with its step: (N,), (N, D), (N, D).

    >>> [a.tolist() for a in uncovered(10, np.array([1, 6]), np.array([[3], [2]]), np.array([[1], [2]]))]
    [[0, 4, 7, 9], [1, 6, 8, 10]]
    """
    count = shape.prod(axis=1)
    start, shape, step, count = (a[count > 0] for a in (start, shape, step, count))
    solid = ((shape - 1) * step).sum(axis=1) + 1 == count  # a box without gaps is one run
    starts, stops = [start[solid]], [start[solid] + count[solid]]
    for row in np.flatnonzero(~solid).tolist():
        first, length = _runs(int(start[row]), shape[row].tolist(), step[row].tolist())
        starts.append(first)
        stops.append(first + length)
    low = np.concatenate(starts)
    order = np.argsort(low, kind="stable")
    low, high = low[order], np.maximum.accumulate(np.concatenate(stops)[order])
    begin, end = np.append(0, high), np.append(low, numel)
    open_ = np.flatnonzero(end > begin)
    return begin[open_], end[open_]


def _runs(start: int, shape: Sequence[int], step: Sequence[int]) -> tuple[I64, int]:
    """Where the runs of one box begin, and how long each is."""
    dims = sorted((s, n) for n, s in zip(shape, step, strict=True) if n > 1)
    length = 1
    while dims and dims[0][0] == length:
        length *= dims.pop(0)[1]
    first = np.array([start], np.int64)
    for s, n in dims:
        first = (first[:, None] + s * np.arange(n)).reshape(-1)
    return first, length


def blanks_of(
    tensors: Sequence[StoredTensor], places: Sequence[Place], rows: Rows, files: SourceFiles
) -> tuple[Blank, ...]:
    """The padding of kind zero of every source tensor that moves touch.

    Where the moves leave out more of a tensor than its padding (a tensor that was dropped, a copy that is not read), nobody
    says which of it is padding: such a tensor has no row here.
    """
    order = np.argsort(rows.source, kind="stable")
    bounds = np.searchsorted(rows.source[order], np.arange(len(places) + 1))
    found = []
    for s, tensor in enumerate(tensors):
        extent = places[s].extent
        mine = order[bounds[s] : bounds[s + 1]]
        if not tensor.padding or tensor.padding_kind != "zero" or not len(mine):
            continue
        if extent is None or not extent.is_contiguous:
            continue
        low, high = uncovered(tensor.numel, rows.logical[mine], rows.shape[mine], rows.logical_step[mine])
        if int((high - low).sum()) != tensor.padding:
            continue
        size = places[s].itemsize
        base = _base(extent, size)
        found.append(Blank(places[s], tensor.state, files.index[extent.file], base + low * size, base + high * size))
    return tuple(found)


def _base(extent: Extent, itemsize: int) -> int:
    return extent.storage_start + extent.offset * itemsize
