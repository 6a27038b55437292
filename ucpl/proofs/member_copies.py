"""Copies of one member of a mean or sum, each to be held against the first of them: they differ along other axes alone."""

from __future__ import annotations

import numpy as np

from ucpl.extents import Key
from ucpl.proofs.joins import I64
from ucpl.proofs.together import APART
from ucpl.regions import Placement
from ucpl.schedule import Plan, Runs

__all__ = ["copies_of_members"]


def copies_of_members(placement: Placement, plan: Plan) -> list[Runs]:
    """Moves between stored tensors of the plan's targets and sources, which are the same ones, by state."""
    first: dict[object, tuple[tuple[str, Key], int, I64]] = {}
    numbers = [{(t.file, t.key): n for n, t in enumerate(side)} for side in (plan.targets, plan.sources)]
    tensors = {path: n for n, path in enumerate(plan.tensors)}
    found: dict[str, list[tuple[int, ...]]] = {}
    for part in placement.parts:
        pieces = part.pieces
        for row in np.flatnonzero(np.isin(pieces.policy, APART)).tolist():
            home = part.homes.home(int(pieces.home[row]))
            place, path = (home.file, home.key), placement.tensors[int(pieces.tensor[row])]
            member = tuple(home.rank // divisor % degree for divisor, degree in placement.digits(int(pieces.over[row])))
            low, high = pieces.low[row], pieces.high[row]
            box = (part.state, path, low.tobytes(), high.tobytes(), member, part.value_of(path))
            offset, stride = int(pieces.offset[row]), pieces.stride[row]
            other, begin, step = first.setdefault(box, (place, offset, stride))
            if other == place or other not in numbers[0] or place not in numbers[1]:
                continue
            dims = np.argsort(-stride, kind="stable")
            move = (tensors.get(path, -1), numbers[0][other], numbers[1][place], begin, offset)
            found.setdefault(part.state, []).append((*move, *(high - low)[dims], *step[dims], *stride[dims]))
    return [_runs(state, np.array(rows, dtype=np.int64)) for state, rows in found.items()]


def _runs(state: str, table: I64) -> Runs:
    table = table[np.lexsort((table[:, 4], table[:, 2]))]
    k = (table.shape[1] - 5) // 3
    tensor, source, target = (table[:, n].astype(np.int32) for n in range(3))
    shape, here, there = (table[:, 5 + n * k : 5 + (n + 1) * k] for n in range(3))
    return Runs("copy", state, tensor, source, target, shape, table[:, 3], here, table[:, 4], there)
