"""Live rows: padding that training changes, carried over as own tensors.

As many rows as both sides have are carried.

before: `embed`, 5 rows; both sides store 8 and 6, the further ones live
after:  `embed` and `embed[v=5..6]`: from there on a tensor like any other, moved, checked and proved
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from attrs import evolve

from ucpl.layout import LogicalTensor
from ucpl.layout.by_index import whole_dim
from ucpl.placement import Homes, Part, Pieces, Placement
from ucpl.placement.boxes import subtract
from ucpl.records import frozen
from ucpl.tables import I64, Bools, distinct, each
from ucpl.tables.blocks import Block

__all__ = ["with_live_rows"]

Dim = tuple[str, int]  # a tensor, and which of its dims has live rows


@frozen
class LiveRows:
    """Live rows of one dim: the most, and those of all tensors."""

    most: int
    whole: int


def with_live_rows(
    source: Placement, target: Placement, whole: tuple[Placement, Placement] | None = None
) -> tuple[Placement, Placement, tuple[str, ...]]:
    """Both sides with their common live rows, and remarks on others.

    The others are rows that only the source has. `whole`: the same as all ranks have them, if these are parts of it.
    """
    kept, said = _kept(*(whole or (source, target)))
    if not kept:
        return source, target, said
    wide = _widened(source, kept)
    return wide, wide if target is source else _widened(target, kept), said


def _kept(source: Placement, target: Placement) -> tuple[dict[Dim, int], tuple[str, ...]]:
    """Common live rows of each dim, and remarks on the others."""
    here, there = _by_state(source), _by_state(target)
    kept: dict[Dim, int] = {}
    said: list[str] = []
    for dim in dict.fromkeys(d for of in here.values() for d in of):
        path, number = dim
        pairs = [
            (here[origin].get(dim), there[state].get(dim))
            for state, origin in _origins(source, target, path)
            if path in target.layout.tensors and number not in dict(source.layout.tensors[path].lacks).get(origin, ())
        ]
        if not pairs:
            continue  # the tensor, or its stored form, is left out, which another message reports
        most = max(s.most for s, _ in pairs if s is not None) if any(s for s, _ in pairs) else 0
        room = min(0 if t is None else t.whole for _, t in pairs)
        grown = source.layout.tensors[path].counts != target.layout.tensors[path].counts  # these are other rows there
        none = grown or _is_scaled(path, source, target)
        n = 0 if none else min(room, *(0 if s is None else s.whole for s, _ in pairs))
        if n:
            kept[dim] = n
        if n < most:
            name = whole_dim(source.layout.tensors[path].dims[number])
            of = "" if "#" in name else f" of {name}"
            said.append(f"live rows{of} in {path}: {most - n} of {most} are not kept, {_why(room, n)}")
    return kept, tuple(said)


def _why(room: int, kept: int) -> str:
    if kept < room:
        return "since not all that stores the tensor has them"
    return f"the target has room for {room}" if room else "the target has no live rows"


def _origins(source: Placement, target: Placement, path: str) -> list[tuple[str, str]]:
    """States of a tensor in the target, each with its source state."""
    ours = {p.state for p in source.parts if path in _paths(source, p)}
    made = {d.state: d.source for d in source.layout.derived}
    theirs = dict.fromkeys(p.state for p in target.parts if path in _paths(target, p))
    found = [(s, s if s in ours else made.get(s, "")) for s in theirs]
    return [(state, origin) for state, origin in found if origin in ours]


def _paths(placement: Placement, part: Part) -> set[str]:
    live = part.live.tensor.tolist() if part.live is not None else []
    return {placement.tensors[t] for t in {*part.tensors, *live}}


def _is_scaled(path: str, *sides: Placement) -> bool:
    """True if a side stores the tensor times its scales.

    There are no scales of live rows.
    """
    return any(p.scaled and path in _paths(side, p) for side in sides for p in side.parts)


# ---- how many there are --------------------------------------------------------------------------------------------------


def _by_state(placement: Placement) -> dict[str, dict[Dim, LiveRows]]:
    tables: dict[str, list[Pieces]] = {p.state: [] for p in placement.parts}
    for part in placement.parts:
        if part.live is not None:
            tables[part.state].append(part.live)
    known: dict[tuple[object, ...], dict[Dim, LiveRows]] = {}
    out = {}
    for state, found in tables.items():
        mark = (state if state in placement.layout.reduced else "", *(id(t) for t in found))
        if mark not in known:
            known[mark] = _counted(placement, Pieces.concat(found), state)
        out[state] = known[mark]
    return out


def _counted(placement: Placement, live: Pieces, state: str) -> dict[Dim, LiveRows]:
    out: dict[Dim, LiveRows] = {}
    for path, dim, rows in _by_dim(placement, live):
        low, high = live.low[rows], live.high[rows]
        once = distinct([*low.T, *high.T])
        tensor = placement.layout.tensors[path].of(state)
        counts = np.ones(live.width, dtype=np.int64)
        counts[: len(tensor.counts)] = tensor.counts
        first, most = int(counts[dim]), int(high[:, dim].max())
        begin, end = np.zeros_like(counts), counts.copy()
        begin[dim], end[dim] = first, most
        left = subtract(begin, end, low[once], high[once])
        whole = min([most, *(int(a[dim]) for a, _ in left)])
        out[path, dim] = LiveRows(most - first, whole - first)
    return out


def _by_dim(placement: Placement, live: Pieces) -> Iterable[tuple[str, int, I64]]:
    """Rows of a table by tensor and the dim they extend."""
    for t in each(live.tensor):
        path = placement.tensors[t]
        mine = np.flatnonzero(live.tensor == t)
        for dim, count in enumerate(placement.layout.tensors[path].counts):
            rows = mine[live.low[mine, dim] >= count]
            if len(rows):
                yield path, dim, rows


# ---- as tensors ----------------------------------------------------------------------------------------------------------


def _widened(placement: Placement, kept: dict[Dim, int]) -> Placement:
    """The placement with tensors of live rows, and their boxes."""
    layout = placement.layout
    made = {dim: _tensor(layout.tensors[dim[0]], dim[1], n, layout.sizes) for dim, n in kept.items()}
    tensors = {**layout.tensors, **{t.path: t for t in made.values()}}
    names = (*placement.tensors, *(t.path for t in made.values()))
    numbers = {dim: names.index(t.path) for dim, t in made.items()}
    done: dict[tuple[int, int], tuple[Pieces, Pieces]] = {}
    parts = []
    for part in placement.parts:
        if part.live is None:
            parts.append(part)
            continue
        mark = id(part.folded), id(part.live)
        if mark not in done:
            rows = _rows(placement, part.live, kept, numbers)
            done[mark] = Pieces.concat([part.folded, rows]), rows
        folded, rows = done[mark]
        values = {t.path: part.values[d[0]] for d, t in made.items() if d[0] in part.values}
        homes = _less_padding(part.homes, rows, part.live)
        parts.append(evolve(part, folded=folded, homes=homes, values={**part.values, **values}))
    return Placement(evolve(layout, tensors=tensors), names, tuple(parts), placement.flats, placement.blobs, placement)


def _tensor(whole: LogicalTensor, dim: int, n: int, sizes: dict[str, int]) -> LogicalTensor:
    """`embed[v=5..6]`: the positions along that dim start at its end."""
    name = whole.dims[dim]
    first = whole.counts[dim] if "#" in name else sizes[name]
    shown = f"{dim}" if "#" in name else whole_dim(name).rpartition(".")[2]
    counts, indices = list(whole.counts), list(whole.indices)
    counts[dim], indices[dim] = n, range(first, first + n)
    path = f"{whole.path}[{shown}={first}..{first + n}]"
    return evolve(whole, path=path, counts=tuple(counts), indices=tuple(indices), scaling=None, scale=None)


def _rows(placement: Placement, live: Pieces, kept: dict[Dim, int], numbers: dict[Dim, int]) -> Pieces:
    """Boxes of kept live rows, as boxes of their tensors."""
    tables = []
    for path, dim, rows in _by_dim(placement, live):
        if (path, dim) not in kept:
            continue
        one = live.take(rows)
        first = placement.layout.tensors[path].counts[dim]
        low, high = one.low.copy(), one.high.copy()
        low[:, dim] -= first
        high[:, dim] = np.minimum(high[:, dim] - first, kept[path, dim])
        number = np.full(len(one), numbers[path, dim], dtype=np.int64)
        made = one.replace(tensor=number, low=low, high=high)
        tables.append(made.take(high[:, dim] > low[:, dim]))
    return Pieces.concat(tables, live.width)


def _less_padding(homes: Homes, kept: Pieces, live: Pieces) -> Homes:
    """Stored tensors with less padding: kept live rows count no more."""
    blocks = []
    for block, first in zip(homes.blocks, homes.starts.tolist(), strict=False):
        held, all_of_it = (_held(table, block, first) for table in (kept, live))
        left: Bools = block.live & (all_of_it > held)
        blocks.append(evolve(block, padding=block.padding - held, live=left))
    return Homes(tuple(blocks))


def _held(table: Pieces, block: Block, first: int) -> I64:
    """Number of a table's elements in each stored tensor of a block.

    It is by coordinate.
    """
    mine = (table.home >= first) & (table.home < first + len(block))
    coordinate = (table.home[mine] - first) // max(1, block.choices)
    held = np.bincount(coordinate, weights=table.volume[mine], minlength=len(block.rank))
    return held.astype(np.int64) // max(1, block.choices)
