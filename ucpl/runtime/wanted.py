"""Which bytes of a source a run will read: for files that lie elsewhere, of which neighbours are fetched together.

Not here: CRCs of what no move reads, which are read beside.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np

from ucpl.runtime.rows import Place, Rows

__all__ = ["wanted"]


def wanted(rows: Rows, places: Sequence[Place]) -> dict[str, list[tuple[int, int]]]:
    """Byte ranges by file: all of a tensor that is moved as a whole, else its boxes that are runs of the file."""
    moved = np.zeros(len(places), np.int64)  # elements; of what several tensors are made of, more than there are
    count = rows.shape.prod(axis=1)
    np.add.at(moved, rows.source, count)
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
    for row in np.flatnonzero(np.isin(rows.source, parts)).tolist():
        place, shape = places[int(rows.source[row])], rows.shape[row].tolist()
        steps = rows.source_step[row].tolist()
        span = place.itemsize + sum((n - 1) * step for n, step in zip(shape, steps, strict=True))
        if place.extent is not None and span == prod(shape) * place.itemsize:
            low = int(rows.position[row])
            out.setdefault(place.extent.file, []).append((low, low + span))
    return out
