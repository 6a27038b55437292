"""Choices of bracketed indices as boxes: exactly all, in their order."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ucpl.placement.entry_parts import ChoiceRun, runs_of

Positions = list[tuple[int, ...]]


def told(positions: Positions) -> tuple[list[ChoiceRun], list[tuple[int, tuple[int, ...]]]]:
    """The runs, and each element of their boxes.

    An element is (number of its choice, position).
    """
    runs = list(runs_of(np.array(positions, dtype=np.int64)))
    return runs, sorted(
        (run.first + sum((i - low) * step for i, low, step in zip(index, run.low, run.step, strict=True)), index)
        for run in runs
        for index in product(*map(range, run.low, run.high))
    )


GRID = st.integers(1, 3).flatmap(
    lambda dims: st.lists(st.tuples(*[st.integers(0, 3)] * dims), min_size=1, max_size=9, unique=True)
)


@given(st.one_of(GRID, GRID.map(sorted)))
def test_runs_are_the_choices_and_nothing_else(positions: Positions) -> None:
    assert told(positions)[1] == list(enumerate(positions))


@pytest.mark.parametrize(
    ("positions", "count"),
    [
        # Layers 4 to 6, experts 0 and 1 of each: one box, whichever of both runs fastest.
        ([(4, 0), (4, 1), (5, 0), (5, 1), (6, 0), (6, 1)], 1),
        ([(4, 0), (5, 0), (6, 0), (4, 1), (5, 1), (6, 1)], 1),
        # The same without its last one or two: indices that count up by one are a run, the box around them is none.
        ([(4, 0), (4, 1), (5, 0), (5, 1), (6, 0)], 3),
        ([(0, 0), (0, 1), (1, 0)], 2),
        ([(0,), (1,), (3,)], 2),
        ([(2,), (1,), (0,)], 3),
    ],
)
def test_a_box_holds_its_choices_alone(positions: Positions, count: int) -> None:
    runs, elements = told(positions)
    assert (len(runs), elements) == (count, list(enumerate(positions)))


def test_no_choices_are_no_runs() -> None:
    assert list(runs_of(np.zeros((0, 2), dtype=np.int64))) == []
