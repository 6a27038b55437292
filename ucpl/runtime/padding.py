"""Elements of stored tensors that belong to no tensor of the model.

A layout has three kinds of padding: `zero` is compared with the bytes, `live` is trained, `undefined` may hold
anything. No entry lists the padding elements of a stored tensor: they are those that no box covers.

Not here: reading them (source_checks).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ucpl.extents import Extent, StoredTensor
from ucpl.records import frozen
from ucpl.runtime.rows import Place, Rows
from ucpl.runtime.sources import SourceFiles
from ucpl.tables import uncovered

__all__ = ["Blank", "blanks_of"]

I64 = NDArray[np.int64]


@frozen(eq=False)
class Blank:
    """Padding of one source tensor that must be zero.

    `start[i]` to `stop[i]` are bytes of its file.
    """

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
        """Index of the element that begins at a byte of the file."""
        assert self.place.extent is not None
        return (at - _base(self.place.extent, self.place.itemsize)) // self.place.itemsize


def blanks_of(
    tensors: Sequence[StoredTensor], places: Sequence[Place], rows: Rows, files: SourceFiles
) -> tuple[Blank, ...]:
    """Zero padding of every source tensor that moves touch.

    If the moves leave out more of a tensor than its padding (a tensor that was dropped, a copy that is not read), its
    padding is unknown: such a tensor has no row here.
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
        numel = places[s].numel  # of bytes, if a byte has two elements
        low, high = uncovered(numel, rows.logical[mine], rows.shape[mine], rows.logical_step[mine])
        if int((high - low).sum()) * tensor.numel != tensor.padding * numel:
            continue
        size = places[s].itemsize
        base = _base(extent, size)
        found.append(Blank(places[s], tensor.state, files.index[extent.file], base + low * size, base + high * size))
    return tuple(found)


def _base(extent: Extent, itemsize: int) -> int:
    return extent.storage_start + extent.offset * itemsize
