"""Coordinates of all ranks on all meshes."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ucpl.layout import Layout

__all__ = ["Ranks"]

I64 = NDArray[np.int64]


class Ranks:
    """Coordinates of all ranks on all meshes, as columns.

    Rank itself is an axis, too.
    """

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.count = max(1, layout.ranks)
        self.columns: dict[str, I64] = {"rank": np.arange(self.count)}
        self.degrees: dict[str, int] = {"rank": self.count}
        for mesh in layout.meshes:
            rest = np.arange(self.count)
            for axis, degree in zip(reversed(mesh.axes), reversed(mesh.degrees), strict=True):
                rest, here = np.divmod(rest, degree)
                if axis not in self.columns:
                    self.columns[axis] = here
                    self.degrees[axis] = degree
        self.cache: dict[tuple[tuple[str, ...], tuple[tuple[str, int], ...]], list[tuple[dict[str, int], int]]] = {}
        self.columns_of: dict[tuple[tuple[str, ...], tuple[tuple[str, int], ...]], tuple[dict[str, I64], I64]] = {}

    def combinations(
        self, axes: tuple[str, ...], where: tuple[tuple[str, int], ...] = ()
    ) -> list[tuple[dict[str, int], int]]:
        """Distinct coordinates over `axes`, each with its first rank.

        Only ranks with the coordinates `where` count.
        """
        memo = (axes, where)
        if memo not in self.cache:
            columns, first = self.distinct(axes, where)
            named = {a: c.tolist() for a, c in columns.items()}
            self.cache[memo] = [({a: named[a][i] for a in axes}, r) for i, r in enumerate(first.tolist())]
        return self.cache[memo]

    def distinct(self, axes: tuple[str, ...], where: tuple[tuple[str, int], ...] = ()) -> tuple[dict[str, I64], I64]:
        """Distinct coordinates as columns, with the first rank at each."""
        memo = (axes, where)
        if memo in self.columns_of:
            return self.columns_of[memo]
        mask = np.ones(self.count, dtype=bool)
        for axis, value in where:
            mask &= self.columns[axis] == value
        ranks = np.flatnonzero(mask)
        _, first = np.unique(self.number(axes, ranks), return_index=True)
        first = ranks[np.sort(first)]
        self.columns_of[memo] = {a: self.columns[a][first] for a in axes}, first
        return self.columns_of[memo]

    def number(self, axes: tuple[str, ...], ranks: I64) -> I64:
        """Number of each rank: equal for equal coordinates on some axes."""
        out = np.zeros(len(ranks), dtype=np.int64)
        for axis in axes:
            out = out * self.degrees[axis] + self.columns[axis][ranks]
        return out
