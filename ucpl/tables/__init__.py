"""Tables of columns, and boxes of strided elements as tables.

Data has this form from placement to bytes. A leaf room.
"""

from ucpl.tables.blocks import Block, Listed, Name, Slot
from ucpl.tables.pairs import halves, pairs, split_pairs, whole_pairs
from ucpl.tables.space import Space
from ucpl.tables.strided import (
    Moves,
    MoveSide,
    clip,
    distinct,
    expanded,
    gaps,
    join_runs,
    numbered,
    split_rows,
    straighten,
    uncovered,
    within,
)
from ucpl.tables.table import I64, Bools, Table, block, column, each, once, widened

__all__ = [
    "I64",
    "Block",
    "Bools",
    "Listed",
    "Moves",
    "Name",
    "MoveSide",
    "Slot",
    "Space",
    "Table",
    "block",
    "clip",
    "column",
    "distinct",
    "each",
    "expanded",
    "gaps",
    "halves",
    "join_runs",
    "numbered",
    "once",
    "pairs",
    "split_pairs",
    "split_rows",
    "straighten",
    "uncovered",
    "whole_pairs",
    "widened",
    "within",
]
