"""Fragments: where source boxes and target boxes meet, as strided moves between two stored tensors.

`straighten` merges dims that lie side by side on both sides; `join_runs` joins runs that follow each other on both sides.
"""

from __future__ import annotations

import numpy as np
from attrs import evolve, frozen
from numpy.typing import NDArray

from ucpl.graph.rows import Rows
from ucpl.regions.boxes import overlaps

I64 = NDArray[np.int64]


@frozen(eq=False)
class Fragments:
    """One row a strided move; `row` is the target row that it fills (an index into the target's Rows)."""

    tensor: I64
    source: I64
    target: I64
    row: I64
    shape: I64  # (N, K)
    source_offset: I64
    source_stride: I64
    target_offset: I64
    target_stride: I64
    source_part: I64

    def __len__(self) -> int:
        return len(self.source)

    def take(self, rows: I64) -> Fragments:
        return Fragments(*(getattr(self, f)[rows] for f in _FIELDS))


_FIELDS = (
    "tensor", "source", "target", "row", "shape", "source_offset", "source_stride", "target_offset", "target_stride",
    "source_part",
)  # fmt: skip


def intersect(source: Rows, target: Rows) -> Fragments:
    """Every element that a source row and a target row share."""
    j, i = overlaps(target.tensor, target.low, target.high, source.tensor, source.low, source.high)
    low = np.maximum(source.low[i], target.low[j])
    high = np.minimum(source.high[i], target.high[j])
    return Fragments(
        target.tensor[j],
        source.home[i],
        target.home[j],
        j,
        high - low,
        source.offset[i] + ((low - source.low[i]) * source.stride[i]).sum(axis=1),
        source.stride[i],
        target.offset[j] + ((low - target.low[j]) * target.stride[j]).sum(axis=1),
        target.stride[j],
        source.part[i],
    )


def straighten(fragments: Fragments) -> Fragments:
    """Dims by falling target stride, size-1 dims gone, neighbours merged where both sides allow.

    before: 2 x 3 x 4 with strides (12, 4, 1) and (24, 4, 1)   after: 2 x 12 with strides (12, 1) and (24, 1)
    """
    n, k = fragments.shape.shape
    if n == 0:
        return fragments
    weight = np.where(fragments.shape > 1, fragments.target_stride, -1)
    order = np.argsort(-weight, axis=1, kind="stable")
    size = np.take_along_axis(fragments.shape, order, 1)
    s = np.where(size > 1, np.take_along_axis(fragments.source_stride, order, 1), 1)
    t = np.where(size > 1, np.take_along_axis(fragments.target_stride, order, 1), 1)
    # From the innermost outwards: an outer dim that continues the inner one is folded into it.
    out_size = np.ones((n, k), dtype=np.int64)
    out_s, out_t = np.ones((n, k), dtype=np.int64), np.ones((n, k), dtype=np.int64)
    column = np.full(n, k - 1)  # where the current merged dim is written
    every = np.arange(n)
    begun = np.zeros(n, dtype=bool)
    for d in range(k - 1, -1, -1):
        real = size[:, d] > 1
        inner_size, inner_s, inner_t = out_size[every, column], out_s[every, column], out_t[every, column]
        folds = real & begun & (s[:, d] == inner_s * inner_size) & (t[:, d] == inner_t * inner_size)
        out_size[every[folds], column[folds]] *= size[folds, d]
        fresh = real & ~folds
        column[fresh & begun] -= 1
        out_size[every[fresh], column[fresh]] = size[fresh, d]
        out_s[every[fresh], column[fresh]] = s[fresh, d]
        out_t[every[fresh], column[fresh]] = t[fresh, d]
        begun |= real
    used = int((out_size > 1).any(axis=0).sum()) or 1
    first = k - used
    # Rows with fewer dims keep theirs at the end of the columns: move them to the front.
    shift = np.argsort((out_size[:, first:] <= 1), axis=1, kind="stable")
    return evolve(
        fragments,
        shape=np.take_along_axis(out_size[:, first:], shift, 1),
        source_stride=np.take_along_axis(out_s[:, first:], shift, 1),
        target_stride=np.take_along_axis(out_t[:, first:], shift, 1),
    )


def join_runs(fragments: Fragments) -> Fragments:
    """Contiguous runs that follow each other in source and in target become one; rows come out in target order.

    before: 5 elements at 0 -> 10, 3 elements at 5 -> 15   after: 8 elements at 0 -> 10
    """
    n = len(fragments)
    if n == 0:
        return fragments
    order = np.lexsort((fragments.source, fragments.target_offset, fragments.target))
    f = fragments.take(order)
    elements = f.shape.prod(axis=1)
    contiguous = (f.shape[:, 1:] == 1).all(axis=1) & (f.source_stride[:, 0] == 1) & (f.target_stride[:, 0] == 1)
    follows = np.zeros(n, dtype=bool)
    follows[1:] = (
        contiguous[1:]
        & contiguous[:-1]
        & (f.source[1:] == f.source[:-1])
        & (f.target[1:] == f.target[:-1])
        & (f.source_offset[1:] == f.source_offset[:-1] + elements[:-1])
        & (f.target_offset[1:] == f.target_offset[:-1] + elements[:-1])
    )
    starts = np.flatnonzero(~follows)
    total = np.add.reduceat(elements, starts)
    out = f.take(starts)
    shape = out.shape.copy()
    grown = contiguous[starts]
    shape[grown, 0] = total[grown]
    return evolve(out, shape=shape)


PASSES = (straighten, join_runs)
