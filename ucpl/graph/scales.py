"""Scales of blocks, met with their tensors' boxes.

Boxes of scales step by 0 along the elements of a block.

w[0:300] in blocks of 128 and scale[0:3]   ─►   2 scales x 128 elements, then 1 scale x 44 elements
"""

from __future__ import annotations

from typing import NoReturn

import numpy as np

from ucpl.errors import Label, fail
from ucpl.graph.copies import Chosen
from ucpl.graph.graph import JoinedMoves
from ucpl.graph.rows import StoredBoxes
from ucpl.layout.layout import Scaling
from ucpl.layout.scope import at
from ucpl.placement import Placement
from ucpl.placement.boxes import overlaps
from ucpl.tables import I64, Bools, each

__all__ = ["blockwise", "reject_quantising"]


def reject_quantising(source: Placement, target: Placement, path: str) -> NoReturn:
    """Raise E316: the source has a product, and the target its factors."""
    spans = [
        next(p.span for p in side.parts if p.label == path or side.tensors.index(path) in p.tensors)
        for side in (source, target)
    ]
    fail(
        "E316",
        f"the source stores `{path}` times its scales, and the target without them: there is no rule for quantising",
        at(spans[0], "the product") if spans[0].line else Label(source.layout.call, "source", where=path),
        at(spans[1], "apart") if spans[1].line else Label(target.layout.call, "target", where=path),
        remedy="write `value x * scale` in the target's line, too",
    )


def blockwise(placement: Placement, scales: Chosen, kept: StoredBoxes) -> JoinedMoves:
    """Moves of scales to the boxes of a target that they scale.

    Raises E317 for scales that are means.
    """
    tensors = placement.layout.placed
    common = {path: i for i, path in enumerate(placement.tensors)}
    if len(scales.reduced):
        path = placement.tensors[int(scales.reduced.tensor[0])]
        fail(
            "E317",
            f"`{path}` is a mean or a sum of its copies, and a scale is one number",
            Label(placement.layout.call),
        )
    kinds: dict[Scaling, list[int]] = {}
    owner = np.full(max(1, len(common)), -1, dtype=np.int64)
    for number in each(scales.primary.tensor):
        scaling = tensors[placement.tensors[number]].scaling
        assert scaling is not None
        owner[number] = common[scaling.of]
        kinds.setdefault(Scaling("", scaling.along, scaling.sizes), []).append(number)
    found = []
    for scaling, numbers in kinds.items():
        rows = scales.primary.take(np.isin(scales.primary.tensor, numbers))
        mine = kept.take(np.isin(kept.tensor, owner[numbers]))
        found.append(_met(scaling, rows.replace(tensor=owner[rows.tensor]), mine))
    return JoinedMoves.concat(found, 2 * kept.width)


def _met(scaling: Scaling, scales: StoredBoxes, kept: StoredBoxes) -> JoinedMoves:
    """Boxes of scales of one kind with the boxes that they reach.

    They are cut at the edges of blocks.
    """
    k = kept.width
    size = np.ones(k, dtype=np.int64)
    first, last = np.zeros((len(scales), k), np.int64), np.ones((len(scales), k), np.int64)
    step = np.zeros((len(scales), k), np.int64)
    for c, (dim, n) in enumerate(zip(scaling.along, scaling.sizes, strict=True)):
        size[dim] = n
        first[:, dim], last[:, dim], step[:, dim] = scales.low[:, c], scales.high[:, c], scales.stride[:, c]
    j, i = overlaps(kept.tensor, kept.low, kept.high, scales.tensor, first * size, last * size)
    low, high = np.maximum(kept.low[j], first[i] * size), np.minimum(kept.high[j], last[i] * size)
    pair, low, high = _at_edges(low, high, size)
    i, j = i[pair], j[pair]
    count = np.where((low % size == 0) & (high - low >= size), (high - low) // size, 1)  # blocks along each dim
    inner = (high - low) // count
    there = kept.stride[j]
    source = scales.offset[i] + ((low // size - first[i]) * step[i]).sum(axis=1)
    target = kept.offset[j] + ((low - kept.low[j]) * there).sum(axis=1)
    shape, along, apart = (np.empty((len(i), 2 * k), np.int64) for _ in range(3))
    shape[:, 0::2], shape[:, 1::2] = count, inner
    along[:, 0::2], along[:, 1::2] = step[i], 0
    apart[:, 0::2], apart[:, 1::2] = there * inner, there
    return JoinedMoves(kept.tensor[j], source, target, shape, along, apart, scales.part[i], kept.part[j])


def _at_edges(low: I64, high: I64, size: I64) -> tuple[I64, I64, I64]:
    """Boxes cut at the edges of blocks along each dim.

    They are the end of a block, complete blocks, and the begin of one. Returns (row, low, high).
    """
    row = np.arange(len(low))
    for d in np.flatnonzero(size > 1).tolist():
        n = size[d]
        a, b = low[:, d], high[:, d]
        up, down = -(-a // n) * n, b // n * n
        parts: list[tuple[Bools, I64, I64]] = [
            (a < np.minimum(up, b), a, np.minimum(up, b)),
            (up < down, up, down),
            ((np.maximum(up, down) < b), np.maximum(up, down), b),
        ]
        picks = [np.flatnonzero(some) for some, _, _ in parts]
        pick = np.concatenate(picks)
        low, high, row = low[pick].copy(), high[pick].copy(), row[pick]
        low[:, d] = np.concatenate([x[p] for p, (_, x, _) in zip(picks, parts, strict=True)])
        high[:, d] = np.concatenate([x[p] for p, (_, _, x) in zip(picks, parts, strict=True)])
    return row, low, high
