"""Blocks: names of tensors that are alike, compared tensor by tensor."""

from __future__ import annotations

import numpy as np

from ucpl.tables import Block, Slot
from ucpl.tables.blocks import CHOICE, COORDINATE


def block() -> Block:
    rank = Slot(COORDINATE, np.array([0, 3]), "02")
    layer = Slot(CHOICE, np.array([4, 5, 6]))
    word = Slot(CHOICE, ("a", "7", "c"))
    none = np.zeros(2, dtype=np.int64)
    no = np.zeros(2, dtype=np.bool_)
    key = (("state",), (layer,), (layer,), ("w.", word))
    return Block(
        ("rank_", rank, ".pt"), key, (True, True, False, True), 3, np.array([[2, 5], [2, 4]]), np.array([0, 3]), none,
        no, np.array([False, True]), np.zeros((2, 0), dtype=np.int64),
    )  # fmt: skip


def test_a_whole_number_is_a_position_only_where_the_template_counts() -> None:
    assert block().place(1, 2) == ("rank_03.pt", ("state", 6, "6", "w.c"))
    assert block().place(0, 1) == ("rank_00.pt", ("state", 5, "5", "w.7"))
    assert len(block()) == 6


def test_a_block_at_some_coordinates() -> None:
    part = block().take(np.array([1]))
    assert part.place(0, 0) == block().place(1, 0)
    assert part.shape.tolist() == [[2, 4]] and len(part) == 3
    assert (part.padding_kind(0), block().padding_kind(0)) == ("live", "zero")
