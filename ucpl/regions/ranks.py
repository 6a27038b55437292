"""Coordinates of all ranks on all meshes."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ucpl.layout import Layout

__all__ = ["Ranks"]

I64 = NDArray[np.int64]


class Ranks:
    """Coordinates of all ranks on all meshes, as columns; rank itself is an axis, too."""

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

    def combinations(
        self, axes: tuple[str, ...], where: tuple[tuple[str, int], ...] = ()
    ) -> list[tuple[dict[str, int], int]]:
        """Distinct coordinates over `axes` among ranks with the coordinates `where`, each with the first such rank."""
        memo = (axes, where)
        if memo in self.cache:
            return self.cache[memo]
        mask = np.ones(self.count, dtype=bool)
        for axis, value in where:
            mask &= self.columns[axis] == value
        ranks = np.flatnonzero(mask)
        key = np.zeros(len(ranks), dtype=np.int64)
        for axis in axes:
            key = key * self.degrees[axis] + self.columns[axis][ranks]
        _, first = np.unique(key, return_index=True)
        first = ranks[np.sort(first)]
        out = [({a: int(self.columns[a][r]) for a in axes}, int(r)) for r in first]
        self.cache[memo] = out
        return out
