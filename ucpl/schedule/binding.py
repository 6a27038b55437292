"""A plan's nodes and moves for the very files at hand: rewritten by what only these tell, which plans nothing anew.

What is added to the plan stands behind its own nodes, in the order in which all of them run.

by_owner       a copy to a second name of a stored tensor is a check of what its first name gets
without_echoes a check that would read the copy's own bytes again says nothing
with_carried   tensors that no layout describes go over as they are
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from attrs import evolve, field

from ucpl.columns import I64, Space
from ucpl.columns.operations import Check, Lane, Merge, Node
from ucpl.records import frozen
from ucpl.schedule.items import items_of
from ucpl.schedule.plan import Plan
from ucpl.schedule.runs import Runs

__all__ = ["BINDING", "Bound", "Files", "bound"]


@frozen(eq=False)
class Files:
    """What the files of both sides say of the plan's stored tensors."""

    owner: I64  # of each target: itself, or the one whose storage it has, too
    view: I64  # of each source: itself, or the first one that views the same bytes in the same way
    carried: tuple[tuple[int, int, int], ...] = field(
        default=()
    )  # source, target and elements of what is beside the plan


@frozen(eq=False)
class Bound:
    """What runs between two checkpoints: nodes in the order in which they run, and their boxes told tensor by tensor.

    Positions count what is read at once: elements, or bytes where two elements lie in one.
    """

    nodes: tuple[Node, ...]
    moves: tuple[Runs, ...]  # `node` of each row points into the nodes
    spaces: tuple[Space, Space]

    @staticmethod
    def of(plan: Plan) -> Bound:
        """The plan as it is made, between any files."""
        return Bound(*items_of(plan), plan.spaces)


Step = Callable[[Bound, Files], Bound]


def bound(plan: Plan, files: Files) -> Bound:
    """The plan's nodes and moves as they are carried out between these files."""
    found = Bound.of(plan)
    for step in BINDING:
        found = step(found, files)
    return found


def by_owner(bound: Bound, files: Files) -> Bound:
    """A copy to a second name is a check of what its first name gets; so is a check there.

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


def without_echoes(bound: Bound, files: Files) -> Bound:
    """Without checks of a source against itself under a second name, box by box at the same target place.

    before: copy a -> t, check b -> t, where b views the bytes of a     after: copy a -> t
    """
    if (files.view == np.arange(len(files.view))).all():
        return bound

    def boxes(m: Runs) -> list[bytes]:
        table = np.column_stack(
            [
                files.view[m.source],
                m.target,
                m.target_offset,
                m.source_offset,
                m.shape,
                m.target_stride,
                m.source_stride,
            ]
        ).astype(np.int64)
        return [row.tobytes() + bytes([m.shape.shape[1]]) for row in table]

    moves = bound.moves
    copied = {box for m in moves if m.kind == "copy" and len(m) for box in boxes(m)}
    kept = tuple(
        m.take(np.array([box not in copied for box in boxes(m)], np.bool_)) if m.kind == "check" and len(m) else m
        for m in moves
    )
    return evolve(bound, moves=kept)


def with_carried(bound: Bound, files: Files) -> Bound:
    """And one copy of the whole of each tensor that is carried."""
    if not files.carried:
        return bound
    source, target, numel = (np.array(column, np.int64) for column in zip(*files.carried, strict=True))
    n = len(source)
    none, one, zero = np.full(n, -1, np.int32), np.ones((n, 1), np.int64), np.zeros(n, np.int64)
    whole = Runs(
        "copy", "carried", none, source.astype(np.int32), target.astype(np.int32), numel[:, None], zero, one, zero, one,
        node=np.full(n, len(bound.nodes), np.int32),
    )  # fmt: skip
    merge = Merge("what is carried", (Lane("carried", "carried"),))
    return evolve(bound, nodes=(*bound.nodes, merge), moves=(*bound.moves, whole))


BINDING: tuple[Step, ...] = (by_owner, with_carried, without_echoes)
