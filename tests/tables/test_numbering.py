"""Rows as numbers, for sorting, grouping and counting, compared with tuples."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ucpl.tables import I64, distinct, numbered
from ucpl.verification.proof.intervals import ordered

near = st.integers(-3, 3)
far = st.integers(-(1 << 60), 1 << 60)
tables = st.integers(1, 4).flatmap(lambda k: st.lists(st.tuples(*[st.one_of(near, far)] * k), max_size=12))


def columns_of(rows: list[tuple[int, ...]]) -> list[I64]:
    return [np.array(c, dtype=np.int64) for c in zip(*rows, strict=True)] if rows else [np.zeros(0, dtype=np.int64)]


@settings(deadline=None)
@given(tables)
@example([(1 << 30, 0, 5, 0), (0, (1 << 31) - 1, 0, 0), (0, 0, 5, 0), *((0, 0, n, 0) for n in (1, 2, 3, 4, 6, 7))])
def test_numbers_are_equal_and_ordered_as_rows_are(rows: list[tuple[int, ...]]) -> None:
    number = numbered(columns_of(rows)).tolist()
    assert len(number) == len(rows) and all(n >= 0 for n in number)
    for a, x in zip(rows, number, strict=True):
        assert all((a < b) == (x < y) for b, y in zip(rows, number, strict=True))
    first = distinct(columns_of(rows)).tolist()
    assert [rows[i] for i in first] == sorted(set(rows))
    assert first == [rows.index(rows[i]) for i in first], "the first of each"


@settings(deadline=None)
@given(tables)
def test_the_proof_orders_rows_alone(rows: list[tuple[int, ...]]) -> None:
    order, fresh = ordered(columns_of(rows))
    found = [rows[i] for i in order.tolist()]
    assert found == sorted(rows)
    assert [r for r, new in zip(found, fresh.tolist(), strict=True) if new] == sorted(set(rows))


@pytest.mark.parametrize("top", [1 << 20, 1 << 40, 1 << 61])
def test_columns_that_no_whole_number_holds_together_are_ranked(top: int) -> None:
    rng = np.random.default_rng(3)
    rows = [tuple(r) for r in (rng.integers(0, 3, size=(40, 5)) * (top // 2)).tolist()]
    assert [rows[i] for i in distinct(columns_of(rows)).tolist()] == sorted(set(rows))
