"""The proof's own joins, each against all elements one by one."""

from __future__ import annotations

from itertools import combinations, product

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from ucpl.verification.proof.intervals import I64, ProofPieces, are_exact, between, first_left, pairs

Box = tuple[tuple[int, int], ...]
spans = st.tuples(st.integers(0, 4), st.integers(1, 3)).map(lambda s: (s[0], s[0] + s[1]))


def boxes(k: int, most: int = 8) -> st.SearchStrategy[list[Box]]:
    points = st.integers(0, 4).map(lambda i: (i, i + 1))
    return st.lists(st.tuples(*[st.one_of(spans, points)] * k), max_size=most)


def elements(box: Box) -> set[tuple[int, ...]]:
    return set(product(*(range(a, b) for a, b in box)))


def ends(found: list[Box], k: int) -> tuple[I64, I64]:
    table = np.array(found, dtype=np.int64).reshape(len(found), k, 2)
    return table[:, :, 0], table[:, :, 1]


@settings(deadline=None, max_examples=300)
@given(st.integers(1, 3).flatmap(lambda k: st.tuples(st.just(k), boxes(k), st.lists(st.integers(0, 2), min_size=8))))
def test_pairs_are_those_of_a_group_that_share_an_element(case: tuple[int, list[Box], list[int]]) -> None:
    k, found, groups = case
    group = np.array(groups[: len(found)], dtype=np.int64)
    i, j = pairs(group, *ends(found, k))
    held = [elements(box) for box in found]
    wanted = {(a, b) for a, b in combinations(range(len(found)), 2) if groups[a] == groups[b] and held[a] & held[b]}
    assert sorted((min(p), max(p)) for p in zip(i.tolist(), j.tolist(), strict=True)) == sorted(wanted)


@settings(deadline=None)
@given(st.integers(1, 3).flatmap(lambda k: st.tuples(st.just(k), boxes(k), st.tuples(*[spans] * k))))
def test_what_is_left_of_a_box(case: tuple[int, list[Box], Box]) -> None:
    k, others, box = case
    low, high = ends([box], k)
    found = first_left(low[0], high[0], *ends(others, k))
    rest = elements(box).difference(*(elements(o) for o in others))
    assert (found is None) == (not rest)
    assert found is None or tuple(found.tolist()) in rest


@settings(deadline=None)
@given(st.integers(1, 3).flatmap(lambda k: st.tuples(st.just(k), st.lists(boxes(k, 4), min_size=1, max_size=3))))
def test_boxes_that_fill_a_tensor_once(case: tuple[int, list[list[Box]]]) -> None:
    """Of several tensors at once, each for itself."""
    k, groups = case
    counts = [tuple(max((b[d][1] for b in found), default=1) for d in range(k)) for found in groups]
    exact = [
        sorted(e for b in found for e in elements(b)) == sorted(product(*map(range, n)))
        for found, n in zip(groups, counts, strict=True)
    ]
    group = np.repeat(np.arange(len(groups)), [len(found) for found in groups])
    every = [b for found in groups for b in found]
    assert are_exact(group, np.array(counts, dtype=np.int64), *ends(every, k)).tolist() == exact


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(1, 4), st.integers(1, 3)), min_size=1, max_size=3), st.data())
def test_elements_between_two_positions(digits: list[tuple[int, int]], data: st.DataObject) -> None:
    """Dims nest as digits do.

    Each steps over all that the inner ones span, and perhaps further.
    """
    size: list[int] = []
    stride: list[int] = []
    span = 1
    for n, spare in reversed(digits):
        size.insert(0, n)
        stride.insert(0, span * spare)
        span = (n - 1) * stride[0] + span
    stride = [s if n > 1 else 0 for n, s in zip(size, stride, strict=True)]
    zero = np.zeros(1, dtype=np.int64)
    shape = np.array([size], dtype=np.int64)
    steps = np.array([stride], dtype=np.int64)
    none = dict.fromkeys(("tensor", "state", "policy", "over", "rank", "part"), zero)
    table = ProofPieces(first=zero, last=zero + span, size=shape, stride=steps, dim=shape * 0, low=shape * 0, **none)
    start = data.draw(st.integers(0, span - 1))
    stop = data.draw(st.integers(start + 1, span))
    row, low, high = between(table, zero, zero + start, zero + stop)
    assert not row.any()
    got = [e for a, b in zip(low.tolist(), high.tolist(), strict=True) for e in elements(tuple(zip(a, b, strict=True)))]
    wanted = [
        e for e in product(*map(range, size)) if start <= sum(i * s for i, s in zip(e, stride, strict=True)) < stop
    ]
    assert sorted(got) == sorted(wanted)
