"""Bands: tiles of a tensor that are assembled at once, since what they are made of lies together only over several of them.

A transposed matrix is the case: a row of the target is a column of the source, an element of each of its rows. As many rows
of the target as memory allows make runs of the source out of them, each of which is read once. Tiles stay what is digested,
written and journalled.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ucpl.runtime.groups import narrow_bands
from ucpl.runtime.rows import Place, Rows
from ucpl.runtime.tiles import Tiles, Unit

__all__ = ["RUN_WANTED", "bands_of", "cut_bands"]

RUN_WANTED = 4096  # bytes of a run of the source: longer ones were not faster, and their bands leave the cache

I64 = NDArray[np.int64]


def bands_of(
    rows: Rows, places: tuple[Sequence[Place], Sequence[Place]], units: Sequence[Unit], tile: int, limit: int
) -> I64:
    """Bytes of each unit that are a band, of at most `limit`: whole rows of the target, as far as it has room for one.

    A unit that needs none is in bands of one tile, or of less where it shares windows of the source with others (groups).
    places: of the source, and of the target.
    """
    reach, row = _reach(rows, *places)
    order = np.lexsort((reach, rows.target))  # the last of each target reaches farthest
    most, step = np.zeros(len(places[1]), np.int64), np.ones(len(places[1]), np.int64)
    most[rows.target[order]], step[rows.target[order]] = reach[order], row[order]
    which = np.array([u.target for u in units], np.int64)
    band, step = np.minimum(most[which], limit), step[which]
    count = -(-np.array([u.size for u in units], np.int64) // step)  # of rows
    each = np.maximum(band // step, 1)
    even = -(-count // np.maximum(-(-count // each), 1))  # none is much narrower than the others
    found = np.where(band <= tile, tile, np.where(band >= step, even * step, limit))
    for unit, size in narrow_bands(rows, places, units, tile, limit).items():
        if band[unit] <= tile:
            found[unit] = size
    return found


def cut_bands(tiles: Tiles, most: int, done: NDArray[np.bool_]) -> list[tuple[int, int]]:
    """What is assembled at once: tiles [first, end) of one band that are not done, at most so many, in their order."""
    number = np.arange(len(tiles))
    within = (number - tiles.first[tiles.unit]) % tiles.together[tiles.unit]
    head = within % most == 0
    head[1:] |= done[:-1]
    first = np.flatnonzero(head & ~done)
    end = np.flatnonzero(np.append((head | done)[1:], True)[: len(tiles)] & ~done) + 1
    return list(zip(first.tolist(), end.tolist(), strict=True))


def _reach(rows: Rows, sources: Sequence[Place], targets: Sequence[Place]) -> tuple[I64, I64]:
    """Bytes of the target, end to end, over which a box has a run of RUN_WANTED in the file, or its longest; and of one row."""
    size = np.array([p.itemsize for p in sources] or [1], np.int64)[rows.source]
    goal = np.array([p.itemsize for p in targets] or [1], np.int64)[rows.target]
    shape = rows.shape
    step = np.where((shape > 1) & (rows.source_step > 0), rows.source_step, np.iinfo(np.int64).max)
    order = np.argsort(step, axis=1, kind="stable")  # what lies closest in the file comes first
    shape, step, along = (np.take_along_axis(a, order, 1) for a in (shape, step, rows.target_step))
    run, open_ = size.copy(), ~rows.run
    reach, row = np.zeros_like(size), np.ones_like(size)
    for d in range(shape.shape[1]):
        open_ &= (step[:, d] == run) & (run < RUN_WANTED)
        taken = np.minimum(shape[:, d], -(-RUN_WANTED // run))
        farther = open_ & (taken * along[:, d] * goal > reach)
        reach = np.where(farther, taken * along[:, d] * goal, reach)
        row = np.where(farther, along[:, d] * goal, row)
        run = np.where(open_, run * shape[:, d], run)
    return reach, row
