"""Bind a plan's nodes and moves to the files at hand.

The files change only the following; nothing is planned anew. New nodes come after the plan's own, in the order in
which all of them run.

by_owner: a copy to a second name of a stored tensor becomes a check of the copy to its first name.

without_echoes: a check that would read the copy's own bytes again is removed.

with_carried: tensors that no layout describes are copied as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import prod
from typing import Literal

import numpy as np
from attrs import evolve

from ucpl.errors import fail
from ucpl.extents import PAIRED, Shelves
from ucpl.planning.plan import Plan
from ucpl.planning.runs import Runs
from ucpl.records import frozen
from ucpl.tables import (
    I64,
    Bools,
    Moves,
    MoveSide,
    Space,
    expanded,
    halves,
    pairs,
    split_pairs,
    whole_pairs,
    widened,
)
from ucpl.tables.operations import Check, Fill, Lane, Merge, Node

__all__ = ["BINDING", "Bound", "CarriedBox", "BoundFiles", "bound"]


@frozen
class CarriedBox:
    """A stored tensor outside the plan, and its box in a target.

    `offset` and `stride` are those of the box in the target.
    """

    source: int
    target: int
    shape: tuple[int, ...]
    offset: int
    stride: tuple[int, ...]

    @staticmethod
    def of(
        source: int, target: int, begin: tuple[int, ...], shape: tuple[int, ...], whole: tuple[int, ...]
    ) -> CarriedBox:
        """The box of `shape` at `begin` of a row-major `whole`."""
        every = tuple(prod(whole[n + 1 :]) for n in range(len(whole)))
        offset = sum(first * step for first, step in zip(begin, every, strict=True))
        # The last dims are one run, as long as the box is as wide as the tensor.
        last = len(whole) - 1
        while last > 0 and shape[last] == whole[last]:
            last -= 1
        run = prod(shape[max(last, 0) :])
        outer = [n for n in range(max(last, 0)) if shape[n] != 1]
        return CarriedBox(source, target, (*(shape[n] for n in outer), run), offset, (*(every[n] for n in outer), 1))


@frozen(eq=False)
class BoundFiles:
    """Facts about the plan's stored tensors in the files of both sides."""

    owner: I64  # of each target: itself, or the one whose storage it has, too
    view: I64  # of each source: itself, or the first one that views the same bytes in the same way
    carried: tuple[CarriedBox, ...] = ()  # of the tensors outside the plan


@frozen(eq=False)
class Bound:
    """Nodes between two checkpoints in their order, with boxes by tensor.

    Positions count units of a read: elements, or bytes if a byte has two elements.
    """

    nodes: tuple[Node, ...]
    moves: tuple[Runs, ...]  # `node` of each row points into the nodes
    spaces: tuple[Space, Space]

    @staticmethod
    def of(plan: Plan) -> Bound:
        """The plan as it is made, between any files."""
        return Bound(*_items_of(plan), plan.spaces)


Step = Callable[[Bound, BoundFiles], Bound]


def bound(plan: Plan, files: BoundFiles) -> Bound:
    """The plan's nodes and moves between these files."""
    found = Bound.of(plan)
    for step in BINDING:
        found = step(found, files)
    return found


def by_owner(bound: Bound, files: BoundFiles) -> Bound:
    """Replace a copy to a second name by a check.

    before: copy a -> t, copy a -> u, which has the storage of t     after: copy a -> t, check a -> t
    """
    is_second = files.owner != np.arange(len(files.owner))
    nodes = list(bound.nodes)
    found: list[Runs] = []
    for m in bound.moves:
        twice = is_second[m.target] if len(m) else np.zeros(0, np.bool_)
        if not twice.any():
            found.append(m)
            continue
        found.append(m.take(~twice))
        if m.kind in ("copy", "check"):
            again = m.take(twice).of_kind("check")
            again = again.replace(
                target=files.owner[again.target].astype(np.int32), node=np.full(len(again), len(nodes), np.int32)
            )
            boxes = again.table(bound.spaces).target_side
            nodes.append(Check("second names", (Lane(m.state, m.state),), boxes, m.target_value, m.lossy))
            found.append(again)
    return evolve(bound, nodes=tuple(nodes), moves=tuple(found))


