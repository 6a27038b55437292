"""Gaps: elements of stored tensors that no box covers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ucpl.tables.space import Space
from ucpl.tables.strided import Moves, MoveSide, expanded
from ucpl.tables.table import I64

__all__ = ["gaps", "uncovered"]


def uncovered(numel: int, start: I64, shape: I64, step: I64) -> tuple[I64, I64]:
    """Uncovered runs of a tensor's elements: (starts, stops), in order.

    Row i is a box of `shape[i]` elements from `start[i]`, each dim with its step: (N,), (N, D), (N, D).


    >>> [a.tolist() for a in uncovered(10, np.array([1, 6]), np.array([[3], [2]]), np.array([[1], [2]]))] [[0, 4, 7, 9],
    [1, 6, 8, 10]]
    """
    count = shape.prod(axis=1)
    start, shape, step, count = (a[count > 0] for a in (start, shape, step, count))
    solid = ((shape - 1) * step).sum(axis=1) + 1 == count  # a box without gaps is one run
    starts, stops = [start[solid]], [start[solid] + count[solid]]
    for row in np.flatnonzero(~solid).tolist():
        first, length = _runs(int(start[row]), shape[row].tolist(), step[row].tolist())
        starts.append(first)
        stops.append(first + length)
    low = np.concatenate(starts)
    order = np.argsort(low, kind="stable")
    low, high = low[order], np.maximum.accumulate(np.concatenate(stops)[order])
    begin, end = np.append(0, high), np.append(low, numel)
    open_ = np.flatnonzero(end > begin)
    return begin[open_], end[open_]


def _runs(start: int, shape: Sequence[int], step: Sequence[int]) -> tuple[I64, int]:
    """Begins and lengths of the runs of one box."""
    dims = sorted((s, n) for n, s in zip(shape, step, strict=True) if n > 1)
    length = 1
    while dims and dims[0][0] == length:
        length *= dims.pop(0)[1]
    first = np.array([start], np.int64)
    for s, n in dims:
        first = (first[:, None] + s * np.arange(n)).reshape(-1)
    return first, length


def gaps(covered: MoveSide, homes: I64, numel: I64, space: Space) -> MoveSide:
    """Boxes of all uncovered elements of some stored tensors (H,).

    They have `numel` (H,) elements each. Gaps at equal distances are one box: rows of a tensor that are padded at the
    end, and tensors that are.
    """
    order = np.argsort(homes, kind="stable")
    homes, numel = homes[order], numel[order]
    boxes = _within(covered, homes, space)
    # All other elements count as covered.
    begin = space.address(homes, np.zeros_like(homes))
    between = np.concatenate([[0], (begin + numel)[:-1]]) if len(homes) else begin
    last = int(begin[-1] + numel[-1]) if len(homes) else 0
    start = np.concatenate([boxes.offset, between])
    one = np.ones((len(homes), boxes.width), np.int64)
    shape = np.concatenate([boxes.shape, np.concatenate([(begin - between)[:, None], one[:, 1:]], axis=1)])
    low, high = uncovered(last, start, shape, np.concatenate([boxes.stride, one]))
    runs = MoveSide(np.full(len(low), -1, np.int64), low, (high - low)[:, None], np.ones((len(low), 1), np.int64))
    found = _folded(_folded(runs, space), space)
    used: list[int] = np.flatnonzero((found.shape > 1).any(axis=0)).tolist() or [0]
    return found.replace(shape=found.shape[:, used], stride=found.stride[:, used])


def _within(covered: MoveSide, homes: I64, space: Space) -> MoveSide:
    """Boxes in these stored tensors, one row a box and tensor."""
    if not len(homes) or not len(covered):
        return MoveSide.empty(covered.width)
    first = space.home(covered.offset)
    last = space.home(covered.offset + ((covered.shape - 1) * covered.stride).sum(axis=1))
    after = np.searchsorted(homes, first)
    near = covered.take((after < len(homes)) & (homes[np.minimum(after, len(homes) - 1)] <= last))
    each = expanded(Moves.between(near, near), space, space).target_side
    return each.take(np.isin(space.home(each.offset), homes))


def _folded(boxes: MoveSide, space: Space) -> MoveSide:
    """Neighbours of one shape at equal distances, as one box.

    It has a dim more.

    before: 3 at 7, 3 at 17, 3 at 27   after: 3 x 3 at 7, with strides 10 and 1
    """
    if len(boxes) < 2:
        return boxes
    apart = np.diff(boxes.offset)
    alike = ((boxes.shape[1:] == boxes.shape[:-1]) & (boxes.stride[1:] == boxes.stride[:-1])).all(axis=1)
    # From one tensor to another a box steps by complete tensors, or not at all.
    alike &= (np.diff(space.home(boxes.offset)) == 0) | (space.position(apart) == 0)
    goes_on = alike.copy()
    goes_on[1:] &= (apart[1:] == apart[:-1]) | ~alike[:-1]  # the second one has their distance
    head = np.flatnonzero(np.concatenate([[True], ~goes_on]))
    count = np.diff(np.append(head, len(boxes)))
    step = np.where(count > 1, apart[np.minimum(head, len(apart) - 1)], 1)
    kept = boxes.take(head)
    return kept.replace(
        shape=np.concatenate([count[:, None], kept.shape], axis=1),
        stride=np.concatenate([step[:, None], kept.stride], axis=1),
    )
