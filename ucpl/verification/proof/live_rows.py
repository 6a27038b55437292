"""Prove that live rows are kept, as many as both sides have.

They are counted here anew, and their boxes compared with those that were placed.

The proof of moves covers their places: in a finished graph they are a tensor like any other.
"""

from __future__ import annotations

from typing import NoReturn

import numpy as np

from ucpl.errors import Label, fail
from ucpl.graph import Graph
from ucpl.layout import LogicalTensor
from ucpl.layout.by_index import whole_dim, whole_name
from ucpl.placement import Part, Placement
from ucpl.verification.proof.intervals import I64, first_left

__all__ = ["check_live_rows"]

Known = dict[tuple[str, int], LogicalTensor]  # of a tensor and the dim that they are rows of


def check_live_rows(graph: Graph) -> None:
    """Raise E348 for the first live row that is lost or appears.

    Both sides have a lost one and it is not kept; only one side has the other kind.
    """
    sides = graph.source, graph.target
    if all(part.live is None for side in sides for part in side.parts):
        return
    kept = _kept(graph.target)
    ways = {(lane.state, lane.origin) for flow in graph.flows for lane in flow.lanes}
    for path, tensor in graph.target.located.layout.tensors.items():
        for dim, first in enumerate(tensor.counts):
            having = [way for way in ways if dim not in dict(tensor.lacks).get(way[0], ())]
            found = [_whole(side, state, path, dim) for way in having for side, state in _of(sides, way, path)]
            ends = [end for end in found if end is not None]
            if not ends:
                continue
            scaled = any(p.scaled and path in _paths(side, p) for side in sides for p in side.parts)
            grown = graph.source.located.layout.tensors[path].counts != tensor.counts
            want = 0 if scaled or grown else min(ends) - first
            have = kept[path, dim].counts[dim] if (path, dim) in kept else 0
            if want != have:
                _blame(graph, path, dim, min(want, have))
    for side in sides:
        _demand_boxes(side)


def _of(sides: tuple[Placement, Placement], way: tuple[str, str], path: str) -> list[tuple[Placement, str]]:
    """Both sides with the states that a way of the graph connects."""
    state, origin = way
    here, there = (
        any(p.state == s and path in _paths(side, p) for p in side.parts)
        for side, s in zip(sides, (origin, state), strict=True)
    )
    return [(sides[0], origin), (sides[1], state)] if here and there else []


def _paths(side: Placement, part: Part) -> set[str]:
    """The tensors that a part has elements or live rows of."""
    live = set() if part.live is None else set(part.live.tensor.tolist())
    return {side.tensors[t] for t in live.union(part.tensors)}


def _kept(side: Placement) -> Known:
    """The tensors of live rows, each with the tensor that it extends."""
    out: Known = {}
    for path, tensor in side.layout.tensors.items():
        if path in side.located.layout.tensors:
            continue
        owners = [
            p for p in side.located.layout.tensors if path.startswith(f"{p}[") and whole_name(p) == whole_name(path)
        ]
        owner = side.located.layout.tensors[max(owners, key=len)]
        (dim,) = (d for d, (a, b) in enumerate(zip(tensor.indices, owner.indices, strict=True)) if a != b)
        out[owner.path, dim] = tensor
    return out


def _whole(side: Placement, state: str, path: str, dim: int) -> int | None:
    """The first index of a dim without live rows, or None.

    A state of the tensor counts if it has some of them.
    """
    low, high = [], []
    counts = side.located.layout.tensors[path].of(state).counts
    for part in side.parts:
        if part.state == state and part.live is not None:
            mine = part.live.take(
                (part.live.tensor == side.tensors.index(path)) & (part.live.low[:, dim] >= counts[dim])
            )
            low.append(mine.low[:, : len(counts)])
            high.append(mine.high[:, : len(counts)])
    begin: I64 = np.zeros(len(counts), dtype=np.int64)
    end: I64 = np.array(counts, dtype=np.int64)
    rows_low, rows_high = (np.concatenate([np.zeros((0, len(counts)), np.int64), *t]) for t in (low, high))
    begin[dim], end[dim] = counts[dim], int(rows_high[:, dim].max(initial=counts[dim]))
    order = [dim, *(d for d in range(len(counts)) if d != dim)]  # the first row identifies the rest
    left = first_left(begin[order], end[order], rows_low[:, order], rows_high[:, order]) if len(rows_low) else None
    return int(end[dim]) if left is None else int(left[0])


def _demand_boxes(side: Placement) -> None:
    """Check that the parts' boxes of live rows are the located ones.

    They reach to the last row that is kept.
    """
    kept = _kept(side)
    for part, bare in zip(side.parts, side.located.parts, strict=True):
        if part.live is None:
            continue
        made = part.folded.take(slice(len(bare.folded), len(part.folded)))
        wanted = 0
        for (path, dim), tensor in kept.items():
            first = side.located.layout.tensors[path].counts[dim]
            end = first + tensor.counts[dim]
            live = part.live
            live = live.take(
                (live.tensor == side.tensors.index(path)) & (live.low[:, dim] >= first) & (live.low[:, dim] < end)
            )
            mine = made.take(made.tensor == side.tensors.index(tensor.path))
            shift = np.zeros(live.width, dtype=np.int64)
            shift[dim] = first
            high = live.high.copy()
            high[:, dim] = np.minimum(high[:, dim], end)
            same = len(mine) == len(live) and all(
                np.array_equal(a, b)
                for a, b in (
                    (mine.low + shift, live.low),
                    (mine.high + shift, high),
                    (mine.home, live.home),
                    (mine.offset, live.offset),
                    (mine.stride, live.stride),
                    (mine.home_stride, live.home_stride),
                )
            )
            assert same, f"{tensor.path} is not where the live rows of {path} are, in {part.state} of {part.label}"
            wanted += len(mine)
        assert wanted == len(made), f"boxes of no tensor in {part.state} of {part.label}"


def _blame(graph: Graph, path: str, dim: int, row: int) -> NoReturn:
    layout = graph.target.located.layout
    tensor = layout.tensors[path]
    index = [0] * len(tensor.counts)
    index[dim] = (tensor.counts[dim] if "#" in tensor.dims[dim] else layout.sizes[tensor.dims[dim]]) + row
    shown = ", ".join(str(i) if "#" in d else f"{whole_dim(d)}={i}" for d, i in zip(tensor.dims, index, strict=True))
    fail(
        "E348",
        f"{whole_name(path)}[{shown}], a live row, is kept on one side and not on the other",
        Label(graph.source.layout.call, "source", where=path),
        Label(layout.call, "target", where=path),
    )
