"""Prove that every combined value has each of its parts, once.

A part is the contribution of one stored tensor. The boxes that moves of a mean, a sum or a maximum bring to a piece of
the target are compared with all pieces of the source
that the layout combines: those that share elements with the same boxes.
"""

from __future__ import annotations

from typing import NoReturn

import numpy as np

from ucpl.errors import Label, fail
from ucpl.extents import Key
from ucpl.layout.layout import Policy
from ucpl.placement import Placement
from ucpl.planning import Plan, Runs
from ucpl.records import frozen
from ucpl.tables import each
from ucpl.verification.proof.intervals import (
    I64,
    Boxes,
    Mask,
    MovedBoxes,
    box_of,
    distinct_boxes,
    first_left,
    joined_boxes,
    left_of,
    meet,
    ordered,
    pairs,
    pairs_in,
)
from ucpl.verification.proof.moves import AT_ONCE
from ucpl.verification.proof.tables import ProofTables

__all__ = ["APART", "CombinedParts", "brought", "replica_moves", "check_replicas", "check_parts", "places"]

APART = [p for p in Policy if p not in (Policy.SAME, Policy.ANY, Policy.LEAD)]


@frozen(eq=False)
class CombinedParts:
    """Boxes that moves bring from source pieces to combined ones."""

    source: I64  # pieces
    target: I64
    low: I64  # (N, K)
    high: I64

    @property
    def volume(self) -> I64:
        out: I64 = (self.high - self.low).prod(axis=1)
        return out


def brought(tables: ProofTables, source: Boxes, target: Boxes) -> CombinedParts:
    """The inputs of means, sums and maxima.

    Both sides of every move are the same elements by then.
    """
    together = np.isin(tables.moves.kind, [n.word for n in APART])
    s, t = source.take(together[source.move]), target.take(together[target.move])
    i, j = touching(s, t)
    found = [(s.piece[:0], t.piece[:0], s.low[:0], s.high[:0])]
    for first in range(0, len(i), AT_ONCE):
        a, b = s.take(i[first : first + AT_ONCE]), t.take(j[first : first + AT_ONCE])
        low, high = np.maximum(a.low, b.low), np.minimum(a.high, b.high)
        real = same_places(a, b, low, high) & (tables.source.tensor[a.piece] == tables.target.tensor[b.piece])
        found.append((a.piece[real], b.piece[real], low[real], high[real]))
    return CombinedParts(*(np.concatenate(column) for column in zip(*found, strict=True)))


def touching(source: Boxes, target: Boxes) -> tuple[I64, I64]:
    """Boxes of both sides that have places of one move in common."""
    ends = [b.begin + ((b.high - b.low - 1) * b.step).sum(axis=1) + 1 for b in (source, target)]
    order = np.lexsort((target.begin, target.move))
    i, j = meet(source.move, source.begin, ends[0], target.move[order], target.begin[order], ends[1][order])
    return i, order[j]


def same_places(s: Boxes, t: Boxes, low: I64, high: I64) -> Mask:
    """Mask of pairs whose shared elements have equal places in moves."""
    at_s = s.begin + ((low - s.low) * s.step).sum(axis=1)
    at_t = t.begin + ((low - t.low) * t.step).sum(axis=1)
    same: Mask = (low < high).all(axis=1) & (at_s == at_t)
    same &= ((high - low == 1) | (s.step == t.step)).all(axis=1)
    return same


def places(found: CombinedParts, k: int) -> MovedBoxes:
    """The places of combined values in the target.

    Each element of each piece once, for any number of parts.
    """
    none = np.zeros(len(found.target), dtype=np.int64)
    once = distinct_boxes(MovedBoxes(none - 1, found.target, found.low, found.high))
    i, _ = pairs_in(once)
    if not len(i):
        return once
    crossed = np.isin(once.piece, once.piece[i])  # boxes of two sources that are divided in two ways
    tables = [once.take(~crossed)]
    for piece in each(once.piece[crossed]):
        mine = once.take(once.piece == piece)
        rest = [left_of(mine.low[n], mine.high[n], mine.low[:n], mine.high[:n]) for n in range(len(mine))]
        low, high = (np.array([box[end] for some in rest for box in some]).reshape(-1, k) for end in (0, 1))
        at = np.zeros(len(low), dtype=np.int64)
        tables.append(MovedBoxes(at - 1, at + piece, low, high))
    return joined_boxes(tables)


