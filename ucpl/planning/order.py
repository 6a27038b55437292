"""order: a graph as a plan.

Its nodes are kept, Fills get their boxes, and the structures for the stores are added.
"""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, TypedDict, Unpack

import attrs
import numpy as np
from attrs import evolve

from ucpl.extents import FlatBuffer, NamedTensor, Shelves, Structure
from ucpl.planning.plan import ClosedText, Origin, Plan, Recipe
from ucpl.planning.shelving import shelves_json
from ucpl.registry import format_named
from ucpl.tables import I64, MoveSide, Space, gaps
from ucpl.tables.operations import Fill, Node, Split, Write, in_order

if TYPE_CHECKING:  # who applies a saved plan imports this room, and none of those that made it
    import networkx as nx

    from ucpl.extents.account import Account
    from ucpl.extents.structure import CarriedBlob
    from ucpl.graph import Graph
    from ucpl.placement import Placement
    from ucpl.planning.rebuilding import Losses, Replays
    from ucpl.planning.unread import Unread


class Parts(TypedDict, total=False):
    """Parts of a plan that neither its graph nor its recipe has."""

    name: str
    spec_digest: str
    layout_text: str | ClosedText
    account: Account | None
    unread: Unread | None
    rank: int | None
    masters: Plan | None


def order(
    graph: Graph,
    recipe: Recipe | None = None,
    *,
    losses: Losses | None = None,
    replays: Replays | None = None,
    **parts: Unpack[Parts],
) -> Plan:
    """The plan of a graph that went through all passes.

    Its nodes are in the order in which they run. recipe: its decisions, if these are more than the graph's.
    """
    import networkx as nx

    net: nx.DiGraph[Node] = nx.DiGraph()
    net.add_nodes_from(in_order(graph.net))
    net.add_edges_from(graph.net.edges)
    net = _with_boxes(net, graph.targets, graph.spaces[1])
    if losses is not None:
        from ucpl.planning.rebuilding import with_rebuilt

        net = with_rebuilt(net, graph.sources, losses)
    if replays is not None:
        from ucpl.planning.rebuilding import with_replayed

        net = with_replayed(net, graph.sources, replays)
    known = recipe or recipe_of(graph)
    return Plan(
        name=parts.get("name", "convert"),
        source_call=graph.source.layout.call,
        target_call=graph.target.layout.call,
        source=structure_of(graph.source.located, like=known.target),
        target=known.target,
        source_shelves=known.source_shelves,
        target_shelves=known.target_shelves,
        tensors=graph.target.tensors,
        net=net,
        spaces=graph.spaces,
        origins=tuple(Origin(n, v, o) for n, v, o in graph.target.layout.origins),
        derived=known.derived,
        dropped=known.dropped,
        changed=known.changed,
        filled=known.filled,
        gone=known.gone,
        renamed=known.renamed,
        begun=known.begun,
        carry=known.carry,
        passes=known.passes,
        spec_digest=parts.get("spec_digest", ""),
        structure_digest=structure_digest(graph.sources),
        account=parts.get("account"),
        unread=parts.get("unread"),
        layout_text=parts.get("layout_text", ""),
        rank=parts.get("rank"),
        masters=parts.get("masters"),
        families={path: family.names for path, family in graph.target.layout.families.items()},
    )


def recipe_of(graph: Graph, blobs: tuple[CarriedBlob, ...] = ()) -> Recipe:
    """The decisions of a graph alone. blobs: values that a spec moves."""
    return Recipe(
        target=evolve(_target(graph), blobs=blobs),
        source_shelves=graph.sources,
        target_shelves=graph.targets,
        derived=graph.derived,
        dropped=graph.dropped,
        filled=graph.filled,
        carry={b.name: b.fate for b in graph.target.layout.blobs},
    )


def _target(graph: Graph) -> Structure:
    """Add the source's cut to a target that any degree may load.

    Such a target has entire tensors.
    """
    made = structure_of(graph.target.located)
    if not format_named(made.framework).is_of_any_ranks:
        return made
    from ucpl.placement.sharding import shardings_of

    return attrs.evolve(made, shardings=shardings_of(graph.source.located.layout))


def structure_digest(sources: Shelves) -> str:
    """SHA-256 over (file, key, shape, dtype) of every source tensor.

    In order, in the grouping of the plan; of stored tensors that are read.
    """
    rows = shelves_json(sources)
    return hashlib.sha256(json.dumps(rows, separators=(",", ":")).encode()).hexdigest()


