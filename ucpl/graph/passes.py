"""Passes: functions Graph → Graph, applied in order.

meet        boxes of both sides become moves, one for each pair that shares elements
straighten  dims by falling target stride, neighbours merged
join_runs   runs that follow each other become one
settle      dtypes that no spec states, and lossy casts refused
deal        one Extract and one Split an entry, which are saved and run
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence

import networkx as nx
import numpy as np
from attrs import evolve

from ucpl.graph.casts import settle
from ucpl.graph.graph import AlikeLines, Drawn, Graph, JoinedMoves, Joint, Lanes, SourceBoxes, TargetBoxes
from ucpl.graph.rows import StoredBoxes
from ucpl.placement import Part, Placement
from ucpl.placement.boxes import overlaps
from ucpl.tables import I64, join_runs, numbered, straighten
from ucpl.tables.operations import Check, Derive, Extract, Fill, Lane, Merge, Reduce, Scale, Split

__all__ = ["PASSES", "Pass", "deal", "meet", "optimise", "each_alike_line", "alike_lines_of"]

Pass = Callable[[Graph], Graph]
Values = tuple[tuple[float, float], tuple[float, float]]  # stored = a * x + b, of source and target


def optimise(graph: Graph, passes: Sequence[Pass] | None = None) -> Graph:
    """Apply passes one after the other."""
    for step in PASSES if passes is None else passes:
        graph = step(graph)
    return graph


def meet(graph: Graph) -> Graph:
    """Boxes of both sides as moves, one a pair that shares elements.

    before: extract 0:6, 6:12 ─► merge ─► split 0:4, 4:8, 8:12     after: merge with 0:4, 4:6, 6:8, 8:12
    """

    def joined(joint: Joint) -> Joint:
        if joint.moves is not None:  # of scales, which meet blocks
            return joint
        taken = [n for n in graph.net.predecessors(joint) if isinstance(n, SourceBoxes)]
        kept = [n for n in graph.net.successors(joint) if isinstance(n, TargetBoxes)]
        source = StoredBoxes.concat(n.boxes for n in taken)
        rows = [n.firsts if joint.kind == "check" else n.boxes for n in kept]
        target = StoredBoxes.concat(rows)
        width = max(source.width, target.width)
        return evolve(joint, moves=_shared(source.widen(width), target.widen(width)))

    made = graph.with_joints(joined)
    net = made.net
    # The moves have the boxes now: reads and writes are at the joint itself.
    for node in [n for n in net if isinstance(n, SourceBoxes | TargetBoxes)]:
        net.add_edges_from((a, b) for a in list(net.predecessors(node)) for b in list(net.successors(node)))
        net.remove_node(node)
    net.remove_nodes_from([n for n in net if isinstance(n, Joint) and n.kind != "copy" and not len(n.moves or ())])
    return made


def _shared(source: StoredBoxes, target: StoredBoxes) -> JoinedMoves:
    j, i = overlaps(target.tensor, target.low, target.high, source.tensor, source.low, source.high)
    low = np.maximum(source.low[i], target.low[j])
    shape = np.minimum(source.high[i], target.high[j]) - low
    return JoinedMoves(
        target.tensor[j],
        source.offset[i] + ((low - source.low[i]) * source.stride[i]).sum(axis=1),
        target.offset[j] + ((low - target.low[j]) * target.stride[j]).sum(axis=1),
        shape,
        source.stride[i],
        target.stride[j],
        source.part[i],
        target.part[j],
    )


def each_straight(graph: Graph) -> Graph:
    """`columns.straighten` of every joint's moves."""
    return graph.with_moves(straighten)


def each_joined(graph: Graph) -> Graph:
    """`columns.join_runs` of every joint's moves, but of scales.

    A row of scales is of one box of their tensor.
    """
    return graph.with_joints(
        lambda j: j if j.moves is None or j.kind == "scale" else evolve(j, moves=join_runs(j.moves))
    )


