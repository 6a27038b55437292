"""Two elements in a byte: boxes of elements as boxes of bytes.

A box of bytes has both elements or one of the two. A byte has the elements 2i and 2i + 1 of row-major order, the first
in its low half. So along one dim of a box, the one that steps by 1, a byte is two elements; along all others steps are
complete bytes.
"""

from __future__ import annotations

import numpy as np

from ucpl.tables.table import I64, Bools

__all__ = ["halves", "pairs", "split_pairs", "whole_pairs"]

Places = tuple[I64, I64]  # (N,) offsets and (N, D) strides of boxes


def pairs(shape: I64, stride: I64) -> Bools:
    """(N, D): the dim along which two elements share a byte."""
    out: Bools = (stride == 1) & (shape > 1)
    return out


def whole_pairs(shape: I64, places: Places) -> Bools:
    """(N,): True if a box is of complete bytes.

    It begins with one, and has both elements of each.
    """
    offset, stride = places
    inner = pairs(shape, stride)
    good = (offset % 2 == 0) & (inner.sum(axis=1) == 1)
    good &= ~(inner & (shape % 2 == 1)).any(axis=1)
    good &= ~(~inner & (shape > 1) & (stride % 2 == 1)).any(axis=1)
    whole: Bools = good
    return whole


def halves(shape: I64, places: Places) -> tuple[I64, Places]:
    """Boxes of complete bytes with a byte as the element."""
    offset, stride = places
    inner = pairs(shape, stride)
    return np.where(inner, shape // 2, shape), (offset // 2, np.where(inner, stride, stride // 2))


def split_pairs(shape: I64, places: Places, other: Places, high: bool) -> tuple[I64, I64, Places, Places]:
    """Boxes in the low or the high halves of bytes.

    They are of elements of half a byte. places: their places; other: their places on another side, an element each.
    Returns the rows that are left, their shape, and both sides: the first in bytes.
    """
    offset, stride = places
    inner = pairs(shape, stride)
    has = inner.any(axis=1)
    skipped = (offset + high) % 2  # elements before the first one
    left = np.where(inner, (shape - skipped[:, None] + 1) // 2, shape)
    row = np.flatnonzero(np.where(has, (left > 0).all(axis=1), skipped == 0))
    first = (inner * skipped[:, None])[row]
    there, step = other[0][row], other[1][row]
    return (
        row,
        left[row],
        ((offset[row] + first.sum(axis=1)) // 2, np.where(inner[row], 1, stride[row] // 2)),
        (there + (first * step).sum(axis=1), np.where(inner[row], 2 * step, step)),
    )
