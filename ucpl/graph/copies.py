"""Choice between copies: the one to read, and those to check.

before: boxes of one state, some of them declared copies of others (ranks that share a tensor, tied homes).
after:  primary boxes that are disjoint, and copies; a class of copies with `mean` or `sum` stays complete.
"""

from __future__ import annotations

from typing import NoReturn, Protocol

import numpy as np

from ucpl.graph.rows import StoredBoxes
from ucpl.layout.layout import Policy
from ucpl.placement.boxes import overlaps, subtract
from ucpl.records import frozen
from ucpl.tables import I64, Bools

__all__ = ["Chosen", "choose"]

REDUCING = [Policy.MEAN, Policy.SUM, Policy.MAX]


class Stored(Protocol):
    """Facts on the side of rows that a choice needs."""

    def replica(self, rows: StoredBoxes) -> I64:
        """Replica number of each row.

        Boxes of one part with equal numbers must not overlap.
        """

    def overlap(self, rows: StoredBoxes, one: int, other: int, index: I64) -> NoReturn:
        """Two rows hold one element and are no declared copies."""

    def member(self, rows: StoredBoxes) -> I64:
        """Member of each row of a mean or sum.

        The row is the member or a copy of it.
        """

    def disagree(self, rows: StoredBoxes, one: int, other: int) -> NoReturn:
        """Two rows of one box are put together in two ways."""

    def singly(self, rows: StoredBoxes) -> StoredBoxes:
        """Rows that run over several stored tensors, one row a tensor."""


@frozen(eq=False)
class Chosen:
    primary: StoredBoxes
    copies: StoredBoxes  # declared `same`: to be checked
    reduced: StoredBoxes  # members of classes with mean or sum, and copies of each


def choose(rows: StoredBoxes, is_alias: Bools, stored: Stored) -> Chosen:
    """Pick one box of each class.

    is_alias: by part, True for a second name (not preferred).
    """
    if not len(rows):
        return Chosen(rows, rows, rows)
    # A copy under `any` gives way to one that counts, were it a second name.
    later = (rows.policy == Policy.LEAD) * 2 + (rows.policy == Policy.ANY) * 4 + is_alias[rows.part]
    if later.any():
        rows = rows.take(np.argsort(later, kind="stable"))
    group_of, first_of = _grouped(rows)
    is_first = np.zeros(len(rows), dtype=bool)
    is_first[first_of] = True
    if not is_first.all():
        copy = np.flatnonzero(~is_first)
        first = first_of[group_of[copy]]
        number = stored.replica(rows)
        clash = np.flatnonzero((rows.part[copy] == rows.part[first]) & (number[copy] == number[first]))
        if len(clash):
            stored.overlap(rows, int(first[clash[0]]), int(copy[clash[0]]), rows.low[copy[clash[0]]])
    asks = np.isin(rows.policy, REDUCING)
    reduces = _put_together(rows, asks, group_of, stored)
    of_reduced = np.bincount(group_of, weights=reduces)[group_of] > 0
    # Copies that are declared equal to a mean or a sum are compared with it. Leading copies are equal if nothing else
    # is read.
    first = first_of[group_of]
    counts = (rows.policy != Policy.ANY) & (
        (rows.policy != Policy.LEAD) | ((rows.policy[first] == Policy.LEAD) & (rows.part == rows.part[first]))
    )
    checked = ~reduces & counts & (of_reduced | ~is_first)
    copies, reduced = rows.take(np.flatnonzero(checked)), rows.take(np.flatnonzero(reduces))
    primary, settled = rows.take(np.flatnonzero(is_first)), of_reduced[is_first]
    one, other = overlaps(primary.tensor, primary.low, primary.high, primary.tensor, primary.low, primary.high)
    meets = one < other
    if meets.any():
        one, other = one[meets], other[meets]
        asks_one = (settled | asks[is_first])[np.concatenate([one, other])]
        if asks_one.any() and len(single := stored.singly(rows)) > len(rows):
            return choose(single, is_alias, stored)  # of layers that are stored by other ranges, too: layer by layer
        primary, extra = _disjoint(primary, one, other, settled, stored)
        copies = StoredBoxes.concat([copies, extra], rows.width)
    elif settled.any():
        primary = primary.take(np.flatnonzero(~settled))
    return Chosen(primary, copies, reduced)


