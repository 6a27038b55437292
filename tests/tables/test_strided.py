"""Moves as a table: every step keeps which element goes where."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ucpl.tables import Moves, Space, Table, expanded, join_runs, split_rows, straighten


def pairs(moves: Moves) -> list[tuple[int, int]]:
    """(source, target) of every element."""
    out = []
    for i in range(len(moves)):
        for index in np.ndindex(*moves.shape[i].tolist()):
            at = np.array(index, dtype=np.int64)
            out.append(
                (
                    int(moves.source[i] + (at * moves.source_stride[i]).sum()),
                    int(moves.target[i] + (at * moves.target_stride[i]).sum()),
                )
            )
    return sorted(out)


@st.composite
def tables(draw: st.DrawFn) -> Moves:
    """Boxes of a row-major array that go to another array.

    Some dims are turned; sizes of 1 are among them.
    """
    dims = draw(st.integers(1, 4))
    rows = []
    at_source, at_target = 0, 0
    for _ in range(draw(st.integers(1, 4))):
        shape = [draw(st.integers(1, 4)) for _ in range(dims)]
        sides = []
        for _ in range(2):
            order = draw(st.permutations(range(dims)))
            stride, total = [0] * dims, 1
            for d in order:
                stride[d], total = total, total * (shape[d] + draw(st.integers(0, 1)))
            sides.append((stride, total))
        rows.append((at_source, at_target, shape, sides[0][0], sides[1][0]))
        gap = draw(st.integers(0, 1))
        at_source, at_target = at_source + sides[0][1] + gap, at_target + sides[1][1] + gap
    columns = [np.array(c, dtype=np.int64) for c in zip(*rows, strict=True)]
    return Moves(np.zeros(len(rows), dtype=np.int64), *columns)


@settings(max_examples=300)
@given(tables())
def test_straightening_and_joining_keep_every_pair(moves: Moves) -> None:
    straight = straighten(moves)
    assert pairs(straight) == pairs(moves)
    assert (np.diff(np.where(straight.shape > 1, straight.target_stride, 0), axis=1) <= 0).all()
    joined = join_runs(straight)
    assert pairs(joined) == pairs(moves)
    assert len(joined) <= len(moves)


def test_neighbours_are_merged_and_runs_joined() -> None:
    def one(source: int, target: int, shape: list[int], s: list[int], t: list[int]) -> Moves:
        cells = (np.array([c], dtype=np.int64) for c in (0, source, target, shape, s, t))
        return Moves(*cells)

    found = straighten(one(0, 0, [2, 3, 4], [12, 4, 1], [24, 4, 1]))
    assert (found.shape.tolist(), found.source_stride.tolist(), found.target_stride.tolist()) == (
        [[2, 12]],
        [[12, 1]],
        [[24, 1]],
    )
    runs = Moves.concat([one(0, 10, [5], [1], [1]), one(5, 15, [3], [1], [1]), one(9, 18, [2], [1], [1])])
    joined = join_runs(runs)
    assert (joined.source.tolist(), joined.target.tolist(), joined.shape.tolist()) == ([0, 9], [10, 18], [[8], [2]])


def test_only_runs_without_gaps_are_joined() -> None:
    """Every other element of six, then the three between them.

    The second row begins at the place where a run of three would end.
    """

    def moves(s: int, t: int) -> Moves:
        strides = (np.array([[s], [s]]), np.array([[t], [t]]))
        return Moves(np.zeros(2, np.int64), np.array([0, 3]), np.array([0, 3]), np.array([[3], [3]]), *strides)

    for s, t in ((2, 1), (1, 2)):
        assert pairs(join_runs(moves(s, t))) == pairs(moves(s, t))
    assert len(join_runs(moves(1, 1))) == 1


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(1, 4), st.booleans(), st.booleans()), min_size=1, max_size=4))
def test_rows_are_split_along_the_dims_that_are_named(rows: list[tuple[int, int, bool, bool]]) -> None:
    shape = np.array([r[:2] for r in rows], dtype=np.int64)
    dims = np.array([r[2:] for r in rows], dtype=np.bool_)
    row, index = split_rows(shape, dims)
    found = [(int(r), *i) for r, i in zip(row, index.tolist(), strict=True)]
    wanted = [
        (r, i, j)
        for r, (n, m, along_n, along_m) in enumerate(rows)
        for i in range(n if along_n else 1)
        for j in range(m if along_m else 1)
    ]
    assert found == wanted


def test_a_box_over_layers_becomes_one_row_a_stored_tensor() -> None:
    source, target = Space.over(6, 12), Space.over(3, 12)
    layers = Moves(
        np.array([4]),
        source.address(np.array([1]), np.array([2])),
        target.address(np.array([0]), np.array([5])),
        np.array([[3, 4]]),
        np.array([[2 * source.step, 1]]),
        np.array([[target.step, 1]]),
    )
    each = expanded(layers, source, target)
    assert pairs(each) == pairs(layers)
    assert source.home(each.source).tolist() == [1, 3, 5]
    assert target.home(each.target).tolist() == [0, 1, 2]
    assert source.position(each.source).tolist() == [2, 2, 2]
    assert target.position(each.target).tolist() == [5, 5, 5]
    assert each.shape.tolist() == [[1, 4]] * 3
    assert each.tensor.tolist() == [4] * 3


def test_no_dim_of_a_tensor_is_continued_by_the_next_tensor() -> None:
    """The last element and the next tensor's first are no neighbours.

    The stride of a tensor does not matter.
    """
    for numel in (1, 2, 7, 8, 9, 1 << 20):
        space = Space.over(4, numel)
        assert space.step > 2 * numel - 1
        assert space.home(space.address(np.array([3]), np.array([numel - 1]))).tolist() == [3]
    with pytest.raises(ValueError, match="stored tensors"):
        Space.over(1 << 30, 1 << 40)


def test_tables_of_other_widths_are_joined_and_columns_are_checked() -> None:
    narrow = Moves(*(np.array([x]) for x in (0, 1, 2)), *(np.array([[3]]) for _ in range(3)))
    wide = Moves(*(np.array([x]) for x in (4, 5, 6)), *(np.array([[7, 8]]) for _ in range(3)))
    both = Moves.concat([narrow, Moves.empty(), wide])
    assert both.shape.tolist() == [[3, 1], [7, 8]] and both.source.tolist() == [1, 5]
    assert both.take(np.array([1])).target.tolist() == [6]
    assert both.sort(-both.source).source.tolist() == [5, 1]
    four = both.take(np.array([0, 1, 0, 1]))
    assert four.sort(np.array([1, 0, 0, 1]), np.array([0, 1, 0, 1])).source.tolist() == [1, 5, 1, 5]
    assert four.sort(np.array([1, 0, 0, 1]), np.array([1, 1, 0, 0])).source.tolist() == [1, 5, 5, 1]
    assert len(Moves.of(both.arrays())) == 2
    for change in (
        {"shape": np.zeros((1, 2), np.int64)},
        {"source": np.zeros(2)},
        {"source": np.zeros((2, 1), np.int64)},
    ):
        with pytest.raises(ValueError, match="column"):
            Moves.of({**both.arrays(), **change})
    with pytest.raises(ValueError, match="columns"):
        Moves.of({"tensor": both.tensor})
    assert isinstance(both, Table)


@pytest.mark.parametrize("side", ["source", "target"])
def test_a_box_over_tensors_of_one_side_alone_is_given_one_by_one(side: str) -> None:
    """Layers that are stored one by one here, as one stack there."""
    space = Space.over(4, 12)
    stacked, single = np.array([[4, 1]]), np.array([[space.step, 1]])
    strides = (single, stacked) if side == "source" else (stacked, single)
    layers = Moves(np.array([0]), np.array([0]), np.array([0]), np.array([[3, 4]]), *strides)
    each = expanded(layers, space, space)
    assert pairs(each) == pairs(layers)
    one_by_one = each.source if side == "source" else each.target
    assert space.home(one_by_one).tolist() == [0, 1, 2]
    assert each.shape.tolist() == [[1, 4]] * 3
