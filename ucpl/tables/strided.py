"""Moves: a table of boxes of strided elements from place to place.

The table is closed under its functions:


    straighten   dims in one order, neighbours merged where both sides allow
    join_runs    runs that follow each other on both sides become one
    clip         the part of each row in a range of positions
    split_rows   rows cut along dims, one row an index
    expanded     rows that run over several stored tensors, one row a tensor

Positions are of a Space (a stored tensor and a place in it) or of one tensor: the algebra is the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np

from ucpl.records import frozen
from ucpl.tables.space import Space
from ucpl.tables.table import I64, Bools, Table, block, column

__all__ = [
    "Moves", "MoveSide", "clip", "expanded", "join_runs", "split_rows", "straighten", "distinct", "numbered",
    "within", "gaps", "uncovered",
]  # fmt: skip


@frozen(eq=False)
class MoveSide(Table):
    """One side of moves.

    Element (j0, j1, ...) of box i is at `offset[i] + sum(j * stride[i])`.
    """

    tensor: I64 = column()  # (N,) the logical tensor (of a run over several, the first)
    offset: I64 = column()  # (N,)
    shape: I64 = block(fill=1)  # (N, D)
    stride: I64 = block(fill=1)  # (N, D)

    @property
    def elements(self) -> int:
        return int(self.shape.prod(axis=1).sum()) if len(self) else 0


@frozen(eq=False)
class Moves(Table):
    """Row i moves a box of `shape[i]` elements of logical tensor `tensor[i]`.

    Element (j0, j1, ...) of the box comes from `source + sum(j * source_stride)` and goes to `target + sum(j *
    target_stride)`. Dims that a row does not have are of size 1.
    """

    tensor: I64 = column()  # (N,) the tensor that is moved (of a run over several, the first)
    source: I64 = column()  # (N,)
    target: I64 = column()  # (N,)
    shape: I64 = block(fill=1)  # (N, D)
    source_stride: I64 = block(fill=1)  # (N, D)
    target_stride: I64 = block(fill=1)  # (N, D)

    @property
    def numel(self) -> I64:
        out: I64 = self.shape.prod(axis=1)
        return out

    @property
    def elements(self) -> int:
        return int(self.numel.sum()) if len(self) else 0

    @property
    def source_side(self) -> MoveSide:
        return MoveSide(self.tensor, self.source, self.shape, self.source_stride)

    @property
    def target_side(self) -> MoveSide:
        return MoveSide(self.tensor, self.target, self.shape, self.target_stride)

    @classmethod
    def between(cls, source: MoveSide, target: MoveSide) -> Moves:
        """Moves from boxes of the source to the target's, by row."""
        return cls(source.tensor, source.offset, target.offset, source.shape, source.stride, target.stride)


M = TypeVar("M", bound=Moves)


def straighten(moves: M) -> M:
    """Sort dims by falling target stride, and merge neighbours.

    Dims of size 1 are dropped; neighbours are merged if both sides allow.

    before: 2 x 3 x 4 with strides (12, 4, 1) and (24, 4, 1)   after: 2 x 12 with strides (12, 1) and (24, 1)
    """
    n, k = moves.shape.shape
    if n == 0:
        return moves
    weight = np.where(moves.shape > 1, moves.target_stride, -1)
    order = np.argsort(-weight, axis=1, kind="stable")
    size = np.take_along_axis(moves.shape, order, 1)
    s = np.where(size > 1, np.take_along_axis(moves.source_stride, order, 1), 1)
    t = np.where(size > 1, np.take_along_axis(moves.target_stride, order, 1), 1)
    # From the innermost outwards: an outer dim that continues the inner one is folded into it.
    out_size = np.ones((n, k), dtype=np.int64)
    out_s, out_t = np.ones((n, k), dtype=np.int64), np.ones((n, k), dtype=np.int64)
    column_ = np.full(n, k - 1)  # where the current merged dim is written
    every = np.arange(n)
    begun = np.zeros(n, dtype=bool)
    for d in range(k - 1, -1, -1):
        real = size[:, d] > 1
        if not real.any():
            continue
        inner_size, inner_s, inner_t = out_size[every, column_], out_s[every, column_], out_t[every, column_]
        folds = real & begun & (s[:, d] == inner_s * inner_size) & (t[:, d] == inner_t * inner_size)
        out_size[every[folds], column_[folds]] *= size[folds, d]
        fresh = real & ~folds
        column_[fresh & begun] -= 1
        out_size[every[fresh], column_[fresh]] = size[fresh, d]
        out_s[every[fresh], column_[fresh]] = s[fresh, d]
        out_t[every[fresh], column_[fresh]] = t[fresh, d]
        begun |= real
    used = int((out_size > 1).any(axis=0).sum()) or 1
    first = k - used
    # Rows with fewer dims keep theirs at the end of the columns: move them to the front.
    shift = np.argsort((out_size[:, first:] <= 1), axis=1, kind="stable")
    return moves.replace(
        shape=np.take_along_axis(out_size[:, first:], shift, 1),
        source_stride=np.take_along_axis(out_s[:, first:], shift, 1),
        target_stride=np.take_along_axis(out_t[:, first:], shift, 1),
    )


