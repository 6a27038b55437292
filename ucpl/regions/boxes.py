"""Two sets of boxes joined, and what is left of a box when others are taken out."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

I64 = NDArray[np.int64]
Ints = NDArray[np.integer]

PAIRS_AT_ONCE = 4_000_000


def overlaps(group_a: Ints, low_a: I64, high_a: I64, group_b: Ints, low_b: I64, high_b: I64) -> tuple[I64, I64]:
    """All pairs (i, j) of boxes of the same group that share an element, ordered by i and then by position in b.

    A box is low <= index < high per dim (K columns). Groups are small whole numbers (a tensor's number).
    """
    empty = np.zeros(0, dtype=np.int64)
    n, m, k = len(group_a), len(group_b), low_a.shape[1]
    if n == 0 or m == 0:
        return empty, empty
    groups = int(max(group_a.max(), group_b.max())) + 1
    if k == 0:
        low_a, high_a = np.zeros((n, 1), np.int64), np.ones((n, 1), np.int64)
        low_b, high_b = np.zeros((m, 1), np.int64), np.ones((m, 1), np.int64)
        k = 1
    # Dims along which every box of a group is one index wide are part of the key; of the others, one is swept.
    wide = np.zeros((groups, k), dtype=bool)
    best = np.zeros((groups, k), dtype=np.int64)
    for c in range(k):
        for group, low, high in ((group_a, low_a, high_a), (group_b, low_b, high_b)):
            wide[:, c] |= np.bincount(group, weights=high[:, c] - low[:, c] != 1, minlength=groups) > 0
        if wide[:, c].any():  # how many places boxes begin at: the dim with the most tells most of them apart
            best[:, c] = _distinct(
                np.concatenate([group_a, group_b]), np.concatenate([low_a[:, c], low_b[:, c]]), groups
            )
    best[~wide] = 0
    sweep = best.argmax(axis=1)
    point_a, point_b = ~wide[group_a], ~wide[group_b]
    columns_a = [np.where(point_a[:, c], low_a[:, c], 0) for c in range(k)]
    columns_b = [np.where(point_b[:, c], low_b[:, c], 0) for c in range(k)]
    key_a, key_b = _keys([group_a, *columns_a], [group_b, *columns_b])
    start_a, stop_a = low_a[np.arange(n), sweep[group_a]], high_a[np.arange(n), sweep[group_a]]
    start_b, stop_b = low_b[np.arange(m), sweep[group_b]], high_b[np.arange(m), sweep[group_b]]
    top = int(max(stop_a.max(), stop_b.max())) + 2
    keys = int(max(key_a.max(), key_b.max())) + 1
    if keys * top >= 1 << 62:  # compress positions to their ranks
        values = np.unique(np.concatenate([start_a, stop_a, start_b, stop_b]))
        start_a, stop_a, start_b, stop_b = (np.searchsorted(values, v) for v in (start_a, stop_a, start_b, stop_b))
        top = len(values) + 2
    order = np.lexsort((start_b, key_b))
    key_o, start_o, stop_o = key_b[order], start_b[order], stop_b[order]
    furthest = np.maximum.accumulate(key_o * top + stop_o) - key_o * top  # within a key: stops seen so far
    begin = np.searchsorted(key_o * top + np.maximum(furthest, 0), key_a * top + start_a, side="right")
    finish = np.searchsorted(key_o * top + start_o, key_a * top + stop_a, side="left")
    begin = np.maximum(begin, np.searchsorted(key_o, key_a, side="left"))
    count = np.maximum(finish - begin, 0)
    found_i: list[I64] = []
    found_j: list[I64] = []
    ends = np.cumsum(count)
    first = 0
    while first < n:
        limit = (ends[first - 1] if first else 0) + PAIRS_AT_ONCE
        last = max(first + 1, int(np.searchsorted(ends, limit, side="right")))
        c = count[first:last]
        i = np.repeat(np.arange(first, last), c)
        within = np.arange(len(i)) - np.repeat(np.cumsum(c) - c, c)
        j = order[np.repeat(begin[first:last], c) + within]
        keep = ((low_a[i] < high_b[j]) & (low_b[j] < high_a[i])).all(axis=1)
        found_i.append(i[keep])
        found_j.append(j[keep])
        first = last
    return np.concatenate(found_i), np.concatenate(found_j)


def _distinct(group: I64, value: I64, groups: int) -> I64:
    """How many different values each group has."""
    value = value - value.min()
    span = int(value.max()) + 1
    if groups * span >= 1 << 62:
        _, value = np.unique(value, return_inverse=True)
        span = int(value.max()) + 1
    found = np.unique(group.astype(np.int64) * span + value)
    return np.bincount(found // span, minlength=groups)[:groups]


def _keys(columns_a: Sequence[Ints], columns_b: Sequence[Ints]) -> tuple[I64, I64]:
    """One dense number per distinct row of columns, the same in a and in b."""
    n = len(columns_a[0])
    number = np.zeros(n + len(columns_b[0]), dtype=np.int64)
    for a, b in zip(columns_a, columns_b, strict=True):
        both = np.concatenate([a, b]).astype(np.int64)
        if both.min() == both.max():
            continue
        low = both - both.min()
        width = int(low.max()) + 1
        if (int(number.max()) + 1) * width >= 1 << 62:
            _, number = np.unique(number, return_inverse=True)
        if (int(number.max()) + 1) * width >= 1 << 62:
            _, low = np.unique(low, return_inverse=True)
            width = int(low.max()) + 1
        number = number * width + low
    _, number = np.unique(number, return_inverse=True)
    return number[:n], number[n:]


def subtract(low: I64, high: I64, others_low: I64, others_high: I64) -> list[tuple[I64, I64]]:
    """What is left of one box when others are taken out, as disjoint boxes. For naming elements, not for bulk work."""
    left = [(low, high)]
    for o_low, o_high in zip(others_low, others_high, strict=True):
        rest: list[tuple[I64, I64]] = []
        for a, b in left:
            if ((a >= o_high) | (b <= o_low)).any():
                rest.append((a, b))
                continue
            a, b = a.copy(), b.copy()
            for d in range(len(a)):
                if a[d] < o_low[d]:
                    upper = b.copy()
                    upper[d] = o_low[d]
                    rest.append((a.copy(), upper))
                    a[d] = o_low[d]
                if b[d] > o_high[d]:
                    lower = a.copy()
                    lower[d] = o_high[d]
                    rest.append((lower, b.copy()))
                    b[d] = o_high[d]
        left = rest
    return left
