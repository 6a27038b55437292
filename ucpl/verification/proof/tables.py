"""The tables of a proof: pieces, moves, and names of elements."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ucpl.extents import Shelves, key_text
from ucpl.graph import Graph
from ucpl.placement import Part, Placement, element_name
from ucpl.records import frozen
from ucpl.tables import each, once
from ucpl.tables.operations import Fill, Flow, Lane
from ucpl.verification.proof.intervals import I64, Boxes, Mask, ProofMoves, ProofPieces, widened

__all__ = ["ProofTables"]


def _ranks(part: Part, homes: I64) -> I64:
    """The first rank that holds each stored tensor of a part."""
    known = {home: part.homes.home(home).rank for home in each(homes)}
    return np.array([known[home] for home in homes.tolist()], dtype=np.int64)


class ProofTables:
    """A graph as tables.

    States that are stored and moved like another one are left out: see `followers`.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.number = {path: i for i, path in enumerate(graph.target.tensors)}
        parts = (*graph.source.parts, *graph.target.parts)
        self.k = max([1, *(p.folded.low.shape[1] for p in parts)])
        self.bits = tuple(space.bits for space in graph.spaces)
        self.stands = (_placed(graph.source, graph.sources), _placed(graph.target, graph.targets))
        # The proof of a state also holds for the states that are stored and moved in the same way.
        self.flows = graph.flows
        self.led = _followers(graph, self.flows, self.stands)
        self.states = list(dict.fromkeys([p.state for p in parts] + [x.state for f in self.flows for x in f.lanes]))
        self.source = self._pieces(0, graph.source, {lane.origin for lane in self.led})
        self.target = self._pieces(1, graph.target, {lane.state for lane in self.led})
        self.moves = self._table()

    @property
    def sides(self) -> tuple[ProofPieces, ProofPieces]:
        return self.source, self.target

    # ---- tables ----------------------------------------------------------------------------------------------------------

    def _pieces(self, side: int, placement: Placement, led: set[str]) -> ProofPieces:
        k, one = self.k, 1 << self.bits[side]
        blank = {"low": 0, "high": 1, "stride": 0}
        wide: dict[str, list[I64]] = {
            n: [] for n in ("offset", "tensor", "state", "policy", "over", "rank", "part", *blank)
        }
        common = np.array([self.number.get(p, -1) for p in placement.tensors] or [-1], dtype=np.int64)
        for number, (part, stand) in enumerate(zip(placement.parts, self.stands[side], strict=True)):
            if stand is None or part.state in led:
                continue
            p = part.folded
            if stand.hidden is not None:  # second names, whose storage another tensor is
                p = part.pieces.take(~stand.hidden[part.pieces.home])
            if not len(p):
                continue
            wide["offset"].append((p.home + stand.first) * one + p.offset)
            wide["tensor"].append(common[p.tensor])
            wide["state"].append(np.full(len(p), self.states.index(part.state)))
            wide["policy"].append(p.policy)
            wide["over"].append(p.over)
            wide["part"].append(np.full(len(p), number))
            wide["rank"].append(_ranks(part, p.home) if p.over.any() else np.zeros_like(p.home))
            for name, array in (("low", p.low), ("high", p.high), ("stride", p.stride + p.home_stride * one)):
                wide[name].append(array)
        none = [np.zeros(0, dtype=np.int64)]
        flat = {n: widened(v, k, blank[n]) if n in blank else np.concatenate(v or none) for n, v in wide.items()}
        keep = np.flatnonzero((flat["high"] > flat["low"]).all(axis=1))
        order = keep[np.argsort(flat["offset"][keep], kind="stable")]
        flat = {n: v.take(order, axis=0) for n, v in flat.items()}
        size = flat["high"] - flat["low"]
        stride = np.where(size > 1, flat["stride"], 0)
        dim = np.argsort(-stride, axis=1, kind="stable")
        size, stride, low = (np.take_along_axis(a, dim, 1) for a in (size, stride, flat["low"]))
        last = flat["offset"] + ((size - 1) * stride).sum(axis=1) + 1
        return ProofPieces(
            flat["offset"],
            last,
            flat["tensor"],
            flat["state"],
            flat["policy"],
            flat["over"],
            flat["rank"],
            flat["part"],
            size,
            stride,
            dim,
            low,
        )

    def _table(self) -> ProofMoves:
        """The moves of every state that is not led by another one."""
        found = [
            (
                (flow.kind, number),
                self.states.index(lane.state),
                flow.moves,
                lane.source << self.bits[0],
                lane.target << self.bits[1],
            )
            for number, flow in enumerate(self.flows)
            for lane in flow.lanes
            if lane not in self.led and len(flow.moves) and flow.kind != "scale"  # of factors: see scaled.py
        ]
        d = max([1, *(m.shape.shape[1] for _, _, m, _, _ in found)])

        def flat(arrays: list[I64]) -> I64:
            out: I64 = np.concatenate(arrays or [np.zeros(0, np.int64)])
            return out

        moves = [m for _, _, m, _, _ in found]
        counts = [len(m) for m in moves]
        return ProofMoves(
            np.repeat(np.array([kind for (kind, _), *_ in found] or ["copy"]), counts or [0]),
            np.repeat(np.array([number for (_, number), *_ in found] or [0], dtype=np.int64), counts or [0]),
            np.repeat(np.array([state for _, state, *_ in found] or [0], dtype=np.int64), counts or [0]),
            (flat([m.source + s for _, _, m, s, _ in found]), flat([m.target + t for _, _, m, _, t in found])),
            (widened([m.source_stride for m in moves], d, 1), widened([m.target_stride for m in moves], d, 1)),
            widened([m.shape for m in moves], d, 1),
        )

    def over(self, bits: int) -> set[tuple[int, int]]:
        """Mesh axes of the source, by their bits.

        The distance of their coordinates in ranks, and their number.
        """
        seen: dict[str, tuple[int, int]] = {}
        for mesh in self.graph.source.layout.meshes:
            for n, axis in reversed(list(enumerate(mesh.axes))):
                apart = int(np.prod(mesh.degrees[n + 1 :], dtype=np.int64))
                seen.setdefault(axis, (apart, mesh.degrees[n]))
        return {place for n, place in enumerate(seen.values()) if bits >> n & 1}

    # ---- names in messages
    # -----------------------------------------------------------------------------------------------

    def is_origin(self, have: I64, want: I64) -> Mask:
        """Return True if a source state may fill a target state.

        It is the same state, or the target's is derived from it.
        """
        allowed = np.eye(len(self.states), dtype=bool)
        for d in self.graph.source.layout.derived:
            if d.state in self.states and d.source in self.states:
                allowed[self.states.index(d.source), self.states.index(d.state)] = True
        for line in self.graph.target.layout.fillings:  # masters of parameters that the source has no masters of
            for state in (line.states or ()) if line.value is None else ():
                if state in self.states and "weight" in self.states:
                    allowed[self.states.index("weight"), self.states.index(state)] = True
        out: Mask = allowed[have, want]
        return out

    def place(self, side: int, position: int) -> tuple[tuple[str, str], int]:
        """The stored tensor's file and key, and the offset in it."""
        stored: Shelves = (self.graph.sources, self.graph.targets)[side]
        home, at = divmod(position, 1 << self.bits[side])
        tensor = stored[min(max(home, 0), len(stored) - 1)]
        return (tensor.file, key_text(tensor.key)), at

    def name_at(self, boxes: Boxes, n: int, pieces: ProofPieces) -> str:
        found = np.flatnonzero(boxes.begin == n)
        return self.name(pieces, int(boxes.piece[found[0]]), boxes.low[found[0]]) if len(found) else "an element"

    def name(self, pieces: ProofPieces, piece: int, index: I64) -> str:
        path = self.graph.target.tensors[int(pieces.tensor[piece])]
        element = element_name(self.graph.target.layout, path, tuple(index.tolist()))
        return f"{self.states[int(pieces.state[piece])]} of {element}"


