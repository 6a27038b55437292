"""Prove a graph's fills from both sides' pieces and target lines.

A fill is of elements that the target keeps and the source has under no name, and its number is one that a line gives them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NoReturn

import numpy as np

from ucpl.errors import Label, fail
from ucpl.extents import key_text
from ucpl.layout.by_index import whole_name
from ucpl.layout.fills import PARAMETER
from ucpl.layout.layout import Box
from ucpl.placement import Part
from ucpl.tables.operations import Fill
from ucpl.verification.proof.intervals import I64, Boxes, ProofMoves, box_of, meet, ordered
from ucpl.verification.proof.moves import boxes_of
from ucpl.verification.proof.tables import ProofTables

__all__ = ["fill_boxes", "prove_fills"]


def fill_boxes(tables: ProofTables) -> Boxes:
    """The boxes of all fills in logical dims.

    `move` is the number of the fill. Raises E349 for places without an element.
    """
    fills = _fills(tables)
    moves = _as_moves(tables, fills)
    boxes = boxes_of(1, tables.target, moves)
    held = np.bincount(boxes.move, weights=boxes.volume, minlength=len(moves.state)).astype(np.int64)
    bad = np.flatnonzero(held != moves.numel)
    if len(bad):
        fill = fills[int(moves.flow[bad[0]])]
        (file, key), at = tables.place(1, int(moves.offset[1][bad[0]]))
        fail(
            "E349",
            f"{fill.state} of `{fill.label}` is filled from position {at} of {key} on, where other elements lie or none",
            Label(file, "target", where=key),
        )
    return Boxes(moves.flow[boxes.move], boxes.piece, boxes.low, boxes.high, boxes.begin, boxes.step)


def prove_fills(tables: ProofTables, boxes: Boxes) -> None:
    """Raise E349 for the first fill that is wrong or superfluous."""
    tensor, state = tables.target.tensor[boxes.piece], tables.target.state[boxes.piece]
    fills = _fills(tables)
    parts: dict[tuple[str, str], list[Part]] = {}
    for part in tables.graph.target.parts:
        parts.setdefault((part.state, part.label), []).append(part)
    for rows in _alike(boxes.move, tensor, state):
        fill, path = fills[int(boxes.move[rows[0]])], tables.graph.target.tensors[int(tensor[rows[0]])]
        said = list(_stated_boxes(tables, fill, path, parts[fill.state, fill.label]))
        good = tables.states[int(state[rows[0]])] == fill.state
        bad = [row for row in rows.tolist() if not (good and any(_is_within(boxes, row, box) for box in said))]
        if bad:
            _blame(tables, boxes, bad[0], boxes.low[bad[0]], f"is filled with {fill.value:g}, which no line says")
    low, high = box_of(tables.source)
    for other in range(len(tables.states)):
        of = np.flatnonzero(tables.source.state == other)
        group = tables.source.tensor[of]
        order, _ = ordered([group, low[of, 0]])
        of, group = of[order], group[order]
        mine = np.flatnonzero([_is_same(tables, int(s), other) for s in state.tolist()])
        i, j = meet(tensor[mine], boxes.low[mine, 0], boxes.high[mine, 0], group, low[of, 0], high[of, 0])
        i, j = mine[i], of[j]
        begin, end = np.maximum(boxes.low[i], low[j]), np.minimum(boxes.high[i], high[j])
        both = np.flatnonzero((begin < end).all(axis=1))
        if len(both):
            _blame(tables, boxes, int(i[both[0]]), begin[both[0]], "is filled, and the source has it")


def _fills(tables: ProofTables) -> list[Fill]:
    return [n for n in tables.graph.net if isinstance(n, Fill) and n.lacking]


def _as_moves(tables: ProofTables, fills: list[Fill]) -> ProofMoves:
    """Boxes of fills as moves without a source.

    `flow` is the number of the fill.
    """
    d = max([1, *(f.boxes.width for f in fills)])
    number = np.repeat(np.arange(len(fills)), [len(f.boxes) for f in fills]).astype(np.int64)
    state = np.array([tables.states.index(f.state) for f in fills] or [0], dtype=np.int64)[number]

    def wide(arrays: list[I64]) -> I64:
        rows = [np.pad(a, ((0, 0), (0, d - a.shape[1])), constant_values=1) for a in arrays]
        out: I64 = np.concatenate([np.zeros((0, d), np.int64), *rows])
        return out

    offset: I64 = np.concatenate([np.zeros(0, np.int64), *(f.boxes.offset for f in fills)])
    stride = wide([f.boxes.stride for f in fills])
    kind = np.full(len(number), "fill")
    return ProofMoves(kind, number, state, (offset, offset), (stride, stride), wide([f.boxes.shape for f in fills]))


def _is_same(tables: ProofTables, state: int, other: int) -> bool:
    """Return True if a state of the source provides another state.

    It is that state, the state that it is derived from, or the parameter.
    """
    a, b = tables.states[state], tables.states[other]
    derived = {(d.state, d.source) for d in tables.graph.source.layout.derived}
    return a == b or (a, b) in derived or (a in PARAMETER and b in PARAMETER)


def _alike(*columns: I64) -> list[I64]:
    """Group rows by their values in these columns."""
    order, fresh = ordered(list(columns))
    return np.split(order, np.flatnonzero(fresh)[1:]) if len(order) else []


def _stated_boxes(tables: ProofTables, fill: Fill, path: str, parts: Sequence[Part]) -> Iterator[Box | None]:
    """The boxes of a tensor that lines fill with the stored number.

    None: all of it.
    """
    values = {part.value_of(path) for part in parts}
    for line in tables.graph.target.layout.fillings:
        mine = path in line.names or (whole_name(path) in line.names and not line.boxes)  # live rows are rows
        if mine and any(line.value is not None and a * line.value + b == fill.value for a, b in values):
            yield from line.boxes.get(path, (None,))


def _is_within(boxes: Boxes, row: int, box: Box | None) -> bool:
    if box is None:
        return True
    n = len(box[0])
    return bool((boxes.low[row, :n] >= box[0]).all() and (boxes.high[row, :n] <= box[1]).all())


def _blame(tables: ProofTables, boxes: Boxes, row: int, index: I64, what: str) -> NoReturn:
    piece = int(boxes.piece[row])
    (file, key), _ = tables.place(1, int(tables.target.first[piece]))
    fail("E349", f"{tables.name(tables.target, piece, index)} {what}", Label(file, "target", where=key_text((key,))))
