"""Lines that are cut alike, joined once.

The moves of a first tensor are those of all that are stored as it is.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np
from attrs import evolve

from ucpl.graph.graph import AlikeLines, Graph, JoinedMoves, Joint, Lanes
from ucpl.placement import Part, Placement

__all__ = ["each_alike_line", "alike_lines_of"]


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
    return graph.with_joints(lambda joint: joint if joint.moves is None else _told(graph, joint, joint.moves))


def _told(graph: Graph, joint: Joint, moves: JoinedMoves) -> Joint:
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