def deal(graph: Graph) -> Graph:
    """One node per (operation, entry of the target).

    Rows of a joint are dealt to the parts that they fill.

    before: merge of all entries     after: extract ─► merge ─► split for each entry, in the order of its stored
    positions
    """
    net: nx.DiGraph[Drawn] = nx.DiGraph()
    net.add_nodes_from(graph.reads.values())
    net.add_nodes_from(graph.writes.values())
    ways: dict[int, list[Drawn]] = {}  # nodes for each part of the target
    for joint in sorted(graph.joints, key=lambda j: j.kind == "scale"):
        assert joint.moves is not None
        for table, value in _by_entry(graph, joint.moves):
            target = int(table.target_part[0])
            lanes = _lanes(graph, joint, target)
            extract, way, place = _dealt(graph, joint, table, lanes, value)
            net.add_edge(extract, way)
            if joint.kind == "scale":
                net.add_edges_from((other, way) for other in ways.get(target, ()))
            else:
                ways.setdefault(target, []).append(way)
            if place is not way:
                net.add_edge(way, place)
            sources = sorted(set(table.source_part.tolist()))
            index = [joint.lanes[0].of_source[part] for part in sources]
            for lane in joint.lanes:
                net.add_edges_from((graph.reads[lane.sources[i]], extract) for i in index)
                net.add_edge(place, graph.writes[lane.targets[joint.lanes[0].of_target[target]]])
    fills = [(n, w) for n, w in graph.net.edges if isinstance(n, Fill)]
    net.add_edges_from(fills)
    return evolve(graph, net=net)


def _by_entry(graph: Graph, moves: JoinedMoves) -> Iterator[tuple[JoinedMoves, Values]]:
    """Rows of one target part by stored value, in the target's order.

    All of a group have one value on each side.
    """
    values, value = _values(graph, moves)
    ordered = moves.sort(moves.target_part, value, moves.target, moves.source)
    value = value[np.lexsort((moves.source, moves.target, value, moves.target_part))]
    changes = (ordered.target_part[1:] != ordered.target_part[:-1]) | (value[1:] != value[:-1])
    starts = np.concatenate([[0], np.flatnonzero(changes) + 1]) if len(ordered) else np.zeros(0, dtype=np.int64)
    for first, last in zip(starts.tolist(), [*starts[1:].tolist(), len(ordered)], strict=False):
        yield ordered.take(slice(first, last)), values[int(value[first])]


def _values(graph: Graph, moves: JoinedMoves) -> tuple[list[Values], I64]:
    """Stored values on both sides of moves, and each move's number."""
    sides = (graph.source, moves.source_part), (graph.target, moves.target_part)
    columns = [moves.source_part, moves.target_part]
    if any(p.values for placement, _ in sides for p in placement.parts):
        columns.append(moves.tensor)
    _, first, which = np.unique(numbered(columns), return_index=True, return_inverse=True)
    found: dict[Values, int] = {}
    number = []
    for row in first.tolist():
        path = graph.target.tensors[int(moves.tensor[row])]
        here, there = (placement.parts[int(part[row])].value_of(path) for placement, part in sides)
        number.append(found.setdefault((here, there), len(found)))
    return list(found), np.array(number, dtype=np.int64)[which]


def _lanes(graph: Graph, joint: Joint, target: int) -> tuple[Lane, ...]:
    """States of a joint, with the distances of their stored tensors.

    They count from the first one's.
    """
    first = joint.lanes[0]
    at = first.of_target[target]
    return tuple(
        Lane(
            lane.state,
            lane.origin,
            graph.reads[lane.sources[0]].first - graph.reads[first.sources[0]].first,
            graph.writes[lane.targets[at]].first - graph.writes[target].first,
        )
        for lane in joint.lanes
    )


