"""Which bytes of a source a run will read: for files that lie elsewhere, of which neighbours are fetched together.

Not here: CRCs of what no move reads, which are read beside.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod

import numpy as np
from numpy.typing import NDArray

from ucpl.runtime.rows import Place, Rows

__all__ = ["rows_of", "wanted"]

Bools = NDArray[np.bool_]


def rows_of(rows: Rows, spans: Iterable[tuple[int, int, int]]) -> Bools:
    """(N,) the rows that spans of targets need as a whole. spans: (target, its first element, the one behind the last)."""
    covered = np.zeros(len(rows.low), np.int64)  # elements of a target, with those between a row's own
    for target, low, high in spans:
        within = rows.within(target, low, high)
        some = slice(within.start, within.stop)
        part = np.minimum(rows.high[some], high) - np.maximum(rows.low[some], low)
        covered[some] += np.maximum(part, 0)
    whole: Bools = covered == rows.high - rows.low
    return whole


def wanted(rows: Rows, places: Sequence[Place], mine: Bools | None = None) -> dict[str, list[tuple[int, int]]]:
    """Byte ranges by file: all of a tensor that is moved as a whole, else its boxes that are runs of the file.

    mine: (N,) the rows that count; None, all.
    """
    moved = np.zeros(len(places), np.int64)  # elements; of what several tensors are made of, more than there are
    chosen = np.ones(len(rows.low), np.bool_) if mine is None else mine
    count = rows.shape.prod(axis=1)
    np.add.at(moved, rows.source[chosen], count[chosen])
    out: dict[str, list[tuple[int, int]]] = {}
    parts = []
    for i, place in enumerate(places):
        extent = place.extent
        if extent is None or not moved[i]:
            continue
        if extent.is_contiguous and moved[i] >= place.numel:
            low = extent.storage_start + extent.offset * place.itemsize
            out.setdefault(extent.file, []).append((low, low + place.numel * place.itemsize))
        else:
            parts.append(i)
    for row in np.flatnonzero(np.isin(rows.source, parts) & chosen).tolist():
        place, shape = places[int(rows.source[row])], rows.shape[row].tolist()
        steps = rows.source_step[row].tolist()
        span = place.itemsize + sum((n - 1) * step for n, step in zip(shape, steps, strict=True))
        if place.extent is not None and span == prod(shape) * place.itemsize:
            low = int(rows.position[row])
            out.setdefault(place.extent.file, []).append((low, low + span))
    return out
