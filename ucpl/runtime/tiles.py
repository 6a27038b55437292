"""The table of tiles: every byte range of every target storage that is assembled at once, in order of file and position."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ucpl.records import frozen

__all__ = ["Tiles", "Unit", "cut_tiles"]

I64 = NDArray[np.int64]


@frozen
class Unit:
    """One tensor of the target: `size` bytes from `start` of a file. They are cut into tiles."""

    target: int  # index into the places of the target
    file: int  # index into the target's files
    start: int
    size: int
    storage: str  # its name in that file


@frozen(eq=False)
class Tiles:
    """Row i: bytes [low, low + size) of unit `unit`, at `position` of file `file`. `first[u]` is the first tile of unit u."""

    unit: I64
    file: I64
    position: I64
    low: I64
    size: I64
    first: I64  # (units + 1,)
    tile: int  # bytes of the largest

    def __len__(self) -> int:
        return len(self.unit)


def cut_tiles(units: Sequence[Unit], tile: int) -> Tiles:
    """Tiles of at most `tile` bytes, a multiple of 16, so that no element is cut. Units are in order of their files."""
    start = np.array([u.start for u in units], np.int64)
    size = np.array([u.size for u in units], np.int64)
    file = np.array([u.file for u in units], np.int64)
    count = -(-size // tile)  # none for an empty tensor
    first = np.zeros(len(units) + 1, np.int64)
    np.cumsum(count, out=first[1:])
    unit = np.repeat(np.arange(len(units)), count)
    low = (np.arange(len(unit)) - first[unit]) * tile
    return Tiles(unit, file[unit], start[unit] + low, low, np.minimum(tile, size[unit] - low), first, tile)