def join_runs(moves: M) -> M:
    """Join contiguous runs that follow each other on both sides.

    Rows come out in target order.

    before: 5 elements at 0 -> 10, 3 elements at 5 -> 15   after: 8 elements at 0 -> 10
    """
    n = len(moves)
    if n == 0:
        return moves
    m = moves.sort(moves.target, moves.source)
    elements = m.numel
    contiguous = (m.shape[:, 1:] == 1).all(axis=1) & (m.source_stride[:, 0] == 1) & (m.target_stride[:, 0] == 1)
    follows = np.zeros(n, dtype=bool)
    follows[1:] = (
        contiguous[1:]
        & contiguous[:-1]
        & (m.source[1:] == m.source[:-1] + elements[:-1])
        & (m.target[1:] == m.target[:-1] + elements[:-1])
    )
    starts = np.flatnonzero(~follows)
    if len(starts) == n:
        return m
    total = np.add.reduceat(elements, starts)
    out = m.take(starts)
    shape = out.shape.copy()
    grown = contiguous[starts]
    shape[grown, 0] = total[grown]
    return out.replace(shape=shape)


def clip(offset: I64, size: I64, stride: I64, start: I64, stop: I64) -> tuple[I64, I64, I64]:
    """Part of each strided box with positions in [start, stop), as boxes.

    offset: (N,) position of the first element; size, stride: (N, K), where the dims, taken by falling stride, nest as
    digits do (an outer stride is at least the span of the dims inside it), as they do in row-major storage. Returns
    (row, low, high): row (M,) index into the input; low, high (M, K) relative to the box, 0 <= low < high <= size.
    """
    n, k = size.shape
    weight = np.where(size > 1, stride, np.iinfo(np.int64).max)  # dims of size 1 first: they decide nothing
    order = np.argsort(-weight, axis=1, kind="stable") if k else np.zeros((n, 0), dtype=np.int64)
    size_s = np.take_along_axis(size, order, 1)
    stride_s = np.take_along_axis(stride, order, 1)
    reach = (size_s - 1) * stride_s
    span = np.ones((n, k + 1), dtype=np.int64)  # span[:, j]: positions from first to last over dims j..k-1
    for j in range(k - 1, -1, -1):
        span[:, j] = span[:, j + 1] + reach[:, j]
    rows_out: list[I64] = []
    low_out: list[I64] = []
    high_out: list[I64] = []
    alive = np.flatnonzero((size > 0).all(axis=1) & (stop > start))
    row, at = alive, offset[alive]
    low, high = np.zeros((len(row), k), dtype=np.int64), size_s[row].copy()
    for j in range(k + 1):
        if not len(row):
            break
        end = at + span[row, j]
        hit = (at < stop[row]) & (end > start[row])
        row, at, low, high, end = row[hit], at[hit], low[hit], high[hit], end[hit]
        full = (at >= start[row]) & (end <= stop[row])
        if j == k:
            full[:] = True
        rows_out.append(row[full])
        low_out.append(low[full])
        high_out.append(high[full])
        row, at, low, high = row[~full], at[~full], low[~full], high[~full]
        if j == k or not len(row):
            break
        step, inner = np.maximum(stride_s[row, j], 1), span[row, j + 1]
        first = np.clip(-((at - start[row]) // step), 0, size_s[row, j])  # ceil((start - at) / step)
        last = np.clip((stop[row] - at - inner) // step + 1, 0, size_s[row, j])
        some = first < last
        rows_out.append(row[some])
        mid_low, mid_high = low[some].copy(), high[some].copy()
        mid_low[:, j], mid_high[:, j] = first[some], last[some]
        low_out.append(mid_low)
        high_out.append(mid_high)
        left, right = first - 1, np.maximum(last, first)
        parts = []
        for index in (left, np.where(right > left, right, -1)):
            ok = (index >= 0) & (index < size_s[row, j])
            parts.append((np.flatnonzero(ok), index[ok]))
        pick = np.concatenate([p for p, _ in parts])
        index = np.concatenate([i for _, i in parts])
        row, at, low, high = row[pick], at[pick] + index * step[pick], low[pick].copy(), high[pick].copy()
        low[:, j], high[:, j] = index, index + 1
    out_row = np.concatenate(rows_out) if rows_out else np.zeros(0, dtype=np.int64)
    low_sorted = np.concatenate(low_out) if low_out else np.zeros((0, k), dtype=np.int64)
    high_sorted = np.concatenate(high_out) if high_out else np.zeros((0, k), dtype=np.int64)
    low_final, high_final = np.empty_like(low_sorted), np.empty_like(high_sorted)
    np.put_along_axis(low_final, order[out_row], low_sorted, 1)
    np.put_along_axis(high_final, order[out_row], high_sorted, 1)
    return out_row, low_final, high_final


def split_rows(shape: I64, dims: Bools) -> tuple[I64, I64]:
    """Rows cut along some of their dims, one row for every index.

    Returns (row, index), in row-major order. shape, dims: (N, K). `index` is (M, K), 0 along dims that are not cut.
    """
    size = np.where(dims, shape, 1)
    count: I64 = size.prod(axis=1)
    row = np.repeat(np.arange(len(shape)), count)
    rest = within(count)
    index = np.zeros((len(row), shape.shape[1]), dtype=np.int64)
    for d in range(shape.shape[1] - 1, -1, -1):
        rest, index[:, d] = np.divmod(rest, size[row, d])
    return row, index


def expanded(moves: M, source: Space, target: Space) -> M:
    """Rows over several stored tensors, split into pairs of tensors."""
    over = (moves.shape > 1) & ((moves.source_stride >= source.step) | (moves.target_stride >= target.step))
    if not over.any():
        return moves
    row, index = split_rows(moves.shape, over)
    m, cut = moves.take(row), over[row]
    return m.replace(
        source=m.source + (index * m.source_stride).sum(axis=1),
        target=m.target + (index * m.target_stride).sum(axis=1),
        shape=np.where(cut, 1, m.shape),
        source_stride=np.where(cut, 1, m.source_stride),
        target_stride=np.where(cut, 1, m.target_stride),
    )


# ---- numbering of rows -----------------------------------------------------------------------------------------------


ROOM = 1 << 62  # numbers below it can still be added to


def numbered(columns: Sequence[I64]) -> I64:
    """Number of each row, >= 0: equal and ordered as rows.

    The order is by the first column, then the next one. columns: (N,) each. Numbers are as small as digits allow, not
    dense; they become dense if digits do not fit an int64.
    """
    number = np.zeros(len(columns[0]) if columns else 0, dtype=np.int64)
    if not len(number):
        return number
    top = 1  # above every number so far
    for one in columns:
        low, high = int(one.min()), int(one.max())
        if low == high:
            continue
        digit, width = one - low, high - low + 1
        if top * width >= ROOM:
            number, top = _ranked(number)
        if top * width >= ROOM:
            digit, width = _ranked(digit)
        number = number * width + digit
        top *= width
    return number


def distinct(columns: Sequence[I64]) -> I64:
    """First row of each of the different rows, by number."""
    _, first = np.unique(numbered(columns), return_index=True)
    return first.astype(np.int64)


def within(count: I64) -> I64:
    """0, 1, .. count[i] - 1 for each i.

    The results follow each other: the place of each row in its own run of rows.
    """
    out: I64 = np.arange(int(count.sum())) - np.repeat(np.cumsum(count) - count, count)
    return out


def _ranked(values: I64) -> tuple[I64, int]:
    found, rank = np.unique(values, return_inverse=True)
    return rank.astype(np.int64), len(found)


# ---- gaps ------------------------------------------------------------------------------------------------------------


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