def structure_of(placement: Placement, like: Structure | None = None) -> Structure:
    """A located layout in a framework's terms.

    like: the other side of a plan; equal tensors are the same records.
    """
    from ucpl.placement.sharding import shardings_of

    placement = placement.own or placement
    layout = placement.layout
    void = {path for path, t in layout.tensors.items() if t.is_void}
    groups = layout.model_groups
    if void:  # no file has them, and no optimizer
        groups = tuple((name, tuple(m for m in members if m not in void)) for name, members in groups)
    if not groups:
        trained = tuple(p for p, t in layout.tensors.items() if t.kind == "parameter" and p not in void)
        groups = (("parameters", trained),) if trained else ()
    of_groups = {s.name: {p for g, members in groups if g in (s.groups or ()) for p in members} for s in layout.states}
    known = {} if like is None else {tensor.name: tensor for tensor in like.tensors}
    tensors = []
    for path, t in layout.tensors.items():
        if path in void:
            continue
        of_states = t.kind == "parameter" and layout.states
        states = (
            tuple(
                s.name
                for s in layout.states
                if (s.groups is None or path in of_groups[s.name]) and (not s.is_reduced or t.of(s.name) is not t)
            )
            if of_states
            else ()
        )
        other = known.get(path)
        own = (t.counts, t.dtype or "", t.kind, states)
        if other is None or own != (other.shape, other.dtype, other.kind, other.states):
            other = NamedTensor(path, *own)
        tensors.append(other)
    settings = {k: v for k, v in layout.settings.items() if v is None or isinstance(v, int | str | bool | float)}
    for mesh in layout.meshes:
        for axis, degree in zip(mesh.axes, mesh.degrees, strict=True):
            settings.setdefault(axis, degree)
    return Structure(
        framework=layout.framework,
        settings=settings,
        tensors=tuple(tensors),
        aliases={alias: owner for alias, owner in layout.aliases.items() if owner not in void},
        groups=groups,
        flats=tuple(_plain_flat(f) for f in placement.flats),
        derived={d.state: d.source for d in layout.derived},
        shardings=shardings_of(layout),
    )


def _plain_flat(flat: FlatBuffer) -> FlatBuffer:
    return attrs.evolve(flat, coordinates={k: int(v) for k, v in flat.coordinates.items()})


# --- Fills of the target's padding ----------------------------------------------------------------------------------


def _with_boxes(net: nx.DiGraph[Node], targets: Shelves, space: Space) -> nx.DiGraph[Node]:
    """The graph whose Fills have their boxes.

    Of each tensor that ends in padding, the elements that no Split reaches.
    """
    import networkx as nx

    filled: dict[Node, Node] = {}
    homes, numel = _padded(targets)
    for fill in net:
        if isinstance(fill, Fill) and not fill.lacking:
            (write,) = net.successors(fill)
            assert isinstance(write, Write)
            mine = slice(*np.searchsorted(homes, [write.first, write.last]).tolist())
            boxes = gaps(_reached(net, write, space), homes[mine], numel[mine], space)
            assert boxes.elements == fill.elements, f"{fill}: {boxes.elements} are open"
            filled[fill] = evolve(fill, boxes=boxes)
    return nx.relabel_nodes(net, filled) if filled else net


def _padded(targets: Shelves) -> tuple[I64, I64]:
    """Numbers of the padded stored tensors, in order, with element counts."""
    homes, numel = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    for shelf, start in zip(targets.shelves, targets.starts.tolist(), strict=False):
        block = shelf.block
        at = np.flatnonzero(block.padding)
        homes.append((start + at[:, None] * block.choices + np.arange(block.choices)).reshape(-1))
        numel.append(np.repeat(block.shape[at].prod(axis=1), block.choices))
    return np.concatenate(homes), np.concatenate(numel)


def _reached(net: nx.DiGraph[Node], write: Write, space: Space) -> MoveSide:
    """Boxes of all Splits into a Write, and the missing ones.

    Also those of the states that are stored like it.
    """
    lacking = [fill.boxes for fill in net.predecessors(write) if isinstance(fill, Fill) and fill.lacking]
    return MoveSide.concat(
        lacking
        + [
            split.boxes.replace(offset=split.boxes.offset + lane.target * space.step)
            for split in net.predecessors(write)
            if isinstance(split, Split)
            for lane in split.lanes
        ]
    )