def check_parts(tables: ProofTables, found: CombinedParts, where: MovedBoxes) -> None:
    """Check that every part of every combined value is used once.

    `where`: its places in the target. E346.
    """
    if not len(where):
        return
    count = len(tables.target)
    of_state = np.full(count, -1)
    of_state[found.target] = tables.source.state[found.source]
    mixed = np.flatnonzero(of_state[found.target] != tables.source.state[found.source])
    if len(mixed):
        n = int(mixed[0])
        _blame(tables, found.target[n], found.low[n], found.source[n], "is put together of two states: one is that of")
    came = np.bincount(found.target, weights=found.volume, minlength=count)
    asked = np.bincount(where.piece, weights=_asked(tables, where, of_state), minlength=count)
    pair = found.source * count + found.target
    twice = pairs(pair, found.low, found.high)
    wrong = came != asked
    wrong[found.target[twice[0]]] = True
    for piece in np.flatnonzero(wrong).tolist():
        _missing(tables, found, where.take(where.piece == piece), int(of_state[piece]))
    if len(twice[0]):
        one, other = (int(rows[0]) for rows in twice)
        index = np.maximum(found.low[one], found.low[other])
        _blame(tables, found.target[one], index, found.source[one], "has one of its parts twice:")
    assert not wrong.any(), "the combined parts differ from the wanted ones, and no part is missing"


def _asked(tables: ProofTables, where: MovedBoxes, of_state: I64) -> I64:
    """The number of elements in all parts of each target box."""
    pieces = tables.source
    low, high = box_of(pieces)
    apart = np.flatnonzero(np.isin(pieces.policy, APART))
    states = len(tables.states)
    group = np.concatenate([
        pieces.tensor[apart] * states + pieces.state[apart],
        tables.target.tensor[where.piece] * states + of_state[where.piece],
    ])  # fmt: skip
    is_place = np.repeat([False, True], [len(apart), len(where)])
    low, high = np.concatenate([low[apart], where.low]), np.concatenate([high[apart], where.high])
    order, fresh = ordered([is_place.astype(np.int64), group, *low.T, *high.T])
    number = np.empty(len(order), dtype=np.int64)  # of each box, among those that are unlike each other
    number[order] = np.cumsum(fresh) - 1
    first, often = order[fresh], np.bincount(number)
    group, low, high, is_place = (a.take(first, axis=0) for a in (group, low, high, is_place))
    i, j = pairs(group, low, high)
    one, other = np.where(is_place[i], j, i), np.where(is_place[i], i, j)  # a part, and a place
    crosses = is_place[i] != is_place[j]
    one, other = one[crosses], other[crosses]
    shared = (np.minimum(high[one], high[other]) - np.maximum(low[one], low[other])).prod(axis=1)
    asked = np.bincount(other, weights=often[one] * shared, minlength=len(first))
    out: I64 = asked[number[len(apart) :]]
    return out


def _missing(tables: ProofTables, found: CombinedParts, where: MovedBoxes, state: int) -> None:
    """Raise an error for the first element without a part."""
    pieces, piece = tables.source, int(where.piece[0])
    low, high = box_of(pieces)
    apart = np.isin(pieces.policy, APART) & (pieces.tensor == tables.target.tensor[piece]) & (pieces.state == state)
    for part in np.flatnonzero(apart).tolist():
        mine = (found.source == part) & (found.target == piece)
        for n in range(len(where)):
            begin, end = np.maximum(low[part], where.low[n]), np.minimum(high[part], where.high[n])
            if (begin < end).all():
                index = first_left(begin, end, found.low[mine], found.high[mine])
                if index is not None:
                    _blame(tables, piece, index, part, "is put together without its part in")


def _blame(tables: ProofTables, piece: int | I64, index: I64, part: int | I64, what: str) -> NoReturn:
    (file, key), _ = tables.place(1, int(tables.target.first[piece]))
    (from_file, from_key), _ = tables.place(0, int(tables.source.first[part]))
    fail(
        "E346",
        f"{tables.name(tables.target, int(piece), index)} {what} {from_file}: {from_key}",
        Label(file, "target", where=key),
        Label(from_file, "source", where=from_key),
    )


# --- Members of means and sums --------------------------------------------------------------------------------------


