"""Boxes as NumPy columns: clipping by a run of storage, and joining two sets of boxes."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

I64 = NDArray[np.int64]

PAIRS_AT_ONCE = 4_000_000


def clip(offset: I64, size: I64, stride: I64, start: I64, stop: I64) -> tuple[I64, I64, I64]:
    """The part of each strided box whose positions lie in [start, stop), as boxes.

    offset: (N,) position of the first element; size, stride: (N, K), where the dims, taken by falling stride, nest as digits do
    (an outer stride is at least the span of the dims inside it), as they do in row-major storage.
    Returns (row, low, high): row (M,) index into the input; low, high (M, K) relative to the box, 0 <= low < high <= size.
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


def overlaps(
    group_a: NDArray[Any], low_a: I64, high_a: I64, group_b: NDArray[Any], low_b: I64, high_b: I64
) -> tuple[I64, I64]:
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
        np.logical_or.at(wide[:, c], group_a, high_a[:, c] - low_a[:, c] != 1)
        np.logical_or.at(wide[:, c], group_b, high_b[:, c] - low_b[:, c] != 1)
        both = np.concatenate([np.stack([group_a, low_a[:, c]], 1), np.stack([group_b, low_b[:, c]], 1)]).astype(
            np.int64
        )
        distinct = _unique_pairs(both)
        best[:, c] = np.bincount(distinct, minlength=groups)[:groups]
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


def _unique_pairs(pairs: I64) -> I64:
    """First column of each distinct (first, second) row."""
    order = np.lexsort((pairs[:, 1], pairs[:, 0]))
    ordered = pairs[order]
    new = np.ones(len(ordered), dtype=bool)
    new[1:] = (ordered[1:] != ordered[:-1]).any(axis=1)
    out: I64 = ordered[new, 0]
    return out


def _keys(columns_a: list[NDArray[Any]], columns_b: list[NDArray[Any]]) -> tuple[I64, I64]:
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
