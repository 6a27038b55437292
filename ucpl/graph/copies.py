"""Which of several copies is read, and which are only checked.

before: boxes of one state, some of them declared copies of others (ranks that share a tensor, tied homes).
after:  primary boxes that are disjoint, and copies; a class of copies with `mean` or `sum` stays whole.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from ucpl.graph.rows import Rows
from ucpl.regions.boxes import overlaps, subtract
from ucpl.regions.placement import POLICIES

I64 = NDArray[np.int64]
ANY = POLICIES.index("any")


@frozen(eq=False)
class Chosen:
    primary: Rows
    copies: Rows  # declared `same`: to be checked
    reduced: Rows  # members of classes with mean or sum, all of them


Blame = Callable[[Rows, int, int, I64], NoReturn]


def choose(rows: Rows, is_alias: NDArray[np.bool_], replica: Callable[[int], object], overlap: Blame) -> Chosen:
    """Pick one box of each class.

    is_alias: by part, whether it is a second name (never preferred).
    replica:  of a home, what tells declared copies apart: boxes of one part with equal ones must not overlap.
    overlap:  called with two rows that hold one element and are no declared copies.
    """
    n = len(rows)
    if n == 0:
        return Chosen(rows, rows, rows)
    # A copy under `any` gives way to one that counts.
    order = np.lexsort((np.arange(n), rows.policy == ANY, is_alias[rows.part]))
    rows = rows.take(order)
    columns = [rows.high[:, c] for c in reversed(range(rows.high.shape[1]))]
    columns += [rows.low[:, c] for c in reversed(range(rows.low.shape[1]))]
    by_box = np.lexsort((np.arange(n), *columns, rows.tensor))
    same = np.zeros(n, dtype=bool)
    same[1:] = (
        (rows.tensor[by_box[1:]] == rows.tensor[by_box[:-1]])
        & (rows.low[by_box[1:]] == rows.low[by_box[:-1]]).all(axis=1)
        & (rows.high[by_box[1:]] == rows.high[by_box[:-1]]).all(axis=1)
    )
    group = np.cumsum(~same) - 1
    group_of = np.empty(n, dtype=np.int64)
    group_of[by_box] = group
    first_of = by_box[np.flatnonzero(~same)]  # lexsort is stable: the first row of a group is the preferred one
    is_first = np.zeros(n, dtype=bool)
    is_first[first_of] = True
    policy_of = np.zeros(len(first_of), dtype=np.int64)
    np.maximum.at(policy_of, group_of, rows.policy)
    if not is_first.all():
        for i in np.flatnonzero(~is_first).tolist():
            j = int(first_of[group_of[i]])
            if rows.part[i] == rows.part[j] and replica(int(rows.home[i])) == replica(int(rows.home[j])):
                overlap(rows, j, i, rows.low[i])
    # A mean or a sum is over the members that ask for it or say nothing; those under `any` do not count.
    accumulates = np.zeros(len(first_of), dtype=bool)
    np.logical_or.at(accumulates, group_of, (rows.policy == 1) | (rows.policy == 2))
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
        primary, extra = _disjoint(primary, one[clash], other[clash], primary_reduced, replica, overlap)
        copies = Rows(*(np.concatenate([getattr(copies, f), getattr(extra, f)]) for f in _names()))
    elif primary_reduced.any():
        primary = primary.take(np.flatnonzero(~primary_reduced))
    return Chosen(primary, copies, reduced)


def _names() -> tuple[str, ...]:
    from ucpl.graph.rows import FIELDS

    return FIELDS


def _disjoint(
    rows: Rows, i: I64, j: I64, reduces: NDArray[np.bool_], replica: Callable[[int], object], overlap: Blame
) -> tuple[Rows, Rows]:
    """Copies cut differently (uneven tensor parallelism under ZeRO): the earlier row keeps the shared elements."""
    by_later: dict[int, list[int]] = {}
    for a, b in zip(i.tolist(), j.tolist(), strict=True):
        shared = np.maximum(rows.low[a], rows.low[b])
        same_part = rows.part[a] == rows.part[b]
        if same_part and replica(int(rows.home[a])) == replica(int(rows.home[b])):
            overlap(rows, a, b, shared)
        if reduces[a] or reduces[b] or rows.policy[a] in (1, 2) or rows.policy[b] in (1, 2):
            overlap(rows, a, b, shared)
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
        return Rows(base.tensor, low, high, base.stride, offset, base.home, base.part, base.policy)

    kept, extra = rows.take(np.flatnonzero(keep & ~reduces)), made(True)
    primary = Rows(*(np.concatenate([getattr(kept, f), getattr(extra, f)]) for f in _names()))
    return primary, made(False)
