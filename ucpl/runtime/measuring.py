"""How far two checkpoints of different types are apart: each element of the one beside the same element of the other.

Tiles are put together from the source as a plan says, in f32 whatever the target's type is, and the target's own elements
are held against them in f32, too: both casts are exact, so that what is counted is the distance of the stored values.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
from attrs import field
from numpy.typing import NDArray

from ucpl.records import define, frozen
from ucpl.runtime.assemble import Assembler, Assembly, Difference, blocks
from ucpl.runtime.boxes import clip
from ucpl.runtime.reading import strided

__all__ = ["WIDE", "Measured", "Measurer"]

WIDE = "f32"


@define
class Measured:
    """One tensor: how many of its elements were held against each other, how many differ, and by how much at most."""

    elements: int = 0
    differ: int = 0
    largest: float = 0.0


@frozen(eq=False)
class Measurer(Assembler):
    """An assembler whose checks of the other side's elements count, and tell nothing. `sources[base:]` are that side's."""

    base: int
    measured: dict[str, Measured] = field(factory=dict)
    lock: threading.Lock = field(factory=threading.Lock)

    def _difference(self, tile: Assembly, row: int) -> Difference | None:
        source = int(self.rows.source[row])
        if source < self.base:  # copies within the source are equal, or it is an error
            return super()._difference(tile, row)
        conversion, size = self._conversion(row, tile.target), self.sources[source].itemsize
        for box in clip(self.rows.box(row), tile.low, tile.high):
            for part in blocks(box, tile.work.share.block):
                made = conversion.convert(self._fetch(tile, self.file_of[source], part, size))
                there = strided(tile.work.tile, tile.at(part), part.shape, tile.steps(part), tile.itemsize)
                self._count(self.name(row), _numbers(made), _numbers(there))
        return None

    def _count(self, name: str, ours: NDArray[np.float32], theirs: NDArray[np.float32]) -> None:
        differ = ours.view(np.uint32) != theirs.view(np.uint32)
        with np.errstate(all="ignore"):
            apart = np.abs(ours[differ].astype(np.float64) - theirs[differ].astype(np.float64))
        largest = float(np.where(np.isnan(apart), np.inf, apart).max(initial=0.0))
        with self.lock:
            known = self.measured.setdefault(name, Measured())
            known.elements += len(ours)
            known.differ += int(differ.sum())
            known.largest = max(known.largest, largest)


def _numbers(raw: NDArray[Any]) -> NDArray[np.float32]:
    return np.ascontiguousarray(raw).reshape(-1).view(np.uint8).view("<f4")
