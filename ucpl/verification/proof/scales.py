"""Prove that elements are scaled once, by their block's scale.

The proof uses the pieces of both sides. It compares the corners of a row of scales with those of the scaled elements:
along each dim of a row both sides step evenly, so
a fact about the corners of a box holds within it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NoReturn

import numpy as np

from ucpl.errors import Label, fail
from ucpl.tables import each
from ucpl.tables.operations import Flow
from ucpl.verification.proof.intervals import I64, Boxes, Mask, ProofPieces, box_of, first_left, pairs_in
from ucpl.verification.proof.moves import AT_ONCE, boxes_at
from ucpl.verification.proof.tables import ProofTables

__all__ = ["prove_scales", "scales_among"]

Ends = tuple[I64, I64, I64, I64]


def scales_among(tables: ProofTables) -> Mask:
    """A mask of tensors that the graph reads as scales."""
    out = np.zeros(max(1, len(tables.graph.target.tensors)), dtype=bool)
    for flow in _flows(tables):
        tensors, names = tables.graph.target.layout.placed, tables.graph.target.tensors
        scales = (tensors[names[t]].scale for t in each(flow.moves.tensor))
        out[[tables.number[s] for s in scales if s is not None]] = True
    return out


def prove_scales(tables: ProofTables) -> None:
    """Raise E347 for the first element with a missing or wrong scale.

    A wrong one is another block's, or a second one.
    """
    found: list[Boxes] = []
    for ends in _batches([_ends(tables, flow) for flow in _flows(tables)]):
        here, there, row, numel = (np.concatenate(column) for column in zip(*ends, strict=True))
        source, target = boxes_at(tables.source, here), boxes_at(tables.target, there)
        _same_block(tables, source, target)
        found.append(_boxes(tables, target, row, numel))
    _all_once(tables, found)


def _ends(tables: ProofTables, flow: Flow) -> Ends:
    """The corners of both sides of a flow's rows.

    Returns the positions, the row of each, and the number of elements of each row.
    """
    lane, m = flow.lanes[0], flow.moves
    index = _corners(m.shape)
    row = np.repeat(np.arange(len(m)), index.shape[1])
    index = index.reshape(len(row), -1)
    here = m.source[row] + (lane.source << tables.bits[0]) + (index * m.source_stride[row]).sum(axis=1)
    there = m.target[row] + (lane.target << tables.bits[1]) + (index * m.target_stride[row]).sum(axis=1)
    return here, there, row, m.shape.prod(axis=1)


def _batches(ends: Sequence[Ends]) -> Iterator[list[Ends]]:
    """Batches of flows, to search the pieces only a few times."""
    batch: list[Ends] = []
    for one in ends:
        batch.append((one[0], one[1], one[2] + (batch[-1][2][-1] + 1 if batch else 0), one[3]))
        if batch[-1][2][-1] > AT_ONCE:
            yield batch
            batch = []
    if batch:
        yield batch


def _flows(tables: ProofTables) -> Sequence[Flow]:
    return [flow for flow in tables.flows if flow.kind == "scale" and len(flow.moves)]


def _corners(shape: I64) -> I64:
    """All combinations of first and last index: (N, 2 ** D, D)."""
    d = shape.shape[1]
    ends = (np.arange(1 << d)[:, None] >> np.arange(d)) & 1
    out: I64 = ends[None] * (shape[:, None, :] - 1)
    return out


def _same_block(tables: ProofTables, source: Boxes, target: Boxes) -> None:
    """Check each row's corners: one scale, one element, one block."""
    tensors, names = tables.graph.target.layout.placed, tables.graph.target.tensors
    if len(source) != len(target) or (source.move != target.move).any():
        fail("E347", "a scale, or a scaled tensor, is at a place without an element", Label("plan"))
    of_source, of_target = tables.source.tensor[source.piece], tables.target.tensor[target.piece]
    numbers, which = np.unique(of_source, return_inverse=True)
    owner = np.full(
        len(numbers), -1
    )  # of each scale: the scaled tensor, its dims, and the number of elements of a block
    along, size = np.zeros((len(numbers), tables.k), np.int64), np.ones((len(numbers), tables.k), np.int64)
    for n, number in enumerate(numbers.tolist()):
        scaling = tensors[names[number]].scaling
        if scaling is not None:
            owner[n] = tables.number[scaling.of]
            along[n, : len(scaling.along)], size[n, : len(scaling.sizes)] = scaling.along, scaling.sizes
            size[n, len(scaling.sizes) :] = 0
    block = np.take_along_axis(target.low, along[which], axis=1) // np.maximum(size[which], 1)
    good = (owner[which] == of_target) & ((source.low == block) | (size[which] == 0)).all(axis=1)
    if not good.all():
        n = int(np.flatnonzero(~good)[0])
        scale = tables.name(tables.source, int(source.piece[n]), source.low[n])
        _blame(tables, target, n, f"is scaled by {scale}, which is not of its block")


