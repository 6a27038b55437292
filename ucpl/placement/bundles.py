"""Bundles: tensors of different sizes with one pattern, placed as columns.

A row is a tensor at a coordinate. Each stored axis is a dim, uncut or in chunks, which any size has: no tensor is alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ucpl.layout import Layout
from ucpl.layout import axes as ax
from ucpl.placement.plain_locals import spans_of
from ucpl.records import frozen
from ucpl.tables import I64, Listed

__all__ = ["BundleRows", "counts_of", "rows_of"]


@frozen(eq=False)
class BundleRows:
    """Boxes of a bundle, tensor by tensor, coordinate by coordinate."""

    names: tuple[str, ...]
    tensor: I64  # (N,) its place in the bundle
    coordinate: I64  # (N,) the number of a coordinate
    shape: I64  # (N, stored axes)
    begins: I64  # (N, stored axes) of the box, in the uncut tensor
    low: I64  # (N, K)
    high: I64
    stride: I64

    @property
    def owned(self) -> Listed:
        return Listed(self.names, self.tensor)

    @property
    def has_elements(self) -> I64:
        found: I64 = np.flatnonzero(self.shape.all(axis=1))
        return found

    def take(self, rows: I64) -> BundleRows:
        columns = (self.tensor, self.coordinate, self.shape, self.begins, self.low, self.high, self.stride)
        return BundleRows(self.names, *(column[rows] for column in columns))


def counts_of(layout: Layout, names: Sequence[str]) -> I64:
    """(tensors, dims): the sizes of a bundle's tensors."""
    tensors = layout.tensors
    return np.array([tensors[name].counts for name in names], dtype=np.int64).reshape(len(names), -1)


def rows_of(
    layout: Layout,
    names: tuple[str, ...],
    shape: tuple[ax.Axis, ...],
    degrees: dict[str, int],
    here: dict[str, I64],
    k: int,
) -> BundleRows:
    """Boxes of tensors of one pattern at coordinates `here`.

    shape: the pattern of the first tensor. k: columns of the boxes.
    """
    counts = counts_of(layout, names)
    places = {dim: i for i, dim in enumerate(layout.tensors[names[0]].dims)}
    ways = len(next(iter(here.values()))) if here else 1
    tensor, coordinate = np.divmod(np.arange(len(names) * ways), ways)
    low = np.zeros((len(tensor), k), dtype=np.int64)
    high, stride = np.ones_like(low), np.zeros_like(low)
    step = np.ones(len(tensor), dtype=np.int64)
    sizes, begins = [], []
    for axis in reversed(shape):
        dim, split = _plain(axis)
        i, size = places[dim], counts[tensor, places[dim]]
        first, last = np.zeros_like(size), size
        if split is not None:
            first, last = spans_of(split, size, degrees[split.mesh_axis], here[split.mesh_axis][coordinate])
        low[:, i], high[:, i], stride[:, i] = first, last, step
        sizes.append(last - first)
        begins.append(np.where(last > first, first, 0))
        step = step * (last - first)
    none = np.zeros((len(tensor), 0), dtype=np.int64)
    return BundleRows(
        names,
        tensor,
        coordinate,
        np.stack(sizes[::-1], axis=1) if sizes else none,
        np.stack(begins[::-1], axis=1) if begins else none,
        low,
        high,
        stride,
    )


def _plain(axis: ax.Axis) -> tuple[str, ax.Split | None]:
    match axis:
        case ax.Dim(name=name):
            return name, None
        case ax.Cut(axis=ax.Dim(name=name), splits=(split,)):
            return name, split
    raise AssertionError(f"no pattern of a bundle: {axis}")
