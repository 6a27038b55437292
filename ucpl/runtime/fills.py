"""Fills of a plan, bound to stored tensors; the check of coverage.

Every element of the target must be copied, reduced or filled.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np
from numpy.typing import NDArray

from ucpl.errors import Label, fail
from ucpl.extents import key_text
from ucpl.planning import Bound
from ucpl.records import frozen
from ucpl.runtime.boxes import Box
from ucpl.runtime.rows import Place, Rows, check_within
from ucpl.tables import Moves, MoveSide, expanded
from ucpl.tables.operations import Check, Fill, Node, Reduce, Scale

__all__ = ["Fills", "bind_fills", "check_covered"]

I64 = NDArray[np.int64]


@frozen(eq=False)
class Fills:
    """Columns of all boxes that are filled, sorted by (target, low).

    Elements are from `low` on, each dim with its step.
    """

    node: I64  # (N,) index into nodes
    target: I64
    low: I64
    shape: I64  # (N, D)
    step: I64  # (N, D)
    reach: I64  # (N,) the running maximum of the ends of a target's boxes
    nodes: tuple[Fill, ...]
    order: tuple[int, ...]  # of each of these nodes: its place among all that run
    starts: I64  # (targets + 1,): rows of target t are starts[t]:starts[t + 1]

    def within(self, target: int, low: int, high: int) -> range:
        """Rows that may have elements in [low, high) of a target.

        All rows that have some are among them.
        """
        a, b = int(self.starts[target]), int(self.starts[target + 1])
        if a == b:
            return range(0)
        first = a + int(self.reach[a:b].searchsorted(low, "right"))
        return range(first, a + int(self.low[a:b].searchsorted(high, "left")))

    def box(self, row: int) -> Box:
        """The box. It has no source."""
        shape = tuple(self.shape[row].tolist())
        return Box(shape, 0, (0,) * len(shape), int(self.low[row]), tuple(self.step[row].tolist()))


def bind_fills(bound: Bound, targets: Sequence[Place]) -> Fills:
    """One table of all boxes of all Fills.

    Raises: UcplError E603 if a box leaves its tensor.
    """
    space = bound.spaces[1]
    found = [(i, node) for i, node in enumerate(bound.nodes) if isinstance(node, Fill)]
    sides = [expanded(Moves.between(n.boxes, n.boxes), space, space).target_side for _, n in found]
    boxes = MoveSide.concat(sides)
    number = np.repeat(np.arange(len(sides)), [len(s) for s in sides])
    order = np.argsort(boxes.offset, kind="stable")
    boxes, number = boxes.take(order), number[order]
    target = space.home(boxes.offset)
    step = np.where(boxes.shape == 1, 0, boxes.stride)  # where there is one, its step is nobody's
    check_within("a Fill fills in", target, (boxes.shape, space.position(boxes.offset), step), targets)
    starts = np.searchsorted(target, np.arange(len(targets) + 1))
    end = boxes.offset + ((boxes.shape - 1) * step).sum(axis=1) + 1
    # Addresses of a later target are greater: the maximum so far is one of the same target.
    reach = np.maximum.accumulate(end) - space.address(target, np.zeros_like(target))
    nodes, places = tuple(n for _, n in found), tuple(i for i, _ in found)
    return Fills(number, target, space.position(boxes.offset), boxes.shape, step, reach, nodes, places, starts)


def check_covered(rows: Rows, fills: Fills, owners: Sequence[int], targets: Sequence[Place]) -> None:
    """Check that every written element is copied, reduced or filled.

    Elements are only counted: the plan guarantees that no two boxes meet. The sources of a mean meet; for them the
    check is only that they are enough. Raises: UcplError E603.
    """
    reached, lavish = np.zeros(len(targets), np.int64), np.zeros(len(targets), np.bool_)
    kinds: list[type[Node]] = [type(r.node) for r in rows.rules]
    reduces, checks = (np.array([k is kind for k in kinds] or [False])[rows.rule] for kind in (Reduce, Check))
    checks |= np.array([k is Scale for k in kinds] or [False])[rows.rule]  # changes elements in place
    np.add.at(reached, rows.target[~checks], rows.shape[~checks].prod(axis=1))
    np.add.at(reached, fills.target, fills.shape.prod(axis=1))
    lavish[rows.target[reduces]] = True
    wanted = np.array([prod(p.shape) for p in targets], np.int64)
    owns = np.array(owners, np.int64) == np.arange(len(owners))
    bad = np.flatnonzero(owns & np.where(lavish, reached < wanted, reached != wanted))
    if len(bad):
        place = targets[int(bad[0])]
        fail(
            "E603",
            f"{int(reached[bad[0]])} elements are moved to {place.text} or filled in it, which has {place.numel}",
            Label(place.file, where=key_text(place.key)),
        )
