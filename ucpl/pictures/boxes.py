"""Boxes of a tensor as rectangles; areas are in proportion to elements.

Dims are drawn side by side or stacked, the outer ones first. In a dim that is not the innermost of its direction,
indices
that are cut alike are one strip, drawn once, whose width is their number.
"""

from __future__ import annotations

from itertools import pairwise
from math import log, prod

import numpy as np
from attrs import field
from numpy.typing import NDArray

from ucpl.records import frozen
from ucpl.tables import I64

__all__ = ["Frame", "framed", "joined"]

Reals = NDArray[np.float64]
ASPECT_MAX = 1e9


def joined(group: I64, low: I64, high: I64) -> tuple[I64, I64, I64]:
    """Join neighbouring boxes of one group along each dim.

    The elements are the same; each is in one box.
    """
    if len(group) < 2:
        return group, low, high
    rows = np.unique(np.concatenate([group[:, None], low, high], axis=1), axis=0)
    k = low.shape[1]
    before = -1
    while len(rows) != before:
        before = len(rows)
        for d in range(k):
            others = [rows[:, c] for c in range(1 + 2 * k) if c not in (1 + d, 1 + k + d)]
            order = np.lexsort((rows[:, 1 + d], *others))
            rows = rows[order]
            same = np.ones(max(0, len(rows) - 1), dtype=np.bool_)
            for column in others:
                column = column[order]
                same &= column[1:] == column[:-1]
            follows = same & (rows[1:, 1 + d] == rows[:-1, 1 + k + d])
            first = np.flatnonzero(np.concatenate([[True], ~follows])[: len(rows)])
            last = np.concatenate([first[1:], [len(rows)]]) - 1
            ends = rows[last, 1 + k + d]
            rows = rows[first]
            rows[:, 1 + k + d] = ends
    return rows[:, 0], rows[:, 1 : 1 + k], rows[:, 1 + k :]


@frozen(eq=False)
class Strip:
    """Indices along an outer dim that are drawn as one.

    They are `low`..`high`, at `start` of a picture's side, `size` of it.
    """

    low: int
    high: int
    start: float
    size: float


@frozen(eq=False)
class Frame:
    """The boxes of a tensor in a picture of 1 x 1."""

    group: I64  # (R,) of each rectangle: whose it is
    places: Reals = field(repr=False)  # (R, 4) x, y, width, height
    across: tuple[int, ...]  # dims from left to right, outer first
    down: tuple[int, ...]  # dims from top to bottom, outer first
    strips: tuple[Strip, ...]  # of the first of `across`, where it is an outer one
    aspect: float  # elements across for one down, of one matrix


def framed(group: I64, low: I64, high: I64, counts: tuple[int, ...], panels: tuple[int, ...]) -> Frame:
    """Boxes of a tensor of these counts as rectangles.

    Panels: dims that number tensors (layers, experts).
    """
    real = [d for d, n in enumerate(counts) if n > 1]
    outer = [d for d in real if d in panels]
    inner = [d for d in real if d not in panels]
    if not inner and outer:
        inner = [outer.pop()]
    rows, columns = _halves(inner, low, high, counts)
    across = [[d] for d in outer[::2]] + _merged(columns, low, high, counts)
    down = [[d] for d in outer[1::2]] + _merged(rows, low, high, counts)
    sides = [_Direction.of(dims, low, high, counts) for dims in (across, down)]
    left, right, top, bottom, row = _split(sides)
    x, width = _placed(left, right, sides[0].counts)
    y, height = _placed(top, bottom, sides[1].counts)
    strips: tuple[Strip, ...] = ()
    if len(across) > 1:
        cuts = _cuts(sides[0].low[:, 0], sides[0].high[:, 0], sides[0].counts[0])
        strips = tuple(Strip(a, b, a / sides[0].counts[0], (b - a) / sides[0].counts[0]) for a, b in pairwise(cuts))
    aspect = prod(counts[d] for d in columns) / max(1, prod(counts[d] for d in rows))
    return Frame(
        group[row],
        np.stack([x, y, width, height], axis=1),
        tuple(d for dims in across for d in dims),
        tuple(d for dims in down for d in dims),
        strips,
        min(aspect, ASPECT_MAX),
    )


