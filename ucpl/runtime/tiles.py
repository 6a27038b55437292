"""Table of tiles: byte ranges of target storages, by file and position.

Each is assembled at once.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ucpl.records import frozen
from ucpl.runtime.journal import DoneTile, Past

__all__ = ["DoneTiles", "Tiles", "Unit", "cut_tiles"]

I64 = NDArray[np.int64]


@frozen
class Unit:
    """One tensor of the target: `size` bytes from `start` of a file.

    They are cut into tiles.
    """

    target: int  # index into the places of the target
    file: int  # index into the target's files
    start: int
    size: int
    storage: str  # its name in that file


@frozen(eq=False)
class Tiles:
    """Row i: bytes [low, low + size) of unit `unit`.

    They are at `position` of file `file`. `first[u]` is the first tile of unit u.
    """

    unit: I64
    file: I64
    position: I64
    low: I64
    size: I64
    first: I64  # (units + 1,)
    together: I64  # (units,) how many tiles are a band

    def __len__(self) -> int:
        return len(self.unit)


def cut_tiles(units: Sequence[Unit], tile: int, bands: I64 | None = None) -> Tiles:
    """Cut units into tiles of at most `tile` bytes.

    The size is a multiple of 16, so that no element is cut. Units are in order of their files. bands: (units,) bytes
    after which tiles begin anew, complete elements; by default a tile's.
    """
    start = np.array([u.start for u in units], np.int64)
    size = np.array([u.size for u in units], np.int64)
    file = np.array([u.file for u in units], np.int64)
    band = np.full(len(units), tile, np.int64) if bands is None else bands
    together = -(-band // tile)
    rest = size % band
    count = size // band * together + -(-rest // tile)  # none for an empty tensor
    first = np.zeros(len(units) + 1, np.int64)
    np.cumsum(count, out=first[1:])
    unit = np.repeat(np.arange(len(units)), count)
    local = np.arange(len(unit)) - first[unit]
    within = local % together[unit] * tile  # of its band
    low = local // together[unit] * band[unit] + within
    most = np.minimum(np.minimum(tile, band[unit] - within), size[unit] - low)
    return Tiles(unit, file[unit], start[unit] + low, low, most, first, together)


# --- Tiles that are durable, and the digests of their bytes ---------------------------------------------------------


@frozen(eq=False)
class DoneTiles:
    """Tiles, with the digests of those that are durable."""

    tiles: Tiles
    done: NDArray[np.bool_]
    crc: NDArray[np.uint32]
    xxh3: NDArray[np.uint64]
    from_journal: NDArray[np.bool_]  # by an earlier run's journal: this run never had their bytes

    @staticmethod
    def of(tiles: Tiles, past: Past | None) -> DoneTiles:
        n = len(tiles)
        none = np.zeros(n, np.bool_)
        known = DoneTiles(tiles, none, np.zeros(n, np.uint32), np.zeros(n, np.uint64), none.copy())
        if past is not None:
            fits = past.tile < n
            at = past.tile[fits]
            known.done[at], known.crc[at], known.xxh3[at] = True, past.tile_crc[fits], past.tile_xxh3[fits]
            known.from_journal[at] = True
        return known

    def take(self, past: Past) -> None:
        """Take over records of other ranks' journals, too."""
        self.done[past.tile], self.crc[past.tile], self.xxh3[past.tile] = True, past.tile_crc, past.tile_xxh3

    def add(self, tiles: Sequence[DoneTile]) -> None:
        at = [tile.index for tile in tiles]
        self.done[at] = True
        self.crc[at] = [tile.crc for tile in tiles]
        self.xxh3[at] = np.array([tile.xxh3 for tile in tiles], np.uint64)