def without_echoes(bound: Bound, files: BoundFiles) -> Bound:
    """Remove checks of a source against itself under a second name.

    before: copy a -> t, check b -> t, where b views the bytes of a     after: copy a -> t
    """
    if (files.view == np.arange(len(files.view))).all():
        return bound

    width = max((m.shape.shape[1] for m in bound.moves), default=1)

    def boxes(m: Runs) -> list[bytes]:
        shape, target, source = (widened(c, width, 1) for c in (m.shape, m.target_stride, m.source_stride))
        wide = shape > 1
        table = np.column_stack(
            [
                files.view[m.source],
                m.target,
                m.target_offset,
                m.source_offset,
                shape,
                np.where(wide, target, 1),
                np.where(wide, source, 1),
            ]
        ).astype(np.int64)
        return [row.tobytes() for row in table]

    moves = bound.moves
    copied = {box for m in moves if m.kind == "copy" and len(m) for box in boxes(m)}
    kept = tuple(
        m.take(np.array([box not in copied for box in boxes(m)], np.bool_)) if m.kind == "check" and len(m) else m
        for m in moves
    )
    return evolve(bound, moves=kept)


def with_carried(bound: Bound, files: BoundFiles) -> Bound:
    """Add one copy of each carried tensor."""
    if not files.carried:
        return bound
    n, width = len(files.carried), max(len(one.shape) for one in files.carried)
    source, target = (np.array([getattr(c, end) for c in files.carried], np.int32) for end in ("source", "target"))
    shape = np.array([c.shape + (1,) * (width - len(c.shape)) for c in files.carried], np.int64)
    step = np.array([c.stride + (1,) * (width - len(c.stride)) for c in files.carried], np.int64)
    own = np.array([[prod(c.shape[k + 1 :]) for k in range(width)] for c in files.carried], np.int64)
    whole = Runs(
        "copy", "carried", np.full(n, -1, np.int32), source, target, shape, np.zeros(n, np.int64), own,
        np.array([c.offset for c in files.carried], np.int64), step, node=np.full(n, len(bound.nodes), np.int32),
    )  # fmt: skip
    merge = Merge("carried tensors", (Lane("carried", "carried"),))
    return evolve(bound, nodes=(*bound.nodes, merge), moves=(*bound.moves, whole))


BINDING: tuple[Step, ...] = (by_owner, with_carried, without_echoes)


# --- Items: the units of a read, an element or a byte of two elements. Positions of a plan count elements. If a type
# stores two elements per byte, the runtime moves bytes: if both sides have such a type, each move consists of full
# bytes; if the source alone has, the low and the high halves of its bytes are separate moves.

Half = Literal["low", "high"]


def _paired(shelves: Shelves) -> Bools:
    """Of each stored tensor: whether its elements lie two to a byte."""
    of = [np.isin(np.array(s.dtypes if len(s.dtypes) > 1 else s.dtypes * len(s)), [*PAIRED]) for s in shelves.shelves]
    return np.concatenate([np.zeros(0, np.bool_), *of]).astype(np.bool_)


def _items_of(plan: Plan) -> tuple[tuple[Node, ...], tuple[Runs, ...]]:
    """Nodes and moves of a plan in units of a read.

    Raises: UcplError E603 if a move splits a byte.
    """
    sides = plan.source_shelves, plan.target_shelves
    if not any(PAIRED.intersection(s.dtypes) for side in sides for s in side.shelves):
        return plan.nodes, plan.moves
    here, there = _paired(sides[0]), _paired(sides[1])
    moves = tuple(part for m in plan.moves for part in _by_files(m, here, there))
    nodes = tuple(_filled(n, there, plan.spaces[1]) if isinstance(n, Fill) else n for n in plan.nodes)
    return nodes, moves


def _by_files(m: Runs, here: Bools, there: Bools) -> Iterator[Runs]:
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
    """Moves of full bytes."""
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
    """Moves of the elements in one half of each byte."""
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
    return evolve(node, boxes=MoveSide.concat([boxes.take(~mine), made]))


def _demand(good: bool, what: str) -> None:
    if not good:
        fail("E603", f"a move of elements that are stored two per byte is not of {what}")