def _grouped(rows: StoredBoxes) -> tuple[I64, I64]:
    """Number of each row's box, and the first row of each box."""
    # Equal boxes have equal marks: they stand side by side, in the order of rows. That they are equal is looked at below.
    marks = _marks(rows)
    by_box = np.argsort(marks, kind="stable")
    same = np.zeros(len(rows), dtype=bool)
    near = np.flatnonzero(marks[by_box[1:]] == marks[by_box[:-1]])
    one, other = by_box[near], by_box[near + 1]
    same[near + 1] = (
        (rows.tensor[one] == rows.tensor[other])
        & (rows.low[one] == rows.low[other]).all(axis=1)
        & (rows.high[one] == rows.high[other]).all(axis=1)
    )
    group_of = np.empty(len(rows), dtype=np.int64)
    group_of[by_box] = np.cumsum(~same) - 1
    return group_of, by_box[np.flatnonzero(~same)]  # argsort is stable: the first row of a group is the preferred one


def _put_together(rows: StoredBoxes, asks: Bools, group_of: I64, stored: Stored) -> Bools:
    """Rows of means and sums, with the copies of each.

    Those are the boxes that several members have.
    """
    out = np.zeros(len(rows), dtype=bool)
    asking = np.flatnonzero(asks)
    if not len(asking):
        return out
    group, member = group_of[asking], stored.member(rows.take(asking))
    way = rows.policy[asking] + len(Policy) * rows.over[asking]
    order = np.lexsort((member, group))
    group, member, way, asking = group[order], member[order], way[order], asking[order]
    alike = group[1:] == group[:-1]
    unlike = np.flatnonzero(alike & (way[1:] != way[:-1]))
    if len(unlike):
        stored.disagree(rows, int(asking[unlike[0]]), int(asking[unlike[0] + 1]))
    several = np.bincount(group[1:][alike & (member[1:] != member[:-1])], minlength=int(group_of.max()) + 1) > 0
    out[asking] = several[group]
    return out


def _marks(rows: StoredBoxes) -> I64:
    """Number of each row, one for each box of a tensor."""
    mark = rows.tensor.astype(np.uint64)
    for c in range(rows.width):
        for column in (rows.low[:, c], rows.high[:, c]):
            mark = (mark ^ (mark >> np.uint64(29))) * np.uint64(0x9E3779B97F4A7C15) + column.astype(np.uint64)
    return mark.astype(np.int64)


def _disjoint(rows: StoredBoxes, i: I64, j: I64, reduces: Bools, stored: Stored) -> tuple[StoredBoxes, StoredBoxes]:
    """Resolve copies that are cut differently: the earlier row keeps shared elements.

    An example is uneven tensor parallelism under ZeRO.
    """
    by_later: dict[int, list[int]] = {}
    number = stored.replica(rows)
    for a, b in zip(i.tolist(), j.tolist(), strict=True):
        shared = np.maximum(rows.low[a], rows.low[b])
        same_part = rows.part[a] == rows.part[b]
        if same_part and number[a] == number[b]:
            stored.overlap(rows, a, b, shared)
        if reduces[a] or reduces[b] or rows.policy[a] in REDUCING or rows.policy[b] in REDUCING:
            stored.overlap(rows, a, b, shared)
        by_later.setdefault(b, []).append(a)
    keep = np.ones(len(rows), dtype=bool)
    new: list[tuple[int, I64, I64, bool]] = []
    for b, earlier in by_later.items():
        keep[b] = False
        lows, highs = rows.low[earlier], rows.high[earlier]
        rest = subtract(rows.low[b], rows.high[b], lows, highs)
        new += [(b, low, high, True) for low, high in rest]
        shared = subtract(
            rows.low[b],
            rows.high[b],
            np.array([x for x, _ in rest]).reshape(-1, rows.low.shape[1]),
            np.array([x for _, x in rest]).reshape(-1, rows.low.shape[1]),
        )
        if rows.policy[b] == Policy.SAME:
            new += [(b, low, high, False) for low, high in shared]

    def made(which: bool) -> StoredBoxes:
        chosen = [(b, low, high) for b, low, high, primary in new if primary == which]
        base = rows.take(np.array([b for b, _, _ in chosen], dtype=np.int64))
        k = rows.low.shape[1]
        low = np.array([x for _, x, _ in chosen], dtype=np.int64).reshape(-1, k)
        high = np.array([x for _, _, x in chosen], dtype=np.int64).reshape(-1, k)
        offset = base.offset + ((low - base.low) * base.stride).sum(axis=1)
        return base.replace(low=low, high=high, offset=offset)

    kept, extra = rows.take(np.flatnonzero(keep & ~reduces)), made(True)
    return StoredBoxes.concat([kept, extra], rows.width), made(False)
