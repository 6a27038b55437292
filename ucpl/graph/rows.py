"""Boxes of several parts in one table, so that a whole state is joined at once."""

from __future__ import annotations

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from ucpl.regions import Part

I64 = NDArray[np.int64]


@frozen(eq=False)
class Rows:
    """Boxes of one state. `home` counts over all parts of a side (`first` of each part added); `part` over its parts."""

    tensor: I64
    low: I64
    high: I64
    stride: I64
    offset: I64
    home: I64
    part: I64
    policy: I64

    def __len__(self) -> int:
        return len(self.tensor)

    def take(self, rows: I64) -> Rows:
        return Rows(*(getattr(self, f)[rows] for f in FIELDS))

    @property
    def volume(self) -> I64:
        out: I64 = (self.high - self.low).prod(axis=1)
        return out


FIELDS = ("tensor", "low", "high", "stride", "offset", "home", "part", "policy")


def rows_of(parts: list[tuple[int, int, Part]], renumber: I64, k: int) -> Rows:
    """Rows of (part number, first home, part). `renumber` maps a part's tensor numbers to common ones (-1: not wanted)."""
    if not parts:
        z = np.zeros(0, dtype=np.int64)
        return Rows(z, z.reshape(0, k), z.reshape(0, k), z.reshape(0, k), z, z, z, z)

    def wide(array: I64, fill: int) -> I64:
        missing = k - array.shape[1]
        return np.pad(array, ((0, 0), (0, missing)), constant_values=fill) if missing else array

    tensor = renumber[np.concatenate([p.pieces.tensor for _, _, p in parts])]
    rows = Rows(
        tensor,
        np.concatenate([wide(p.pieces.low, 0) for _, _, p in parts]),
        np.concatenate([wide(p.pieces.high, 1) for _, _, p in parts]),
        np.concatenate([wide(p.pieces.stride, 0) for _, _, p in parts]),
        np.concatenate([p.pieces.offset for _, _, p in parts]),
        np.concatenate([p.pieces.home.astype(np.int64) + first for _, first, p in parts]),
        np.concatenate([np.full(len(p.pieces), number, dtype=np.int64) for number, _, p in parts]),
        np.concatenate([p.pieces.policy.astype(np.int64) for _, _, p in parts]),
    )
    return rows if (tensor >= 0).all() else rows.take(np.flatnonzero(tensor >= 0))
