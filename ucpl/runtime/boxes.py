"""Boxes of strided elements, cut to ranges or carried into extents.

A box has sizes `shape` and, on each side, a start and a step for every dim; dims are major first. On the target's side
it is nested: the elements below one index of a dim end before the next index begins, so a contiguous range of positions
cuts it into at most 2k - 1 boxes (a ragged head, a full middle, a ragged tail, per dim).
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from ucpl.records import frozen

__all__ = ["Box", "clip", "compose"]

Ints = tuple[int, ...]


@frozen
class Box:
    """Element (j0, j1, ...) comes from `source + sum(j * source_step)`.

    It goes to `target + sum(j * target_step)`. Units are the caller's: source in bytes or elements, target in elements.
    """

    shape: Ints
    source: int
    source_step: Ints
    target: int
    target_step: Ints

    @property
    def elements(self) -> int:
        return prod(self.shape)


def clip(box: Box, low: int, high: int) -> Iterator[Box]:
    """Parts of a nested box with targets in [low, high), in order.


    >>> [(b.shape, b.source, b.target) for b in clip(Box((3, 4), 0, (4, 1), 0, (10, 1)), 2, 12)] [((1, 2), 2, 2), ((1,
    2), 4, 10)]
    """
    shape, source, source_step, target, target_step = (
        box.shape,
        box.source,
        box.source_step,
        box.target,
        box.target_step,
    )
    if 0 in shape:
        return
    axis = next((i for i, n in enumerate(shape) if n > 1), None)
    if axis is None:
        if low <= target < high:
            yield box
        return
    count = shape[axis]
    step = target_step[axis]
    reach = 0  # of the dims below: last element, relative to their first
    for n, s in zip(shape[axis + 1 :], target_step[axis + 1 :], strict=True):
        reach += (n - 1) * s
    # Indices i whose [target + i * step, target + i * step + reach] meets [low, high).
    first = max(0, -((target + reach - low) // step)) if target + reach < low else 0
    last = min(count - 1, (high - 1 - target) // step)
    if first > last:
        return
    # Indices that are inside it completely.
    first_full = max(first, -((target - low) // step)) if target < low else first
    last_full = min(last, (high - 1 - reach - target) // step)
    head, tail = shape[:axis], shape[axis + 1 :]

    def part(i: int, n: int) -> Box:
        start, goal = source + i * source_step[axis], target + i * step
        return Box((*head, n, *tail), start, source_step, goal, target_step)

    if first_full > last_full:
        for i in range(first, last + 1):
            yield from clip(part(i, 1), low, high)
        return
    for i in range(first, first_full):
        yield from clip(part(i, 1), low, high)
    yield part(first_full, last_full - first_full + 1)
    for i in range(last_full + 1, last + 1):
        yield from clip(part(i, 1), low, high)


def compose(box: Box, shape: Ints, stride: Ints) -> Iterator[Box]:
    """Carry a box into a strided storage.

    The source of the box counts elements in row-major order of `shape`; the results are boxes over a storage with
    `stride`. Source and steps of the results are positions in the storage, relative to element (0, ..., 0). A box that
    no single set of steps can describe (a run over the end of a row of a transposed tensor) is cut.


    >>> [(b.shape, b.source, b.source_step) for b in compose(Box((6,), 0, (1,), 0, (1,)), (2, 3), (1, 2))]
    [((2, 3), 0, (1, 2))]
    """
    if 0 in box.shape:
        return
    weights: list[int] = []  # row-major weight of each dim
    weight = 1
    for n in reversed(shape):
        weights.append(weight)
        weight *= n
    weights.reverse()

    def digits(position: int) -> list[int]:
        found = []
        for w in weights:
            found.append(position // w)
            position %= w
        return found

    todo = [box]
    while todo:
        b = todo.pop()
        start = digits(b.source)
        room = [n - 1 - d for n, d in zip(shape, start, strict=True)]
        steps = [digits(s) for s in b.source_step]
        crowded = None  # the dim whose steps first carry from one digit into the next
        for axis, (n, step) in enumerate(zip(b.shape, steps, strict=True)):
            room = [left - (n - 1) * d for left, d in zip(room, step, strict=True)]
            if min(room, default=0) < 0:
                crowded = axis
                break
        if crowded is None:
            along = tuple(sum(d * s for d, s in zip(step, stride, strict=True)) for step in steps)
            first = sum(d * s for d, s in zip(start, stride, strict=True))
            yield Box(b.shape, first, along, b.target, b.target_step)
            continue
        parts = _cut_rows(b, crowded, shape, weights, start) or _halves(b, crowded)
        todo += reversed(parts)


def _halves(b: Box, axis: int) -> list[Box]:
    n = b.shape[axis]
    left = n // 2
    return [_slice(b, axis, 0, left), _slice(b, axis, left, n)]


def _slice(b: Box, axis: int, low: int, high: int) -> Box:
    return Box(
        (*b.shape[:axis], high - low, *b.shape[axis + 1 :]),
        b.source + low * b.source_step[axis],
        b.source_step,
        b.target + low * b.target_step[axis],
        b.target_step,
    )


def _cut_rows(b: Box, axis: int, shape: Ints, weights: list[int], start: list[int]) -> list[Box]:
    """Cut a run along a dim at the source's row ends.

    The result is a head, full rows as two dims, and a tail. Empty: no such run.
    """
    step, n = b.source_step[axis], b.shape[axis]
    at = next((i for i, w in enumerate(weights) if w == step and shape[i] > 1), None)
    if at is None or at == 0:
        return []
    row = shape[at]
    if start[at] + n <= row:
        return []
    head = (row - start[at]) % row
    rows = (n - head) // row
    parts = []
    if head:
        parts.append(_slice(b, axis, 0, head))
    if rows:
        whole = _slice(b, axis, head, head + rows * row)
        parts.append(
            Box(
                (*whole.shape[:axis], rows, row, *whole.shape[axis + 1 :]),
                whole.source,
                (*whole.source_step[:axis], step * row, step, *whole.source_step[axis + 1 :]),
                whole.target,
                (
                    *whole.target_step[:axis],
                    whole.target_step[axis] * row,
                    whole.target_step[axis],
                    *whole.target_step[axis + 1 :],
                ),
            )
        )
    if head + rows * row < n:
        parts.append(_slice(b, axis, head + rows * row, n))
    return parts
