"""Tables and joins of the proof, separate from those of the planner."""

from __future__ import annotations

from typing import Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from ucpl.records import frozen

I64 = NDArray[np.int64]
Mask = NDArray[np.bool_]


@frozen(eq=False)
class ProofPieces:
    """All pieces of one side, sorted by position.

    `dim` maps a row's columns to dims; they are in the order of falling strides.

    Positions count over all stored tensors of the side, `1 << bits` for each.
    """

    first: I64  # position of its first element
    last: I64  # ... and behind its last one
    tensor: I64  # index into the target's tensors
    state: I64  # index into the proof's states
    policy: I64
    over: I64  # of a mean or sum: the mesh axes that it is over, a bit each
    rank: I64  # the first that holds it
    part: I64  # of the placement
    size: I64  # (N, K)
    stride: I64  # (N, K); of dims of size 1, which stand last: 0
    dim: I64  # (N, K) the logical dim of each column
    low: I64  # (N, K) the first index of each column's dim

    def __len__(self) -> int:
        return len(self.first)


@frozen(eq=False)
class MovedBoxes:
    """Boxes of elements of pieces, and the move that each is of."""

    move: I64
    piece: I64
    low: I64  # (M, K) in logical dims, positions of the tensor
    high: I64

    def __len__(self) -> int:
        return len(self.move)

    @property
    def volume(self) -> I64:
        out: I64 = (self.high - self.low).prod(axis=1)
        return out

    def take(self, rows: I64 | Mask) -> Self:
        at = np.flatnonzero(rows) if rows.dtype == np.bool_ else rows
        return type(self)(*(getattr(self, f).take(at, axis=0) for f in _fields(type(self))))


@frozen(eq=False)
class Boxes(MovedBoxes):
    """The boxes of moves on one side.

    Element (i, j, ...) of a box is element `begin + i * step...` of its move, row-major.
    """

    begin: I64
    step: I64  # (M, K), in logical dims; 0 along dims of size 1

    def held(self) -> MovedBoxes:
        """The boxes without their places in moves.

        Tables are large, and the checks of filled and used elements do not need the places.
        """
        return MovedBoxes(self.move, self.piece, self.low, self.high)


H = TypeVar("H", bound=MovedBoxes)


def _fields(kind: type[MovedBoxes]) -> tuple[str, ...]:
    return (
        ("move", "piece", "low", "high", "begin", "step")
        if issubclass(kind, Boxes)
        else ("move", "piece", "low", "high")
    )


@frozen(eq=False)
class ProofMoves:
    """All moves of a graph in one table."""

    kind: NDArray[np.str_]
    flow: I64  # which flow of the graph
    state: I64  # that is filled
    offset: tuple[I64, I64]  # of source, of target
    stride: tuple[I64, I64]  # (N, D) each
    shape: I64  # (N, D)

    @property
    def numel(self) -> I64:
        out: I64 = self.shape.prod(axis=1)
        return out


# ---- joins of intervals and boxes ----------------------------------------------------------------------------------------


def meet(group_a: I64, start_a: I64, stop_a: I64, group_b: I64, start_b: I64, stop_b: I64) -> tuple[I64, I64]:
    """Pairs of half-open intervals of one group that overlap.

    B is sorted by group, then start.
    """
    if not len(group_a) or not len(group_b):
        return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
    top = int(max(stop_a.max(), stop_b.max(), 0)) + 1
    assert int(max(group_a.max(), group_b.max()) + 1) * top < 1 << 62
    reach = np.maximum.accumulate(
        group_b * top + stop_b
    )  # the furthest stop so far; of an earlier group it is too small
    first = np.searchsorted(reach, group_a * top + start_a, side="right")
    last = np.searchsorted(group_b * top + start_b, group_a * top + stop_a, side="left")
    count = np.maximum(last - first, 0)
    i = np.repeat(np.arange(len(group_a)), count)
    j = np.repeat(first - (np.cumsum(count) - count), count) + np.arange(len(i))
    real = (group_a[i] == group_b[j]) & (start_a[i] < stop_b[j]) & (start_b[j] < stop_a[i])
    return i[real], j[real]