def _halves(dims: list[int], low: I64, high: I64, counts: tuple[int, ...]) -> tuple[list[int], list[int]]:
    """Split dims into rows and columns.

    The number of strips is as small as possible, then the picture as square as possible. A single dim is columns.
    """
    if len(dims) < 2:
        return [], dims

    def cost(at: int) -> tuple[int, float]:
        rows, columns = dims[:at], dims[at:]
        strips = len(_merged(rows, low, high, counts)) + len(_merged(columns, low, high, counts))
        return strips, abs(log(prod(counts[d] for d in rows) / prod(counts[d] for d in columns)))

    at = min(range(1, len(dims)), key=cost)
    return dims[:at], dims[at:]


def _merged(dims: list[int], low: I64, high: I64, counts: tuple[int, ...]) -> list[list[int]]:
    """Neighbours together along which every box is one run of elements."""
    out: list[list[int]] = []
    for d in dims:
        if out:
            single = np.ones(len(low), dtype=np.bool_)
            for o in out[-1]:
                single &= high[:, o] - low[:, o] == 1
            if bool((single | ((low[:, d] == 0) & (high[:, d] == counts[d]))).all()):
                out[-1].append(d)
                continue
        out.append([d])
    return out


@frozen(eq=False)
class _Direction:
    """One direction: each list of dims as one dim.

    Columns are outer first; without dims, there is one of a single index.
    """

    low: I64  # (N, D)
    high: I64
    counts: tuple[int, ...]

    @classmethod
    def of(cls, dims: list[list[int]], low: I64, high: I64, counts: tuple[int, ...]) -> _Direction:
        n = len(low)
        if not dims:
            return cls(np.zeros((n, 1), np.int64), np.ones((n, 1), np.int64), (1,))
        lows, highs = [], []
        for run in dims:
            a, b = np.zeros(n, np.int64), np.ones(n, np.int64)
            for d in run:
                a, b = a * counts[d] + low[:, d], (b - 1) * counts[d] + high[:, d]
            lows.append(a)
            highs.append(b)
        return cls(np.stack(lows, 1), np.stack(highs, 1), tuple(prod(counts[d] for d in run) for run in dims))


def _cuts(low: I64, high: I64, count: int) -> list[int]:
    cuts: list[int] = np.unique(np.concatenate([low, high, [0, count]])).tolist()
    return cuts


def _split(sides: list[_Direction]) -> tuple[I64, I64, I64, I64, I64]:
    """Cut boxes at all ends along dims that are not the innermost.

    Last result: the box of each piece.
    """
    (a, b), row = sides, np.arange(len(sides[0].low))
    tables = [a.low, a.high, b.low, b.high]
    for side, first in ((a, 0), (b, 2)):
        for d in range(len(side.counts) - 1):
            cuts = np.array(_cuts(side.low[:, d], side.high[:, d], side.counts[d]))
            begin = np.searchsorted(cuts, tables[first][:, d])
            many = np.searchsorted(cuts, tables[first + 1][:, d]) - begin
            again = np.repeat(np.arange(len(row)), many)
            at = begin[again] + np.arange(len(again)) - np.repeat(np.cumsum(many) - many, many)
            tables, row = [t[again].copy() for t in tables], row[again]
            tables[first][:, d], tables[first + 1][:, d] = cuts[at], cuts[at + 1]
    return tables[0], tables[1], tables[2], tables[3], row


def _placed(low: I64, high: I64, counts: tuple[int, ...]) -> tuple[Reals, Reals]:
    """The start and size of each box along the direction. (N,) both."""
    start, size = np.zeros(len(low)), np.ones(len(low))
    for d, n in enumerate(counts):
        start = start + size * (low[:, d] / n)
        size = size * ((high[:, d] - low[:, d]) / n)
    return start, size