# --- Numbers of a part's stored tensors in a graph ------------------------------------------------------------------
# The proof does not use the planner's numbers of stored tensors: it finds them by the names of a part.


@frozen(eq=False)
class _PartTensors:
    """The stored tensors of a part.

    They have the numbers `first`..`last` of its side. `hidden`: a mask of those in another one's storage.
    """

    first: int
    last: int
    hidden: NDArray[np.bool_] | None


Stands = tuple["_PartTensors | None", ...]


def _placed(placement: Placement, stored: Shelves) -> Stands:
    """The stored tensors of each part; None if it is unused."""
    shelf_of = {(id(s.block), s.state): i for i, s in enumerate(stored.shelves)}
    out: list[_PartTensors | None] = []
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
        out.append(_PartTensors(int(stored.starts[numbers[0]]), int(stored.starts[numbers[-1] + 1]), hidden))
    return tuple(out)


def _followers(graph: Graph, flows: Sequence[Flow], stands: tuple[Stands, Stands]) -> set[Lane]:
    """Lanes that are stored and moved like the first lane.

    Their distance is constant, part by part, on both sides. The proof of the first lane covers them.
    """
    filled = {n.state for n in graph.net if isinstance(n, Fill) and n.lacking}  # each by a line of its own
    leader: dict[str, str] = {}
    tables: dict[str, list[tuple[Lane, ...]]] = {}
    for flow in flows:
        for lane in flow.lanes:
            tables.setdefault(lane.state, []).append(flow.lanes)
            if leader.setdefault(lane.state, flow.lanes[0].state) != flow.lanes[0].state:
                leader[lane.state] = lane.state  # not always the same one
    found: set[Lane] = set()
    for state, first in leader.items():
        if (
            state == first
            or leader[first] != first
            or {state, first} & filled
            or len(tables[state]) != len(tables[first])
        ):
            continue
        lanes = [(lane, x[0]) for x in tables[state] for lane in x if lane.state == state]
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
    # A follower must not be derived from a state that has other derivations, and as much of both must be left out.
    origins_of = {lane.state: lane.origin for lane in found}
    others = {lane.origin for lanes in tables.values() for of in lanes for lane in of if lane not in found}
    left_out = {tuple(text.split(": ")[0].split(" of ", 1)) for text in graph.dropped}
    for state, origin in origins_of.items():
        of_leader = next(of[0].origin for of in tables[state])
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
    """Return True if two states have the same boxes in parts."""
    a, b = _parts(placement, state), _parts(placement, first)
    return len(a) == len(b) and all(
        x.folded is y.folded
        and x.is_alias == y.is_alias
        and (stands[n] is None) == (stands[m] is None)
        and _hidden(stands[n]) == _hidden(stands[m])
        and len(x.homes) == len(y.homes)
        for (n, x), (m, y) in zip(a, b, strict=True)
    )


def _hidden(stand: _PartTensors | None) -> list[bool] | None:
    """A mask of a part's tensors in another one's storage.

    They are not filled alone.
    """
    return None if stand is None or stand.hidden is None else [bool(h) for h in stand.hidden]


def _at_their_distance(
    graph: Graph, flows: Sequence[Flow], pairs: tuple[tuple[str, str], tuple[str, str]], stands: tuple[Stands, Stands]
) -> bool:
    """Return True if lanes and stored tensors have equal distances.

    Pairs: ours and theirs, by side.
    """
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
