"""Where each part of a placement stands among a graph's stored tensors, and which states are stored and moved as another is.

Numbers of stored tensors are not taken from who made the graph: a part stands where its own names stand.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ucpl.columns import once
from ucpl.columns.operations import Fill, Flow, Lane
from ucpl.extents import Shelves
from ucpl.graph import Graph
from ucpl.records import frozen
from ucpl.regions import Part, Placement

__all__ = ["Stand", "followers", "placed"]


@frozen(eq=False)
class Stand:
    """A part's stored tensors: numbers `first`..`last` of its side. `hidden`: which of them have another one's storage."""

    first: int
    last: int
    hidden: NDArray[np.bool_] | None


Stands = tuple["Stand | None", ...]


def placed(placement: Placement, stored: Shelves) -> Stands:
    """Of each part: where it stands, or None where it takes no part."""
    shelf_of = {(id(s.block), s.state): i for i, s in enumerate(stored.shelves)}
    out: list[Stand | None] = []
    for part in placement.parts:
        found = [shelf_of.get((id(block), part.state)) for block in part.homes.blocks]
        if not found or None in found:
            out.append(None)
            continue
        numbers = [i for i in found if i is not None]
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers))), "a part's shelves follow each other"
        hidden = None
        if any(stored.shelves[i].shares is not None for i in numbers):
            each = [
                np.zeros(len(s), dtype=np.bool_) if s.shares is None else s.shares >= 0
                for s in (stored.shelves[i] for i in numbers)
            ]
            hidden = np.concatenate(each)
        out.append(Stand(int(stored.starts[numbers[0]]), int(stored.starts[numbers[-1] + 1]), hidden))
    return tuple(out)


def followers(graph: Graph, flows: Sequence[Flow], stands: tuple[Stands, Stands]) -> set[Lane]:
    """Lanes whose state is stored as the first lane's on both sides, part by part, and moves at a constant distance from it.

    What is proved of the first lane is then proved of them.
    """
    filled = {n.state for n in graph.net if isinstance(n, Fill) and n.lacking}  # each by a line of its own
    leader: dict[str, str] = {}
    told: dict[str, list[tuple[Lane, ...]]] = {}
    for flow in flows:
        for lane in flow.lanes:
            told.setdefault(lane.state, []).append(flow.lanes)
            if leader.setdefault(lane.state, flow.lanes[0].state) != flow.lanes[0].state:
                leader[lane.state] = lane.state  # not always the same one
    found: set[Lane] = set()
    for state, first in leader.items():
        if state == first or leader[first] != first or {state, first} & filled or len(told[state]) != len(told[first]):
            continue
        lanes = [(lane, x[0]) for x in told[state] for lane in x if lane.state == state]
        origins = {(lane.origin, lead.origin) for lane, lead in lanes}
        if len(origins) != 1 or not _same_parts(graph.target, state, first, stands[1]):
            continue
        origin, led_by = next(iter(origins))
        if (origin == state) != (led_by == first) or not _same_parts(graph.source, origin, led_by, stands[0]):
            continue
        if origin != state and not any(d.state == state and d.source == origin for d in graph.source.layout.derived):
            continue
        if _at_their_distance(graph, flows, ((origin, led_by), (state, first)), stands):
            found |= {lane for lane, _ in lanes}
    # What follows must not be made of what something else is made of, too, and as much of both must be left out.
    origins_of = {lane.state: lane.origin for lane in found}
    others = {lane.origin for lanes in told.values() for of in lanes for lane in of if lane not in found}
    left_out = {tuple(text.split(": ")[0].split(" of ", 1)) for text in graph.dropped}
    for state, origin in origins_of.items():
        of_leader = next(of[0].origin for of in told[state])
        if (
            origin in others
            or len(set(origins_of.values())) != len(origins_of)
            or {t[1:] for t in left_out if t[0] == origin} != {t[1:] for t in left_out if t[0] == of_leader}
        ):
            return set()
    return found


def _parts(placement: Placement, state: str) -> list[tuple[int, Part]]:
    return [(n, p) for n, p in enumerate(placement.parts) if p.state == state]


def _same_parts(placement: Placement, state: str, first: str, stands: Stands) -> bool:
    """Whether two states are stored alike: the same boxes part by part."""
    a, b = _parts(placement, state), _parts(placement, first)
    return len(a) == len(b) and all(
        x.folded is y.folded
        and x.is_alias == y.is_alias
        and (stands[n] is None) == (stands[m] is None)
        and _hidden(stands[n]) == _hidden(stands[m])
        and len(x.homes) == len(y.homes)
        for (n, x), (m, y) in zip(a, b, strict=True)
    )


def _hidden(stand: Stand | None) -> list[bool] | None:
    """Which tensors of a part have another one's storage: nothing fills those by themselves."""
    return None if stand is None or stand.hidden is None else [bool(h) for h in stand.hidden]


def _at_their_distance(
    graph: Graph, flows: Sequence[Flow], pairs: tuple[tuple[str, str], tuple[str, str]], stands: tuple[Stands, Stands]
) -> bool:
    """Whether every flow's lane lies as far from the first as its stored tensors do. pairs: ours and theirs, by side."""
    state = pairs[1][0]
    for side, placement in enumerate((graph.source, graph.target)):
        ours, theirs = (_parts(placement, name) for name in pairs[side])
        known = [(stands[side][m], stands[side][n]) for (n, _), (m, _) in zip(ours, theirs, strict=True)]
        rows = sorted((b.first, b.last, a.first - b.first) for b, a in known if a is not None and b is not None)
        table = np.array(rows, dtype=np.int64).reshape(len(rows), 3)
        for flow in flows:
            lane = next((x for x in flow.lanes if x.state == state), None)
            if lane is None or not len(flow.extract.boxes):
                continue
            position = (flow.place if side else flow.extract).boxes.offset
            home = once(position >> graph.spaces[side].bits)
            at = np.searchsorted(table[:, 0], home, side="right") - 1
            if (at < 0).any() or (home >= table[at, 1]).any():
                return False
            if (table[at, 2] != (lane.target if side else lane.source)).any():
                return False
    return True
