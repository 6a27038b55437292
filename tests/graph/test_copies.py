"""Choice between copies: each element is read once.

Every other copy that counts is checked.
"""

from __future__ import annotations

from collections import Counter
from itertools import product
from typing import NoReturn

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ucpl.graph.copies import choose
from ucpl.graph.rows import StoredBoxes
from ucpl.layout.layout import Policy
from ucpl.tables import I64

SAME, ANY, MEAN, SUM = Policy.SAME, Policy.ANY, Policy.MEAN, Policy.SUM
Element = tuple[int, ...]
Box = tuple[int, tuple[int, int], tuple[int, int], int]  # tensor, two spans, policy


class Overlap(Exception):
    pass


class Declared:
    """A side on which row n is its own copy, number n."""

    def replica(self, rows: StoredBoxes) -> I64:
        return rows.offset // 1000

    def member(self, rows: StoredBoxes) -> I64:
        return rows.offset // 1000 // 2 % 2  # two copies of each of two members

    def disagree(self, rows: StoredBoxes, one: int, other: int) -> NoReturn:
        raise Overlap

    def overlap(self, rows: StoredBoxes, one: int, other: int, index: I64) -> NoReturn:
        raise Overlap

    def singly(self, rows: StoredBoxes) -> StoredBoxes:
        return rows


class Undeclared(Declared):
    def replica(self, rows: StoredBoxes) -> I64:
        return np.zeros(len(rows), dtype=np.int64)


def table(boxes: list[Box]) -> StoredBoxes:
    n = len(boxes)
    spans = np.array([(a, b) for _, a, b, _ in boxes], dtype=np.int64).reshape(n, 2, 2)
    low, high = spans[:, :, 0], spans[:, :, 1]
    stride = np.stack([high[:, 1] - low[:, 1], np.ones(n, dtype=np.int64)], axis=1)
    of = {name: np.array([b[i] for b in boxes], dtype=np.int64) for name, i in (("tensor", 0), ("policy", 3))}
    return StoredBoxes(
        of["tensor"],
        low,
        high,
        stride,
        1000 * np.arange(n),
        np.zeros(n, dtype=np.int64),
        of["policy"],
        0 * of["policy"],
    )


def elements(rows: StoredBoxes) -> list[tuple[Element, int]]:
    """Each element of each row, with its address."""
    out = []
    for i in range(len(rows)):
        for index in product(*map(range, rows.low[i].tolist(), rows.high[i].tolist())):
            at = int(rows.offset[i] + ((np.array(index) - rows.low[i]) * rows.stride[i]).sum())
            out.append(((int(rows.tensor[i]), *index), at))
    return out


spans = st.tuples(st.integers(0, 3), st.integers(1, 3)).map(lambda s: (s[0], s[0] + s[1]))
boxes = st.tuples(st.integers(0, 1), spans, spans, st.sampled_from([SAME, SAME, ANY]))


@settings(deadline=None)
@given(st.lists(boxes, min_size=1, max_size=6))
def test_each_element_is_read_once_and_each_copy_that_counts_is_checked(found: list[Box]) -> None:
    rows = table(found)
    chosen = choose(rows, np.zeros(1, dtype=np.bool_), Declared())
    assert not len(chosen.reduced)
    read, checked = elements(chosen.primary), elements(chosen.copies)
    stored = elements(rows)
    assert Counter(e for e, _ in read) == dict.fromkeys({e for e, _ in stored}, 1)
    assert set(read) <= set(stored) and set(checked) <= set(stored), "each where it is stored"
    assert len(set(read + checked)) == len(read + checked), "no copy twice"
    loose = {at for i, b in enumerate(found) if b[3] == ANY for _, at in elements(rows.take(slice(i, i + 1)))}
    for element, at in set(stored) - set(read) - set(checked):
        assert at in loose, element
    for _, at in read:
        if at in loose:
            equal = [b for b in found if b[:3] == found[at // 1000][:3]]
            assert all(b[3] == ANY for b in equal), "one that counts goes before one of which any will do"


@settings(deadline=None)
@given(st.lists(boxes, min_size=2, max_size=5))
def test_what_is_declared_as_no_copy_is_refused(found: list[Box]) -> None:
    held = [e for e, _ in elements(table(found))]
    if len(held) == len(set(held)):
        assert len(choose(table(found), np.zeros(1, dtype=np.bool_), Undeclared()).copies) == 0
        return
    with pytest.raises(Overlap):
        choose(table(found), np.zeros(1, dtype=np.bool_), Undeclared())


@settings(deadline=None)
@given(st.lists(st.sampled_from([SAME, ANY, MEAN, MEAN, MEAN]), min_size=2, max_size=8))
def test_what_several_members_have_is_put_together_and_what_is_the_same_is_held_against_it(policies: list[int]) -> None:
    rows = table([(0, (0, 2), (0, 3), policy) for policy in policies])
    chosen = choose(rows, np.zeros(1, dtype=np.bool_), Declared())
    of = {how: {at for at, p in enumerate(policies) if p == how} for how in (SAME, ANY, MEAN)}
    numbers = [sorted((part.offset // 1000).tolist()) for part in (chosen.primary, chosen.copies, chosen.reduced)]
    if len({at // 2 % 2 for at in of[MEAN]}) > 1:
        assert numbers == [[], sorted(of[SAME]), sorted(of[MEAN])]
        return
    assert not numbers[2] and len(numbers[0]) == 1, "a mean of one member is that member"
    counts = of[SAME] | of[MEAN]
    assert not counts or set(numbers[0] + numbers[1]) == counts, "its copies are the same"


def test_a_box_is_put_together_in_one_way() -> None:
    with pytest.raises(Overlap):
        choose(table([(0, (0, 2), (0, 3), how) for how in (MEAN, SUM)]), np.zeros(1, dtype=np.bool_), Declared())
