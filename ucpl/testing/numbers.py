"""Number every element of a model, and store the numbers."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from ucpl.extents import Key, key_text
from ucpl.placement import Part, Pieces, Placement
from ucpl.placement.placement import Home
from ucpl.planning import Plan, Runs

__all__ = ["F64", "I64", "Place", "Whole", "gather", "lay_out", "numbered", "run"]

F64 = NDArray[np.float64]
I64 = NDArray[np.int64]
Place = tuple[str, Key]
LIVE_MAX = 1 << 26  # numbers that the live rows of one tensor may have
LIVE_DIMS = 16  # dims of a tensor that may have live rows
Whole = dict[tuple[str, str], F64]  # (tensor, state) -> its elements, in the shape that it has


def numbered(placement: Placement, same: dict[str, str]) -> Whole:
    """Number each element of each tensor and state.

    `same`: states that hold the numbers of another one.
    """
    out: Whole = {}
    states = sorted({same.get(p.state, p.state) for p in placement.parts} | set(same.values()))
    start = 1  # zero is the value of padding
    for state in states:
        for path, tensor in placement.layout.tensors.items():
            own = tensor.of(state)
            out[path, state] = np.arange(start, start + own.numel, dtype=np.float64).reshape(own.counts)
            start += own.numel
    for state, origin in same.items():
        for path in placement.layout.tensors:
            out[path, state] = out[path, origin]
    return out


def lay_out(placement: Placement, whole: Whole, live: frozenset[float] | None = None) -> dict[Place, F64]:
    """Lay out every stored tensor as a flat array.

    It is made from the boxes of a placement. Padding is NaN.

    live: of live rows, the numbers that are known; None: all of them have one.
    """
    out: dict[Place, F64] = {}
    known = np.array(sorted(live or ()))
    for part in placement.parts:
        for home, rows in _rows_of(part):
            flat = np.full(math.prod(home.shape), np.nan)
            for row in rows:
                path = placement.tensors[int(part.pieces.tensor[row])]
                a, b = part.value_of(path)
                index, box = _where(placement, part.pieces, row, path)
                flat[index] = a * whole[path, part.state][box].ravel() + b
            out[home.file, home.key] = flat
        for home, index, numbers, path in _live_of(placement, part, whole):
            a, b = part.value_of(path)
            there = np.isin(numbers, known) if live is not None else np.ones(len(numbers), dtype=np.bool_)
            out[home.file, home.key][index] = np.where(there, a * numbers + b, np.nan)
    return out


def live_numbers(placement: Placement, whole: Whole) -> frozenset[float]:
    """The numbers in live rows, one per index."""
    found: set[float] = set()
    for part in placement.parts:
        for _, _, numbers, _ in _live_of(placement, part, whole):
            found.update(numbers.tolist())
    return frozenset(found)


def _live_of(placement: Placement, part: Part, whole: Whole) -> Iterator[tuple[Home, I64, F64, str]]:
    """Live rows of a part, piece by piece: their places and numbers.

    The numbers are below zero.
    """
    live = part.live.singly() if part.live is not None else part.pieces.take(slice(0, 0))
    for row, number in enumerate(live.home.tolist()):
        path = placement.tensors[int(live.tensor[row])]
        index, box = _where(placement, live, row, path)
        counts = placement.layout.tensors[path].counts
        behind = next(d for d, count in enumerate(counts) if box[d].start >= count)
        one = np.zeros(tuple(s.stop - s.start for s in box))
        for d in (behind, *(d for d in range(len(counts)) if d != behind)):  # rows first: they count on
            here = np.arange(box[d].start, box[d].stop) - counts[d] * (d == behind)
            one = one * (1 if d == behind else counts[d]) + here.reshape([-1 if d == e else 1 for e in range(one.ndim)])
        first = next(iter(whole[path, part.state].flat), 0)
        yield part.homes[number], index, -(first * LIVE_MAX + LIVE_DIMS * one.ravel() + behind), path


def gather(placement: Placement, stored: dict[Place, F64]) -> Whole:
    """Full tensors from stored ones.

    Declared copies are not compared here (a plan's checks do that).
    """
    out: Whole = {}
    for part in placement.parts:
        for home, rows in _rows_of(part):
            for row in rows:
                path = placement.tensors[int(part.pieces.tensor[row])]
                a, b = part.value_of(path)
                tensor = placement.layout.tensors[path].of(part.state)
                whole = out.setdefault((path, part.state), np.full(tensor.counts, np.nan))
                index, box = _where(placement, part.pieces, row, path)
                whole[box] = ((stored[home.file, home.key][index] - b) / a).reshape(whole[box].shape)
    return out


def _rows_of(part: Part) -> Iterator[tuple[Home, list[int]]]:
    rows: dict[int, list[int]] = {}
    for row, home in enumerate(part.pieces.home.tolist()):
        rows.setdefault(home, []).append(row)
    for number, home in enumerate(part.homes):
        yield home, rows.get(number, [])


def _where(placement: Placement, pieces: Pieces, row: int, path: str) -> tuple[I64, tuple[slice, ...]]:
    """Positions of one piece in its stored tensor, and its logical box.

    Both are in the tensor's order.
    """
    dims = len(placement.layout.tensors[path].dims)
    low, high = pieces.low[row, :dims], pieces.high[row, :dims]
    index = np.array(pieces.offset[row], dtype=np.int64)
    for n, step in zip((high - low).tolist(), pieces.stride[row, :dims].tolist(), strict=True):
        index = index[..., None] + np.arange(n) * step
    return index.ravel(), tuple(slice(a, b) for a, b in zip(low.tolist(), high.tolist(), strict=True))


# ---- a plan carried out ----------------------------------------------------------------------------------------------


def run(plan: Plan, stored: dict[Place, F64]) -> dict[Place, F64]:
    """Run the moves of a plan on flat arrays.

    Places without a move are NaN.

    Raises AssertionError for a place that is written twice and for copies that differ.
    """
    sources = [stored[s.file, s.key] for s in plan.sources]
    targets = [np.full(t.numel, np.nan) for t in plan.targets]
    checks: list[tuple[Runs, int]] = []
    factors: list[tuple[F64, I64, F64]] = []  # of the tensors that are copied first
    reduced: dict[tuple[int, str], Runs] = {}
    members: dict[tuple[int, str], dict[object, F64]] = {}  # of each target: the values that are combined, one by one
    for moves in plan.moves:
        for row in range(len(moves)):
            if moves.kind == "check":
                checks.append((moves, row))
                continue
            number = int(moves.target[row])
            target, (source_at, target_at) = targets[number], _ends(moves, row)
            values = _converted(moves, sources[int(moves.source[row])][source_at], moves.kind)
            if moves.kind == "scale":
                factors.append((target, target_at, values))
            elif moves.kind == "copy":
                assert np.isnan(target[target_at]).all(), f"{_named(plan, number)} is written twice"
                target[target_at] = values
            else:
                reduced[number, moves.kind] = moves
                rank = plan.sources[int(moves.source[row])].rank
                one = tuple(rank // divisor % degree for divisor, degree in moves.over) or row
                member = members.setdefault((number, moves.kind), {}).setdefault(one, np.full_like(target, np.nan))
                held = ~np.isnan(member[target_at])
                assert (member[target_at][held] == values[held]).all(), (
                    f"copies that go into {_named(plan, number)} differ"
                )
                member[target_at] = values
    for (number, kind), moves in reduced.items():
        found = np.stack(list(members[number, kind].values()))
        some = ~np.isnan(found).all(axis=0)
        assert np.isnan(targets[number][some]).all(), f"{_named(plan, number)} is copied to and accumulated"
        whole = _together(kind, found[:, some])
        targets[number][some] = moves.target_value[0] * whole + moves.target_value[1]
    for moves, row in checks:
        source_at, target_at = _ends(moves, row)
        values = _converted(moves, sources[int(moves.source[row])][source_at], "copy")
        there = targets[int(moves.target[row])][target_at]
        bad = np.flatnonzero(values != there)
        if len(bad):
            s = plan.sources[int(moves.source[row])]
            raise AssertionError(
                f"{plan.tensors[int(moves.tensor[row])]}: a copy in {key_text(s.key)} of {s.file} at {source_at[bad[0]]}"
                f" holds element {values[bad[0]]:g}, and {there[bad[0]]:g} was moved to {_named(plan, int(moves.target[row]))}"
            )
    for target, target_at, values in factors:
        target[target_at] *= values
    for number, stored_tensor in enumerate(plan.targets):
        if stored_tensor.shares is not None:
            targets[number] = targets[stored_tensor.shares]
    return {(t.file, t.key): a for t, a in zip(plan.targets, targets, strict=True)}


def _together(kind: str, found: F64) -> F64:
    """Combine the rows of members.

    A member that lacks a place is NaN there.
    """
    whole: F64
    match kind:
        case "mean":
            whole = np.nanmean(found, axis=0)
        case "sum":
            whole = np.nansum(found, axis=0)
        case _:
            whole = np.nanmax(found, axis=0)
    return whole


def _converted(moves: Runs, values: F64, kind: str) -> F64:
    (a, b), (c, d) = moves.source_value, moves.target_value
    logical = (values - b) / a
    return logical if kind in ("mean", "sum", "max") else c * logical + d


def _ends(moves: Runs, row: int) -> tuple[I64, I64]:
    source = np.array(moves.source_offset[row], dtype=np.int64)
    target = np.array(moves.target_offset[row], dtype=np.int64)
    for n, s, t in zip(
        moves.shape[row].tolist(), moves.source_stride[row].tolist(), moves.target_stride[row].tolist(), strict=True
    ):
        steps = np.arange(n)
        source, target = source[..., None] + steps * s, target[..., None] + steps * t
    return source.ravel(), target.ravel()


def _named(plan: Plan, target: int) -> str:
    t = plan.targets[target]
    return f"{key_text(t.key)} of {t.file}"
