"""Boxes of plain entries at many coordinates at once.

Each stored axis is a dim, uncut or cut once: `v@chunk(dp) h`. Anything else goes through the tree of cells, coordinate
by coordinate (`EntryPlacer.local`). A test checks that both give the same.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from ucpl.layout import Entry, Layout
from ucpl.layout import axes as ax
from ucpl.records import frozen
from ucpl.tables import I64

__all__ = ["BoxesAt", "boxes_at", "spans_of"]


class Placer(Protocol):
    """Interface of an EntryPlacer for this module."""

    layout: Layout
    entry: Entry
    k: int
    shape_axes: tuple[str, ...]
    degrees: dict[str, int]


@frozen(eq=False)
class BoxesAt:
    """One box for each coordinate.

    There is none if a side of its shape is 0.
    """

    shape: I64  # (C, stored axes)
    low: I64  # (C, K)
    high: I64
    stride: I64


def spans_of(split: ax.Split, length: I64 | int, ways: int, here: I64) -> tuple[I64, I64]:
    """`axes.piece_of` for many coordinates at once.

    A remainder is ignored.
    """
    match split.kind:
        case "sizes":
            starts = np.cumsum([0, *split.sizes])
            return starts[here], starts[here + 1]
        case "spread":
            step, extra = np.divmod(np.asarray(length) // split.grain, ways)
            start = here * step + np.minimum(here, extra)
            return start * split.grain, (start + step + (here < extra)) * split.grain
        case "chunk":
            step = -(-np.asarray(length) // (ways * split.grain)) * split.grain
            return np.minimum(here * step, length), np.minimum((here + 1) * step, length)
        case "equal":
            step = np.asarray(length) // ways
            return here * step, (here + 1) * step


def boxes_at(placer: Placer, at: I64) -> BoxesAt | None:
    """Boxes at coordinates along `placer.shape_axes`, (C, axes).

    None if the pattern is another, or a cut leaves a remainder.
    """
    axes = [_plain(axis) for axis in placer.entry.shape]
    if not axes or list(placer.entry.targets) != [None]:
        return None
    layout, tensor = placer.layout, placer.layout.placed[placer.entry.targets[None]]
    dims = [dim.name for one in axes if one is not None for dim in one[:1]]
    bracket = [name for axis in placer.entry.indices for name in ax.dims_of(axis)]
    if None in axes or sorted([*dims, *bracket]) != sorted(tensor.dims) or any(d in layout.indices for d in dims):
        return None
    low, high = np.zeros((len(at), placer.k), dtype=np.int64), np.ones((len(at), placer.k), dtype=np.int64)
    stride = np.zeros_like(low)
    places = {dim: i for i, dim in enumerate(tensor.dims)}
    for name in bracket:
        low[:, places[name]] = high[:, places[name]] = -1
    step = np.ones(len(at), dtype=np.int64)
    shape = []
    for dim, split in reversed([one for one in axes if one is not None]):
        i, size = places[dim.name], layout.sizes[dim.name]
        if tensor.indices[i] != range(size):
            return None
        first, last = np.zeros_like(step), np.full_like(step, size)
        if split is not None:
            ways = placer.degrees[split.mesh_axis]
            try:
                ax.piece_of(split, size, ways, 0)
            except ax.UnevenCut:
                return None
            first, last = spans_of(split, size, ways, at[:, placer.shape_axes.index(split.mesh_axis)])
        low[:, i], high[:, i], stride[:, i] = first, last, step
        shape.append(last - first)
        step = step * (last - first)
    return BoxesAt(np.stack(shape[::-1], axis=1), low, high, stride)


def _plain(axis: ax.Axis) -> tuple[ax.Dim, ax.Split | None] | None:
    match axis:
        case ax.Dim(low=0, high=None):
            return axis, None
        case ax.Cut(axis=ax.Dim(low=0, high=None) as dim, splits=(split,)):
            return dim, split
    return None
