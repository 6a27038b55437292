"""Numbering of rows of several columns, for sorting, grouping and counting."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ucpl.tables.table import I64

__all__ = ["distinct", "numbered", "within"]

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
    for column in columns:
        low, high = int(column.min()), int(column.max())
        if low == high:
            continue
        digit, width = column - low, high - low + 1
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
