"""Joins of boxes, held against walking through every element."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from ucpl.placement.boxes import overlaps, subtract
from ucpl.tables import clip


def inside(low: Any, high: Any) -> set[tuple[int, ...]]:
    return set(product(*(range(a, b) for a, b in zip(low, high, strict=True))))


@st.composite
def nested(draw: Any) -> tuple[int, list[int], list[int]]:
    """A strided box whose dims nest, in any order of columns."""
    size, stride, span = [], [], 1
    for _ in range(draw(st.integers(1, 3))):
        n = draw(st.integers(1, 4))
        step = span + draw(st.integers(0, 3))
        size.append(n)
        stride.append(step)
        span += (n - 1) * step
    order = draw(st.permutations(range(len(size))))
    pad = 3 - len(size)
    return draw(st.integers(0, 9)), [size[i] for i in order] + [1] * pad, [stride[i] for i in order] + [0] * pad


@given(st.lists(st.tuples(nested(), st.integers(0, 60), st.integers(0, 40)), min_size=1, max_size=4))
def test_clip_keeps_the_elements_of_an_interval_and_no_other(rows: list[Any]) -> None:
    offset = np.array([r[0][0] for r in rows])
    size, stride = np.array([r[0][1] for r in rows]), np.array([r[0][2] for r in rows])
    start = np.array([r[1] for r in rows])
    stop = start + np.array([r[2] for r in rows])
    row, low, high = clip(offset, size, stride, start, stop)
    got = [(int(r), *e) for r, a, b in zip(row, low, high, strict=True) for e in inside(a, b)]
    want = {
        (i, *e)
        for i in range(len(rows))
        for e in np.ndindex(*size[i])
        if start[i] <= offset[i] + (np.array(e) * stride[i]).sum() < stop[i]
    }
    assert len(got) == len(set(got))
    assert set(got) == want


@st.composite
def boxes(draw: Any) -> list[Any]:
    """Boxes of three groups.

    Along some dims all of them are one index wide, or two at most.
    """
    widest = draw(st.lists(st.integers(1, 3), min_size=2, max_size=2))
    sides = st.tuples(*(st.tuples(st.integers(0, 4), st.integers(1, n)) for n in widest))
    rows: list[Any] = draw(st.lists(st.tuples(st.integers(0, 2), sides), max_size=9))
    return rows


def columns(rows: list[Any]) -> tuple[Any, Any, Any]:
    low = np.array([[a for a, _ in r[1]] for r in rows], dtype=np.int64).reshape(-1, 2)
    size = np.array([[n for _, n in r[1]] for r in rows], dtype=np.int64).reshape(-1, 2)
    return np.array([r[0] for r in rows], dtype=np.int64), low, low + size


@given(boxes(), boxes())
@settings(max_examples=300)
def test_overlaps_are_the_pairs_that_share_an_element(a: list[Any], b: list[Any]) -> None:
    ga, la, ha = columns(a)
    gb, lb, hb = columns(b)
    i, j = overlaps(ga, la, ha, gb, lb, hb)
    got = list(zip(i.tolist(), j.tolist(), strict=True))
    want = {
        (x, y)
        for x in range(len(a))
        for y in range(len(b))
        if ga[x] == gb[y] and inside(la[x], ha[x]) & inside(lb[y], hb[y])
    }
    assert len(got) == len(set(got))
    assert set(got) == want


@given(boxes())
def test_subtract_leaves_what_no_other_box_has(rows: list[Any]) -> None:
    _, low, high = columns(rows)
    whole_low, whole_high = np.array([1, 0]), np.array([6, 5])
    left = subtract(whole_low, whole_high, low, high)
    assert all((a < b).all() for a, b in left), "a box of nothing"
    got = [e for a, b in left for e in inside(a, b)]
    assert len(got) == len(set(got))
    taken: set[tuple[int, ...]] = set()
    for a, b in zip(low, high, strict=True):
        taken |= inside(a, b)
    assert set(got) == inside(whole_low, whole_high) - taken


def test_positions_and_keys_beyond_what_a_whole_number_holds_are_ranked() -> None:
    """Many groups at distant places.

    The product of the numbers would not fit into 64 bits.
    """
    far = 1 << 40
    group = np.array([0, 1 << 21, 1 << 21, 1 << 21])
    low = np.array([[0, 0], [5 * far, 0], [6 * far - 1, 7], [7 * far, far]])
    high = np.array([[far, 1], [6 * far, far], [7 * far, 8], [8 * far, 2 * far]])
    i, j = overlaps(group, low, high, group, low, high)
    assert list(zip(i.tolist(), j.tolist(), strict=True)) == [(0, 0), (1, 1), (1, 2), (2, 1), (2, 2), (3, 3)]
    point = np.array([[far * n, far * n, far * (n % 2)] for n in range(6)])
    i, j = overlaps(np.arange(6) % 3, point, point + 1, np.arange(6) % 3, point, point + 1)
    assert i.tolist() == j.tolist() == list(range(6))
    group = np.repeat(np.arange(6), 2)
    near = np.tile([[(1 << 61) - 4], [(1 << 61) - 2]], (6, 1))
    i, j = overlaps(group, near, near + 3, group, near, near + 3)
    assert list(zip(i.tolist(), j.tolist(), strict=True)) == [
        (a, b) for a in range(12) for b in range(12) if a // 2 == b // 2
    ]
    group = np.array([0, 0, 1, 1])
    corner = np.array([[0, 0], [(1 << 32) - 1, (1 << 32) - 1]] * 2)  # a group's number times both widths is 2^64
    i, j = overlaps(group, corner, corner + 1, group, corner, corner + 1)
    assert i.tolist() == j.tolist() == [0, 1, 2, 3]
