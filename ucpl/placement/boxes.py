"""Joins of two sets of boxes, and differences of boxes."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ucpl.tables import I64, Bools, distinct, numbered, once, within

Ints = NDArray[np.integer]

PAIRS_AT_ONCE = 4_000_000
SAMPLE = 1 << 14  # boxes


def overlaps(group_a: Ints, low_a: I64, high_a: I64, group_b: Ints, low_b: I64, high_b: I64) -> tuple[I64, I64]:
    """Pairs (i, j) of boxes of one group that share an element.

    They are ordered by i and then by position in b. A box is low <= index < high per dim (K columns). Groups are small
    integers (a tensor's number).
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
    for c in range(k):
        for group, low, high in ((group_a, low_a, high_a), (group_b, low_b, high_b)):
            wide[group[high[:, c] - low[:, c] != 1], c] = True
    sweep = _swept(np.concatenate([group_a, group_b]), np.concatenate([low_a, low_b]), wide)
    point_a, point_b = ~wide[group_a], ~wide[group_b]
    columns = [np.concatenate([group_a, group_b]).astype(np.int64)]
    for c in range(k):
        columns.append(
            np.concatenate([np.where(point_a[:, c], low_a[:, c], 0), np.where(point_b[:, c], low_b[:, c], 0)])
        )
    key = numbered(columns)
    key_a, key_b = key[:n], key[n:]
    start_a, stop_a = low_a[np.arange(n), sweep[group_a]], high_a[np.arange(n), sweep[group_a]]
    start_b, stop_b = low_b[np.arange(m), sweep[group_b]], high_b[np.arange(m), sweep[group_b]]
    top = int(max(stop_a.max(), stop_b.max())) + 2
    keys = int(max(key_a.max(), key_b.max())) + 1
    if keys * top >= 1 << 62:
        _, key = np.unique(key, return_inverse=True)
        key_a, key_b, keys = key[:n], key[n:], int(key.max()) + 1
    if keys * top >= 1 << 62:  # compress positions to their ranks
        values = once(np.concatenate([start_a, stop_a, start_b, stop_b]))
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
        j = order[np.repeat(begin[first:last], c) + within(c)]
        keep = ((low_a[i] < high_b[j]) & (low_b[j] < high_a[i])).all(axis=1)
        found_i.append(i[keep])
        found_j.append(j[keep])
        first = last
    return np.concatenate(found_i), np.concatenate(found_j)


def _swept(group: I64, low: I64, wide: Bools) -> I64:
    """Dim of each group that is swept.

    Of those along which its boxes are wide, it has the most begins. Any wide dim will do; this one leaves the fewest
    pairs to test. If there are many boxes, a sample decides: groups that it misses are small.
    """
    groups, k = wide.shape
    most = np.zeros((groups, k), dtype=np.int64)
    choice = wide.sum(axis=1) > 1
    which = np.flatnonzero(choice[group])
    which = which[:: 1 + len(which) // SAMPLE]
    of_group = group[which]
    for c in range(k) if len(which) else ():
        rows = distinct([of_group, low[which, c]])
        most[:, c] = np.bincount(of_group[rows], minlength=groups)
    sweep: I64 = np.where(wide, most + 1, 0).argmax(axis=1)
    return sweep


def subtract(low: I64, high: I64, others_low: I64, others_high: I64) -> list[tuple[I64, I64]]:
    """Rest of one box without others, as disjoint boxes.

    For naming elements, not for bulk work.
    """
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
