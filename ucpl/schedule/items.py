"""A plan's moves in what is read and written at once: an element, or a byte of two of them.

Positions of a plan count elements. Of types that lie two to a byte, the runtime moves bytes: where both sides are of such a
type, each move is of whole bytes; where the source alone is, the low and the high halves of its bytes are moves of their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

import numpy as np
from attrs import evolve

from ucpl.columns import Bools, Moves, Side, Space, expanded, halves, pairs, split_pairs, whole_pairs
from ucpl.columns.operations import Fill, Node
from ucpl.errors import fail
from ucpl.extents import PAIRED, Shelves
from ucpl.schedule.runs import Runs

if TYPE_CHECKING:
    from ucpl.schedule.plan import Plan

__all__ = ["items_of", "paired"]

Half = Literal["low", "high"]


def paired(shelves: Shelves) -> Bools:
    """Of each stored tensor: whether its elements lie two to a byte."""
    of = [np.isin(np.array(s.dtypes if len(s.dtypes) > 1 else s.dtypes * len(s)), [*PAIRED]) for s in shelves.shelves]
    return np.concatenate([np.zeros(0, np.bool_), *of]).astype(np.bool_)


def items_of(plan: Plan) -> tuple[tuple[Node, ...], tuple[Runs, ...]]:
    """Nodes and moves of a plan, told in items. Raises: UcplError E603 where a move is of a part of a byte."""
    sides = plan.source_shelves, plan.target_shelves
    if not any(PAIRED.intersection(s.dtypes) for side in sides for s in side.shelves):
        return plan.nodes, plan.moves
    here, there = paired(sides[0]), paired(sides[1])
    moves = tuple(part for m in plan.moves for part in _told(m, here, there))
    nodes = tuple(_filled(n, there, plan.spaces[1]) if isinstance(n, Fill) else n for n in plan.nodes)
    return nodes, moves


def _told(m: Runs, here: Bools, there: Bools) -> Iterator[Runs]:
    if not len(m):
        yield m
        return
    source, target = here[m.source], there[m.target]
    both, alone = source & target, source & ~target
    if not (source | target).any():
        yield m
        return
    _demand(not (target & ~source).any(), "a byte of two")
    yield m.take(~source & ~target)
    if both.any():
        yield _halved(m.take(both))
    if alone.any():
        yield from (_half(m.take(alone), word) for word in ("low", "high"))


def _halved(m: Runs) -> Runs:
    """Moves of whole bytes."""
    a, b = (m.source_offset, m.source_stride), (m.target_offset, m.target_stride)
    whole = whole_pairs(m.shape, a) & whole_pairs(m.shape, b)
    whole &= (pairs(m.shape, m.source_stride) == pairs(m.shape, m.target_stride)).all(axis=1)
    _demand(bool(whole.all()), "whole bytes")
    shape, (source, source_stride) = halves(m.shape, a)
    _, (target, target_stride) = halves(m.shape, b)
    return m.replace(
        shape=shape,
        source_offset=source,
        source_stride=source_stride,
        target_offset=target,
        target_stride=target_stride,
    )


def _half(m: Runs, half: Half) -> Runs:
    """Moves of those elements that lie in one half of each byte."""
    inner = pairs(m.shape, m.source_stride)
    odd = (m.shape > 1) & (m.source_stride % 2 == 1) & ~inner
    _demand(not odd.any() and bool((inner.sum(axis=1) < 2).all()), "elements of bytes")
    row, shape, source, target = split_pairs(
        m.shape, (m.source_offset, m.source_stride), (m.target_offset, m.target_stride), half == "high"
    )
    made = m.take(row).replace(
        shape=shape, source_offset=source[0], source_stride=source[1], target_offset=target[0], target_stride=target[1]
    )
    return evolve(made, half=half)


def _filled(node: Fill, there: Bools, space: Space) -> Fill:
    """Padding, in items."""
    boxes = expanded(Moves.between(node.boxes, node.boxes), space, space).target_side
    mine = there[space.home(boxes.offset)] if len(boxes) else np.zeros(0, np.bool_)
    if not mine.any():
        return node
    p = boxes.take(mine)
    home, position = space.home(p.offset), space.position(p.offset)
    _demand(bool(whole_pairs(p.shape, (position, p.stride)).all()), "whole bytes")
    shape, (offset, stride) = halves(p.shape, (position, p.stride))
    made = p.replace(shape=shape, offset=space.address(home, offset), stride=stride)
    return evolve(node, boxes=Side.concat([boxes.take(~mine), made]))


def _demand(good: bool, what: str) -> None:
    if not good:
        fail("E603", f"a move of elements that lie two to a byte is not of {what}")