def between(pieces: ProofPieces, piece: I64, start: I64, stop: I64) -> tuple[I64, I64, I64]:
    """The elements of pieces in a range of positions, as boxes.

    They are counted from each piece's first; the range is start <= p < stop.

    Columns nest: the span of the inner ones is at most one step of an outer one. Returns (row, low, high).
    """
    k = pieces.size.shape[1]
    row = np.arange(len(piece))
    place = np.zeros(len(piece), dtype=np.int64)
    low, high = np.zeros((len(piece), k), dtype=np.int64), pieces.size[piece].copy()
    done: list[tuple[I64, I64, I64]] = []
    for c in range(k + 1):
        size, stride = pieces.size[piece[row]], pieces.stride[piece[row]]
        span = ((size - 1) * stride)[:, c:].sum(axis=1) + 1
        meets = (place < stop[row]) & (place + span > start[row])
        within = (place >= start[row]) & (place + span <= stop[row])
        done.append((row[within], low[within], high[within]))
        go = meets & ~within
        row, place, low, high = row[go], place[go], low[go], high[go]
        if c == k or not len(row):
            break
        size, stride, span = size[go, c], np.maximum(stride[go, c], 1), span[go] - (size[go, c] - 1) * stride[go, c]
        inside = np.clip(-((place - start[row]) // stride), 0, size)  # the first index that begins at or after start
        outside = np.clip((stop[row] - span - place) // stride + 1, inside, size)  # behind the last that ends by stop
        full = outside > inside
        low[:, c], high[:, c] = inside, outside
        done.append((row[full], low[full], high[full]))
        parts = []
        for index in (inside - 1, outside):
            real = (index >= 0) & (index < size)
            parts.append((np.flatnonzero(real), index[real]))
        at, index = np.concatenate([p[0] for p in parts]), np.concatenate([p[1] for p in parts])
        row, place, low, high = row[at], place[at] + index * stride[at], low[at], high[at]
        low[:, c], high[:, c] = index, index + 1
    rows, lows, highs = (np.concatenate([d[n] for d in done]) for n in range(3))
    return rows, lows, highs


def halved(move: ProofMoves) -> tuple[ProofMoves, ProofMoves]:
    """A move cut in two along its longest dim."""
    d = int(move.shape[0].argmax())
    n = int(move.shape[0, d])
    left, right = move.shape.copy(), move.shape.copy()
    left[0, d], right[0, d] = n // 2, n - n // 2
    there = tuple(o + n // 2 * s[:, d] for o, s in zip(move.offset, move.stride, strict=True))
    return (
        ProofMoves(move.kind, move.flow, move.state, move.offset, move.stride, left),
        ProofMoves(move.kind, move.flow, move.state, (there[0], there[1]), move.stride, right),
    )


def positions_of(offset: I64, shape: I64, stride: I64) -> I64:
    """Positions of a strided move, row-major."""
    out = np.array(offset, dtype=np.int64)
    for n, step in zip(shape.tolist(), stride.tolist(), strict=True):
        out = out[..., None] + np.arange(n) * step
    return out.ravel()


def joined_boxes(tables: list[H]) -> H:
    """The rows of several tables. At least one table.

    Some may be empty.
    """
    some = [t for t in tables if len(t)] or tables[:1]
    if len(some) == 1:
        return some[0]
    kind = type(some[0])
    return kind(*(np.concatenate([getattr(t, f) for t in some]) for f in _fields(kind)))


def distinct_boxes(boxes: H) -> H:
    """One of each box of each piece."""
    if not len(boxes):
        return boxes
    order, fresh = ordered([boxes.piece, *boxes.low.T, *boxes.high.T])
    return boxes if fresh.all() else boxes.take(order[fresh])


def ordered(columns: list[I64]) -> tuple[I64, Mask]:
    """Sort rows, and mask those that differ from the row before.

    Returns (order, mask).
    """
    n = len(columns[0])
    keys: list[I64] = []
    top = 1 << 62
    for column in columns:  # as many columns as fit are one key: each is a digit of it
        least = int(column.min()) if n else 0
        width = int(column.max()) - least + 1 if n else 1
        if width == 1:
            continue
        if top * width >= 1 << 62:
            keys.append(column - least)
            top = width
        else:
            keys[-1] = keys[-1] * width + (column - least)
            top *= width
    order = np.lexsort(tuple(reversed(keys))) if keys else np.arange(n)
    fresh = np.zeros(n, dtype=bool)
    fresh[:1] = True
    for key in keys:
        sorted_key = key[order]
        fresh[1:] |= sorted_key[1:] != sorted_key[:-1]
    return order, fresh


def box_of(pieces: ProofPieces) -> tuple[I64, I64]:
    """Each piece in logical dims."""
    low, high = in_dims(pieces.dim, pieces.low, pieces.low + pieces.size)
    return low, high


def in_dims(dim: I64, *columns: I64) -> list[I64]:
    """Columns put where `dim` says that they stand: (N, K) each."""
    n, k = dim.shape
    place = (dim + k * np.arange(n)[:, None]).ravel()
    out = []
    for column in columns:
        flat = np.empty(n * k, dtype=np.int64)
        flat[place] = column.ravel()
        out.append(flat.reshape(n, k))
    return out


def pairs_in(boxes: MovedBoxes) -> tuple[I64, I64]:
    """Pairs of boxes of one piece that overlap.

    Swept along the dim that has the most different starts.
    """
    return pairs(boxes.piece, boxes.low, boxes.high)


def pairs(group: I64, low: I64, high: I64) -> tuple[I64, I64]:
    n, k = low.shape
    empty = np.zeros(0, dtype=np.int64)
    if n < 2:
        return empty, empty
    # A dim along which every box of a group is one index wide separates the boxes at once: it is part of the group.
    by_group, new = ordered([group])
    dense = np.empty(n, dtype=np.int64)
    dense[by_group] = np.cumsum(new) - 1
    wide = np.zeros((int(dense.max()) + 1, k), dtype=bool)
    for c in range(k):
        wide[dense[high[:, c] - low[:, c] != 1], c] = True
    order, new = ordered([dense, *(np.where(wide[dense, c], 0, low[:, c]) for c in range(k))])
    number = np.cumsum(new) - 1  # of each ordered row
    crowd = np.bincount(number)[number] > 1
    order, number = order[crowd], number[crowd]  # a box that is alone in its group meets none
    n = len(order)
    if not n:
        return empty, empty
    most, best = np.zeros(int(number[-1]) + 1, dtype=np.int64), np.zeros(int(number[-1]) + 1, dtype=np.int64)
    for c in np.flatnonzero(wide.any(axis=0)).tolist():
        by, fresh = ordered([number, low[order, c]])
        distinct = np.bincount(number[by][fresh], minlength=len(most))
        best = np.where(distinct > most, c, best)
        most = np.maximum(most, distinct)
    sweep = best[number]
    start, stop = low[order, sweep], high[order, sweep]
    sort = np.lexsort((start, number))
    order, number, start, stop = order[sort], number[sort], start[sort], stop[sort]
    i, j = meet(number, start, stop, number, start, stop)
    later = i < j
    i, j = order[i[later]], order[j[later]]
    real = ((low[i] < high[j]) & (low[j] < high[i])).all(axis=1)
    return i[real], j[real]


def are_exact(group: I64, counts: I64, low: I64, high: I64) -> Mask:
    """A mask of groups (0 .. len(counts)) whose boxes fill 0 ..

    Counts without overlaps.
    """
    held = np.zeros(len(counts), dtype=np.int64)
    np.add.at(held, group, (high - low).prod(axis=1))
    exact: Mask = held == counts.prod(axis=1)
    i, _ = pairs(group, low, high)
    exact[group[i]] = False
    return exact


def widened(arrays: list[I64], width: int, fill: int) -> I64:
    """Tables one below the other, all as wide as the widest is."""
    out: I64 = np.full((sum(map(len, arrays)), width), fill, dtype=np.int64)
    at = 0
    for array in arrays:
        out[at : at + len(array), : array.shape[1]] = array
        at += len(array)
    return out


def first_left(low: I64, high: I64, others_low: I64, others_high: I64) -> I64 | None:
    """The first element of some remaining box that no other box has."""
    left = left_of(low, high, others_low, others_high)
    return min((x for x, _ in left), key=lambda x: tuple(x.tolist())) if left else None


def left_of(low: I64, high: I64, others_low: I64, others_high: I64) -> list[tuple[I64, I64]]:
    """A box minus other boxes, as boxes that do not overlap."""
    left = [(low, high)]
    for a, b in zip(others_low, others_high, strict=True):
        rest: list[tuple[I64, I64]] = []
        for x, y in left:
            if (np.maximum(x, a) >= np.minimum(y, b)).any():
                rest.append((x, y))
                continue
            x, y = x.copy(), y.copy()
            for c in range(len(x)):
                if x[c] < a[c]:
                    rest.append((x.copy(), np.where(np.arange(len(x)) == c, a[c], y)))
                    x[c] = a[c]
                if y[c] > b[c]:
                    rest.append((np.where(np.arange(len(x)) == c, b[c], x), y.copy()))
                    y[c] = b[c]
        left = rest
        if not left:
            break
    return left
