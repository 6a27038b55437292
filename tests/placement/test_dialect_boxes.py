"""Boxes of a fused tensor, split into those of its logical tensors.

NumPy makes the fused tensor independently.
"""

from __future__ import annotations

from itertools import product

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from ucpl.placement.dialect_boxes import DialectPiece, piece_of, through

Sizes = tuple[int, int, int, int]


def fused(
    sizes: Sizes,
) -> tuple[np.ndarray[tuple[int, ...], np.dtype[np.int64]], list[tuple[str, DialectPiece]], dict[str, object]]:
    """Query, key and value of g groups in one matrix.

    Also the elements that each of them has in it.
    """
    g, r, d, h = sizes
    q = np.arange(g * r * d * h).reshape(g, r, d, h)
    k, v = (np.arange(g * d * h).reshape(g, d, h) + first for first in (10_000, 20_000))
    whole = np.concatenate([np.concatenate([q[i].reshape(r * d, h), k[i], v[i]]) for i in range(g)])
    row, group = h, (r + 2) * d * h
    pieces = [
        ("q", piece_of(whole.shape, (0,) * 4, q.shape, 0, (group, d * row, row, 1))),
        ("k", piece_of(whole.shape, (0,) * 3, k.shape, r * d * row, (group, row, 1))),
        ("v", piece_of(whole.shape, (0,) * 3, v.shape, (r + 1) * d * row, (group, row, 1))),
    ]
    return whole, pieces, {"q": q, "k": k, "v": v}


@settings(max_examples=80, deadline=None)
@given(st.tuples(*[st.integers(1, 4)] * 4), st.data())
def test_each_element_of_a_box_is_had_once_from_where_it_is_stored(sizes: Sizes, data: st.DataObject) -> None:
    whole, pieces, logical = fused(sizes)
    low, high = [], []
    for n in whole.shape:
        first = data.draw(st.integers(0, n - 1))
        low.append(first)
        high.append(data.draw(st.integers(first + 1, n)))
    box = whole[low[0] : high[0], low[1] : high[1]]
    turned = data.draw(st.booleans())
    stored = np.concatenate([np.full(7, -1), (box.T if turned else box).reshape(-1)])
    stride = (1, box.shape[0]) if turned else (box.shape[1], 1)
    seen = np.zeros(len(stored), dtype=int)
    for name, piece in pieces:
        for part in through(piece, tuple(low), tuple(high), 7, stride):
            for index in product(*map(range, part.low, part.high)):
                at = part.offset + sum(s * (i - a) for s, i, a in zip(part.stride, index, part.low, strict=True))
                assert stored[at] == logical[name][index]  # type: ignore[index]
                seen[at] += 1
    assert (seen[7:] == 1).all() and not seen[:7].any()


def test_a_matrix_that_is_stored_turned() -> None:
    """Conv1D keeps inputs first: the same elements, the other way round."""
    logical = np.arange(12).reshape(3, 4)
    piece = piece_of((4, 3), (0, 0), (3, 4), 0, (1, 3))
    (box,) = through(piece, (1, 0), (3, 3), 0, (3, 1))  # rows 1 and 2 of the stored tensor: columns 1 and 2
    assert (box.low, box.high, box.offset, box.stride) == ((0, 1), (3, 3), 0, (1, 3))
    assert [int(logical[i, 1 + j]) for j in range(2) for i in range(3)] == logical.T[1:3].reshape(-1).tolist()
