"""Boxes of several parts in one table.

Addresses count over all stored tensors of a side.
"""

from __future__ import annotations

import numpy as np

from ucpl.placement import Part
from ucpl.records import frozen
from ucpl.tables import I64, Space, Table, block, column

__all__ = ["StoredBoxes", "rows_of"]


@frozen(eq=False)
class StoredBoxes(Table):
    """Boxes of logical tensors with their storage."""

    tensor: I64 = column()
    low: I64 = block(fill=0)  # (N, K)
    high: I64 = block(fill=1)
    stride: I64 = block(fill=0)  # addresses
    offset: I64 = column()  # address of the first element
    part: I64 = column()  # number in its placement
    policy: I64 = column()  # a Policy
    over: I64 = column()  # of a mean or sum: the mesh axes that it is over, as `Pieces.over`

    @property
    def volume(self) -> I64:
        out: I64 = (self.high - self.low).prod(axis=1)
        return out


def rows_of(parts: list[tuple[int, int, Part]], space: Space, renumber: I64, k: int) -> StoredBoxes:
    """Rows of (part number, number of its first stored tensor, part).

    `renumber` maps a part's tensor numbers to common ones (-1: not wanted).
    """
    tables = []
    for number, first, part in parts:
        p = part.folded
        tensor = renumber[p.tensor]
        tables.append(
            StoredBoxes(
                tensor,
                p.low,
                p.high,
                p.stride + (p.home_stride << space.bits),
                space.address(p.home + first, p.offset),
                np.full(len(p), number, dtype=np.int64),
                p.policy,
                p.over,
            )
        )
    rows = StoredBoxes.concat(tables, k)
    return rows if (rows.tensor >= 0).all() else rows.take(rows.tensor >= 0)
