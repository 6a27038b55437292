"""Which of several copies is read, and which are only checked.

before: boxes of one state, some of them declared copies of others (ranks that share a tensor, tied homes).
after:  primary boxes that are disjoint, and copies; a class of copies with `mean` or `sum` stays whole.
"""

from __future__ import annotations

from typing import NoReturn, Protocol

import numpy as np
from attrs import frozen

from ucpl.columns import I64, Bools
from ucpl.graph.rows import Rows
from ucpl.regions.boxes import overlaps, subtract
from ucpl.regions.placement import POLICIES

__all__ = ["Chosen", "choose"]

ANY = POLICIES.index("any")


class Stored(Protocol):
    """What choosing asks of the side that rows are of."""

    def replica(self, rows: Rows) -> I64:
        """Of each row, what tells declared copies apart: boxes of one part with equal ones must not overlap."""

    def overlap(self, rows: Rows, one: int, other: int, index: I64) -> NoReturn:
        """Two rows hold one element and are no declared copies."""

    def singly(self, rows: Rows) -> Rows:
        """Rows that run over several stored tensors, one row a tensor."""


@frozen(eq=False)
class Chosen:
    primary: Rows
    copies: Rows  # declared `same`: to be checked
    reduced: Rows  # members of classes with mean or sum, all of them


def choose(rows: Rows, is_alias: Bools, stored: Stored) -> Chosen:
    """Pick one box of each class. is_alias: by part, whether it is a second name (not preferred)."""
    n = len(rows)
    if n == 0:
        return Chosen(rows, rows, rows)
    # A copy under `any` gives way to one that counts, were it a second name.
    later = (rows.policy == ANY) * 2 + is_alias[rows.part]
    if later.any():
        rows = rows.take(np.argsort(later, kind="stable"))
    # Equal boxes have equal marks: they stand side by side, in the order of rows. That they are equal is looked at below.
    marks = _marks(rows)
    by_box = np.argsort(marks, kind="stable")
    same = np.zeros(n, dtype=bool)
    near = np.flatnonzero(marks[by_box[1:]] == marks[by_box[:-1]])
    one, other = by_box[near], by_box[near + 1]
    same[near + 1] = (
        (rows.tensor[one] == rows.tensor[other])
        & (rows.low[one] == rows.low[other]).all(axis=1)
        & (rows.high[one] == rows.high[other]).all(axis=1)
    )
    group = np.cumsum(~same) - 1
    group_of = np.empty(n, dtype=np.int64)
    group_of[by_box] = group
    first_of = by_box[np.flatnonzero(~same)]  # lexsort is stable: the first row of a group is the preferred one
    is_first = np.zeros(n, dtype=bool)
    is_first[first_of] = True
    policy_of = np.zeros(len(first_of), dtype=np.int64)
    if rows.policy.any():
        np.maximum.at(policy_of, group_of, rows.policy)
    if not is_first.all():
        copy = np.flatnonzero(~is_first)
        first = first_of[group_of[copy]]
        number = stored.replica(rows)
        clash_ = np.flatnonzero((rows.part[copy] == rows.part[first]) & (number[copy] == number[first]))
        if len(clash_):
            i = int(copy[clash_[0]])
            stored.overlap(rows, int(first[clash_[0]]), i, rows.low[i])
    # A mean or a sum is over the members that ask for it or say nothing; those under `any` do not count.
    accumulates = np.bincount(group_of, weights=(rows.policy == 1) | (rows.policy == 2)) > 0
    reduces = accumulates[group_of] & (rows.policy != ANY)
    counted = np.bincount(group_of, weights=reduces).astype(np.int64)
    reduces &= counted[group_of] > 1
    primary = rows.take(np.flatnonzero(is_first))
    copies = rows.take(np.flatnonzero(~is_first & (policy_of[group_of] == 0)))
    reduced = rows.take(np.flatnonzero(reduces))
    primary_reduced = reduces[is_first]
    one, other = overlaps(primary.tensor, primary.low, primary.high, primary.tensor, primary.low, primary.high)
    clash = one < other
    if clash.any():
        one, other = one[clash], other[clash]
        reduces_one = (primary_reduced | (primary.policy == 1) | (primary.policy == 2))[np.concatenate([one, other])]
        if reduces_one.any() and len(single := stored.singly(rows)) > n:
            return choose(single, is_alias, stored)  # of layers that are stored by other ranges, too: layer by layer
        primary, extra = _disjoint(primary, one, other, primary_reduced, stored)
        copies = Rows.concat([copies, extra], rows.width)
    elif primary_reduced.any():
        primary = primary.take(np.flatnonzero(~primary_reduced))
    return Chosen(primary, copies, reduced)


def _marks(rows: Rows) -> I64:
    """A number of each row that is the same for the same box of the same tensor."""
    mark = rows.tensor.astype(np.uint64)
    for c in range(rows.width):
        for column in (rows.low[:, c], rows.high[:, c]):
            mark = (mark ^ (mark >> np.uint64(29))) * np.uint64(0x9E3779B97F4A7C15) + column.astype(np.uint64)
    return mark.astype(np.int64)


def _disjoint(rows: Rows, i: I64, j: I64, reduces: Bools, stored: Stored) -> tuple[Rows, Rows]:
    """Copies cut differently (uneven tensor parallelism under ZeRO): the earlier row keeps the shared elements."""
    by_later: dict[int, list[int]] = {}
    number = stored.replica(rows)
    for a, b in zip(i.tolist(), j.tolist(), strict=True):
        shared = np.maximum(rows.low[a], rows.low[b])
        same_part = rows.part[a] == rows.part[b]
        if same_part and number[a] == number[b]:
            stored.overlap(rows, a, b, shared)
        if reduces[a] or reduces[b] or rows.policy[a] in (1, 2) or rows.policy[b] in (1, 2):
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
        if rows.policy[b] == 0:
            new += [(b, low, high, False) for low, high in shared]

    def made(which: bool) -> Rows:
        chosen = [(b, low, high) for b, low, high, primary in new if primary == which]
        base = rows.take(np.array([b for b, _, _ in chosen], dtype=np.int64))
        k = rows.low.shape[1]
        low = np.array([x for _, x, _ in chosen], dtype=np.int64).reshape(-1, k)
        high = np.array([x for _, _, x in chosen], dtype=np.int64).reshape(-1, k)
        offset = base.offset + ((low - base.low) * base.stride).sum(axis=1)
        return base.replace(low=low, high=high, offset=offset)

    kept, extra = rows.take(np.flatnonzero(keep & ~reduces)), made(True)
    return Rows.concat([kept, extra], rows.width), made(False)