def check_replicas(tables: ProofTables, source: MovedBoxes) -> None:
    """Check that exactly the values that the layout declares are combined.

    The way and the axes must be those of the declaration. E346.
    """
    pieces, kinds = tables.source, tables.moves.kind[source.move]
    together = np.isin(kinds, [n.word for n in APART])
    said = np.array([p.word for p in Policy])[pieces.policy[source.piece]]
    wrong = np.flatnonzero(together & (said != kinds))
    if len(wrong):
        _blame_members(
            tables, source, int(wrong[0]), f"goes into a {kinds[wrong[0]]}, and its layout says `{said[wrong[0]]}`"
        )
    rows = np.flatnonzero(together)
    flow, over = tables.moves.flow[source.move[rows]], pieces.over[source.piece[rows]]
    _, first = np.unique(np.column_stack([flow, over]), axis=0, return_index=True)
    for row in rows[first].tolist() if len(rows) else ():
        bits, kind = int(pieces.over[source.piece[row]]), str(kinds[row])
        if set(tables.flows[int(tables.moves.flow[source.move[row]])].over) != tables.over(bits):
            _blame_members(tables, source, row, f"goes into a {kind} over other axes than its layout says")
    apart = _apart(tables)
    for row in np.flatnonzero(~together & apart[source.piece]).tolist():
        if (index := _met(tables, source, row)) is not None:
            source.low[row] = index
            _blame_members(tables, source, row, "is copied, and its layout says that it is one part of several")


def _apart(tables: ProofTables) -> Mask:
    """Pieces whose layout says that they are put together with others."""
    return np.isin(tables.source.policy, APART)


def _met(tables: ProofTables, source: MovedBoxes, row: int) -> I64 | None:
    """The first element in two members of a mean or sum."""
    pieces, piece = tables.source, int(source.piece[row])
    low, high = box_of(pieces)
    alike = np.flatnonzero(
        _apart(tables) & (pieces.tensor == pieces.tensor[piece]) & (pieces.state == pieces.state[piece])
    )
    other = np.zeros(len(alike), dtype=bool)
    for divisor, degree in tables.over(int(pieces.over[piece])):
        other |= pieces.rank[alike] // divisor % degree != pieces.rank[piece] // divisor % degree
    alike = alike[other]
    meets = np.maximum(low[alike], source.low[row]), np.minimum(high[alike], source.high[row])
    found = np.flatnonzero((meets[0] < meets[1]).all(axis=1))
    return meets[0][found[0]] if len(found) else None


def _blame_members(tables: ProofTables, source: MovedBoxes, row: int, what: str) -> NoReturn:
    piece = int(source.piece[row])
    (file, key), _ = tables.place(0, int(tables.source.first[piece]))
    fail("E346", f"{tables.name(tables.source, piece, source.low[row])} {what}", Label(file, "source", where=key))


# --- Copies of one member of a mean or sum --------------------------------------------------------------------------


def replica_moves(placement: Placement, plan: Plan) -> list[Runs]:
    """Moves between copies of members, by state, within one side."""
    first: dict[object, tuple[tuple[str, Key], int, I64]] = {}
    numbers = [{(t.file, t.key): n for n, t in enumerate(side)} for side in (plan.targets, plan.sources)]
    tensors = {path: n for n, path in enumerate(plan.tensors)}
    found: dict[str, list[tuple[int, ...]]] = {}
    for part in placement.parts:
        pieces = part.pieces
        for row in np.flatnonzero(np.isin(pieces.policy, APART)).tolist():
            home = part.homes.home(int(pieces.home[row]))
            place, path = (home.file, home.key), placement.tensors[int(pieces.tensor[row])]
            member = tuple(home.rank // divisor % degree for divisor, degree in placement.digits(int(pieces.over[row])))
            low, high = pieces.low[row], pieces.high[row]
            box = (part.state, path, low.tobytes(), high.tobytes(), member, part.value_of(path))
            offset, stride = int(pieces.offset[row]), pieces.stride[row]
            other, begin, step = first.setdefault(box, (place, offset, stride))
            if other == place or other not in numbers[0] or place not in numbers[1]:
                continue
            dims = np.argsort(-stride, kind="stable")
            move = (tensors.get(path, -1), numbers[0][other], numbers[1][place], begin, offset)
            found.setdefault(part.state, []).append((*move, *(high - low)[dims], *step[dims], *stride[dims]))
    return [_runs(state, np.array(rows, dtype=np.int64)) for state, rows in found.items()]


def _runs(state: str, table: I64) -> Runs:
    table = table[np.lexsort((table[:, 4], table[:, 2]))]
    k = (table.shape[1] - 5) // 3
    tensor, source, target = (table[:, n].astype(np.int32) for n in range(3))
    shape, here, there = (table[:, 5 + n * k : 5 + (n + 1) * k] for n in range(3))
    return Runs("copy", state, tensor, source, target, shape, table[:, 3], here, table[:, 4], there)
