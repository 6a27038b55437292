"""The ranks that hold each part of a layout, and their names.

Coordinates name a set of ranks if they can, else numbers.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

import numpy as np

from ucpl.conversion.collapsed_rows import numbers
from ucpl.placement.site import Ranks

if TYPE_CHECKING:
    from ucpl.placement import Part, Placement
    from ucpl.tables import I64

__all__ = ["Holders", "listed"]

SINGLY = 4  # numbers that are written one by one


def listed(values: I64, singly: int = SINGLY) -> str:
    """Ascending numbers: `0, 2` or `0..64` (exclusive) or `0..64 by 2`."""
    return ", ".join(map(str, values.tolist())) if len(values) <= singly else numbers(values.tolist())


class Holders:
    """All ranks of a layout, grouped by their stored tensors."""

    def __init__(self, placement: Placement) -> None:
        self.layout = placement.layout
        self.ranks = Ranks(self.layout)
        # Mesh axes, outer first: those that cut weights come before those that cut their optimizer states.
        of_weights = {a for p in placement.parts if p.state == "weight" for a in p.axes}
        axes = dict.fromkeys((*(a for m in self.layout.meshes for a in m.axes), "rank"))
        self.order = sorted(axes, key=lambda axis: axis not in of_weights or axis == "rank")
        self._groups: dict[object, tuple[I64, I64]] = {}

    @property
    def count(self) -> int:
        return self.ranks.count

    def degree(self, axis: str) -> int:
        return self.ranks.degrees[axis]

    def groups(self, part: Part) -> tuple[I64, I64]:
        """The first rank with the same part as each rank.

        Second: the ranks in that order. (ranks,) both.
        """
        memo = (part.axes, None if part.bucket is None else part.bucket.tobytes())
        if memo not in self._groups:
            key = np.zeros(self.count, dtype=np.int64) if part.bucket is None else part.bucket.copy()
            for axis in part.axes:
                key = key * self.degree(axis) + self.ranks.columns[axis]
            _, first, of = np.unique(key, return_index=True, return_inverse=True)
            self._groups[memo] = (first[of], np.argsort(first[of], kind="stable"))
        return self._groups[memo]

    def like(self, part: Part, first: int) -> I64:
        """The ranks with the same part as this first one, ascending."""
        firsts, order = self.groups(part)
        low, high = np.searchsorted(firsts[order], [first, first + 1])
        found: I64 = np.sort(order[low:high])
        return found

    def coordinates(self, axes: tuple[str, ...], ranks: I64) -> I64:
        """(ranks, axes)"""
        out = np.zeros((len(ranks), len(axes)), dtype=np.int64)
        for n, axis in enumerate(axes):
            out[:, n] = self.ranks.columns[axis][ranks]
        return out

    def text(self, ranks: I64) -> str:
        """`pp 0 · tp 1`: the coordinates that only these ranks have.

        Empty if these are all, or no coordinates are unique.
        """
        if len(ranks) == self.count:
            return ""
        best = ""
        for mesh in self.layout.meshes:
            found = {a: np.unique(self.ranks.columns[a][ranks]) for a in mesh.axes}
            if prod(map(len, found.values())) == len(ranks):
                text = " · ".join(f"{a} {listed(v)}" for a, v in found.items() if len(v) < self.degree(a))
                best = text if not best or len(text) < len(best) else best
        return best

    def named(self, ranks: I64) -> str:
        """`rank 3`, `ranks 0, 2`, `all 8 ranks`, `128 ranks: pp 0 · tp 1`."""
        if len(ranks) == 1:
            return f"rank {int(ranks[0])}"
        if len(ranks) == self.count:
            return f"all {self.count:,} ranks"
        numbers_text, said = listed(ranks), self.text(ranks)
        if len(ranks) <= SINGLY or "..." not in numbers_text:
            return f"ranks {numbers_text}"
        return f"{len(ranks):,} ranks: {said or numbers_text}"
