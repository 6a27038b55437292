"""What is known of the tiles of a run: which are durable, and the digests of their bytes."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ucpl.records import frozen
from ucpl.runtime.journal import DoneTile, Past
from ucpl.runtime.tiles import Tiles

__all__ = ["Known"]


@frozen(eq=False)
class Known:
    """Tiles, and what is known of those that are durable: digests of their bytes."""

    tiles: Tiles
    done: NDArray[np.bool_]
    crc: NDArray[np.uint32]
    xxh3: NDArray[np.uint64]
    told: NDArray[np.bool_]  # by an earlier run's journal: this run never had their bytes

    @staticmethod
    def of(tiles: Tiles, past: Past | None) -> Known:
        n = len(tiles)
        none = np.zeros(n, np.bool_)
        known = Known(tiles, none, np.zeros(n, np.uint32), np.zeros(n, np.uint64), none.copy())
        if past is not None:
            fits = past.tile < n
            at = past.tile[fits]
            known.done[at], known.crc[at], known.xxh3[at] = True, past.tile_crc[fits], past.tile_xxh3[fits]
            known.told[at] = True
        return known

    def take(self, past: Past) -> None:
        """What other ranks' journals say, too."""
        self.done[past.tile], self.crc[past.tile], self.xxh3[past.tile] = True, past.tile_crc, past.tile_xxh3

    def add(self, tile: DoneTile) -> None:
        self.done[tile.index], self.crc[tile.index], self.xxh3[tile.index] = True, tile.crc, tile.xxh3