def _boxes(tables: ProofTables, target: Boxes, row: I64, numel: I64) -> Boxes:
    """The scaled elements of each row, as a box of one piece.

    It reaches from corner to corner, and has at least as many elements as the row.
    """
    first = np.flatnonzero(np.concatenate([[True], row[1:] != row[:-1]]))
    low = np.minimum.reduceat(target.low, first)
    high = np.maximum.reduceat(target.high, first)
    one = (np.maximum.reduceat(target.piece, first) == target.piece[first]) & (
        np.minimum.reduceat(target.piece, first) == target.piece[first]
    )
    bad = np.flatnonzero(~one | ((high - low).prod(axis=1) != numel))
    if len(bad):
        _blame(tables, target, int(first[bad[0]]), "is scaled in a box that is none")
    none = np.zeros(len(first), dtype=np.int64)
    return Boxes(none, target.piece[first], low, high, none, np.zeros_like(low))


def _all_once(tables: ProofTables, found: list[Boxes]) -> None:
    pieces = tables.target
    low, high = box_of(pieces)
    must = _to_scale(tables, pieces)
    held = np.zeros(len(pieces), dtype=np.int64)
    for boxes in found:
        i, j = pairs_in(boxes)
        if len(i):
            index = np.maximum(boxes.low[i[0]], boxes.low[j[0]])
            fail("E347", f"{tables.name(pieces, int(boxes.piece[i[0]]), index)} is scaled twice", Label("plan"))
        held += np.bincount(boxes.piece, weights=boxes.volume, minlength=len(pieces)).astype(np.int64)
    must |= held > 0
    bad = np.flatnonzero(must & (held != (high - low).prod(axis=1)))
    if len(bad):
        piece = int(bad[0])
        mine = [(b.low[b.piece == piece], b.high[b.piece == piece]) for b in found]
        lows, highs = (np.concatenate([m[n] for m in mine]) if mine else low[:0] for n in range(2))
        index = first_left(low[piece], high[piece], lows, highs)
        fail(
            "E347", f"{tables.name(pieces, piece, low[piece] if index is None else index)} is not scaled", Label("plan")
        )


def _to_scale(tables: ProofTables, pieces: ProofPieces) -> Mask:
    """Pieces that the target stores as products, the source as factors."""
    graph = tables.graph
    sides = []
    for placement in (graph.source, graph.target):
        of = {True: set[str](), False: set[str]()}
        for part in placement.parts:
            if part.state == "weight":
                of[part.scaled] |= {placement.tensors[t] for t in part.tensors}
        sides.append(of)
    wanted = sides[1][True] - sides[1][False] - sides[0][True]
    numbers = [tables.number[path] for path in wanted]
    weight = tables.states.index("weight") if "weight" in tables.states else -1
    out: Mask = np.isin(pieces.tensor, numbers) & (pieces.state == weight)
    return out


def _blame(tables: ProofTables, target: Boxes, n: int, what: str) -> NoReturn:
    fail("E347", f"{tables.name(tables.target, int(target.piece[n]), target.low[n])} {what}", Label("plan"))