def _dealt(
    graph: Graph, joint: Joint, moves: JoinedMoves, lanes: tuple[Lane, ...], value: Values
) -> tuple[Extract, Merge | Reduce | Derive | Scale | Check, Split | Check]:
    part = graph.target.parts[int(moves.target_part[0])]
    extract = Extract(part.label, lanes, moves.source_side, value[0])
    if joint.kind == "check":
        check = Check(part.label, lanes, moves.target_side, value[1], part.lossy or (joint.derived and not part.exact))
        return extract, check, check
    way: Merge | Reduce | Derive | Scale
    match joint.kind:
        case "scale":
            way = Scale(part.label, lanes)
        case "mean" | "sum" | "max":
            way = Reduce(part.label, lanes, joint.kind, joint.over, part.exact)
        case _:
            way = Derive(part.label, lanes, part.exact) if joint.derived else Merge(part.label, lanes)
    return extract, way, Split(part.label, lanes, moves.target_side, value[1], part.lossy)


# ---- lines that are cut alike ----------------------------------------------------------------------------------------


def alike_lines_of(
    lanes: Lanes, source: Placement, target: Placement, common: dict[str, int]
) -> tuple[AlikeLines, ...]:
    """Groups of tensors that are stored alike on both sides.

    Each has two or more, and each tensor is alone in a part. Parts of one kind share the columns of their boxes:
    `locate` makes them so.
    """
    here, there = _alone(source, lanes.sources), _alone(target, lanes.targets)
    found: dict[object, list[tuple[int, int, int]]] = defaultdict(list)
    for path, t in there.items():
        s = here.get(path)
        if s is not None:
            kind = tuple((id(p.folded.low), p.is_alias) for p in (source.parts[s], target.parts[t]))
            found[kind].append((common[path], s, t))
    out = []
    for group in found.values():
        if len(group) > 1:
            tensors, sources, targets = (np.array(c, dtype=np.int64) for c in zip(*group, strict=True))
            out.append(AlikeLines((group[0][1], group[0][2]), tensors, sources, targets))
    return tuple(out)


def _alone(placement: Placement, parts: tuple[int, ...]) -> dict[str, int]:
    """Tensors alone in a part, each with its part."""
    holders: dict[int, list[int]] = defaultdict(list)
    for n in parts:
        for t in placement.parts[n].tensors:
            holders[t].append(n)

    def is_alone(part: Part) -> bool:
        return len(part.tensors) == 1

    return {
        placement.tensors[t]: ns[0] for t, ns in holders.items() if len(ns) == 1 and is_alone(placement.parts[ns[0]])
    }


def each_alike_line(graph: Graph) -> Graph:
    """Moves of a first tensor, repeated for all that are stored alike.

    before: layers.0.w, rows 0 and 1     after: layers.0.w, layers.1.w, ... each with rows 0 and 1 of its own stored
    tensors
    """
    return graph.with_joints(lambda joint: joint if joint.moves is None else _with_moves(graph, joint, joint.moves))


def _with_moves(graph: Graph, joint: Joint, moves: JoinedMoves) -> Joint:
    tables = []
    left = np.ones(len(moves), dtype=np.bool_)
    for alike in joint.alike:
        mine = (moves.source_part == alike.first[0]) & (moves.target_part == alike.first[1])
        left &= ~mine
        m, n = moves.take(mine), len(alike.tensors)
        source = np.array([graph.reads[s].first for s in alike.sources.tolist()], dtype=np.int64)
        target = np.array([graph.writes[t].first for t in alike.targets.tolist()], dtype=np.int64)
        each = np.repeat(np.arange(n), len(m))
        rows = m.take(np.tile(np.arange(len(m)), n))
        tables.append(
            rows.replace(
                tensor=alike.tensors[each],
                source=rows.source + ((source - source[0]) << graph.spaces[0].bits)[each],
                target=rows.target + ((target - target[0]) << graph.spaces[1].bits)[each],
                source_part=alike.sources[each],
                target_part=alike.targets[each],
            )
        )
    return evolve(joint, alike=(), moves=JoinedMoves.concat([moves.take(left), *tables], moves.width))


PASSES: tuple[Pass, ...] = (meet, each_straight, each_joined, each_alike_line, settle, deal)
