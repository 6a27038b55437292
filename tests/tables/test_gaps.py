"""Gaps between boxes, compared with sets of elements."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ucpl.tables import Moves, MoveSide, Space, expanded, gaps

SPACE = Space(12)


def places(boxes: MoveSide) -> list[int]:
    """Every element of every box."""
    out: list[int] = []
    for offset, shape, stride in zip(boxes.offset.tolist(), boxes.shape, boxes.stride, strict=True):
        out += [offset + int((np.array(i) * stride).sum()) for i in np.ndindex(*shape.tolist())]
    return out


def side(rows: list[tuple[int, tuple[int, ...], tuple[int, ...]]]) -> MoveSide:
    wide = max((len(s) for _, s, _ in rows), default=1)
    shape = np.array([(*s, *(1,) * (wide - len(s))) for _, s, _ in rows], np.int64).reshape(-1, wide)
    stride = np.array([(*s, *(1,) * (wide - len(s))) for _, _, s in rows], np.int64).reshape(-1, wide)
    return MoveSide(np.zeros(len(rows), np.int64), np.array([o for o, _, _ in rows], np.int64), shape, stride)


@given(st.data())
def test_what_no_box_covers_is_all_the_rest_and_nothing_else(data: st.DataObject) -> None:
    """Tensors that are alike and others, cut into boxes, some left out.

    A box may run over several tensors.
    """
    count = data.draw(st.integers(1, 5))
    rows, columns = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 6))
    boxes: list[tuple[int, tuple[int, ...], tuple[int, ...]]] = []
    at = data.draw(st.lists(st.integers(0, columns - 1), max_size=3, unique=True))
    for column in at:  # a column of every tensor at once, perhaps without its last rows
        high = data.draw(st.integers(1, rows))
        boxes.append((column, (count, high, 1), (SPACE.step, columns, 1)))
    for home in range(count):  # and of single ones, a part of the rest
        if len(at) < columns and data.draw(st.booleans()):
            free = next(c for c in range(columns) if c not in at)
            boxes.append((home * SPACE.step + free, (data.draw(st.integers(1, rows)),), (columns,)))
    homes = np.array(data.draw(st.lists(st.integers(0, count - 1), min_size=1, unique=True)), np.int64)
    covered = side(boxes)
    found = gaps(covered, homes, np.full(len(homes), rows * columns), SPACE)
    wanted = {h * SPACE.step + p for h in homes.tolist() for p in range(rows * columns)} - set(places(covered))
    assert sorted(places(found)) == sorted(wanted)
    each = expanded(Moves.between(found, found), SPACE, SPACE).target_side
    assert sorted(places(each)) == sorted(wanted)
    for offset, shape, stride in zip(each.offset.tolist(), each.shape, each.stride, strict=True):
        assert offset // SPACE.step == (offset + int(((shape - 1) * stride).sum())) // SPACE.step, "one tensor a row"


def test_rows_and_tensors_that_end_alike_are_one_box() -> None:
    """126 layers of 40 rows that end in 3 elements of padding."""
    covered = side([(0, (126, 40, 5), (SPACE.step, 8, 1))])
    found = gaps(covered, np.arange(126), np.full(126, 320), SPACE)
    assert found.offset.tolist() == [5] and found.elements == 126 * 40 * 3
    assert [d for d in zip(found.shape[0].tolist(), found.stride[0].tolist(), strict=True) if d[0] > 1] == [
        (126, SPACE.step),
        (40, 8),
        (3, 1),
    ]


def test_tensors_that_are_not_asked_for_have_no_gaps() -> None:
    assert not len(gaps(side([]), np.zeros(0, np.int64), np.zeros(0, np.int64), SPACE))
    found = gaps(side([(0, (4,), (1,))]), np.array([3, 1]), np.array([2, 5]), SPACE)
    assert sorted(places(found)) == [SPACE.step + i for i in range(5)] + [3 * SPACE.step, 3 * SPACE.step + 1]
