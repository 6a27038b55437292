"""order: a graph as a plan, moves sorted by target file and position, structures for the stores beside them."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING

import attrs
import numpy as np

from ucpl.extents import Flat, NamedTensor, StoredTensor, Structure
from ucpl.schedule.plan import Moves, Origin, Plan

if TYPE_CHECKING:  # who applies a saved plan imports this room, and none of those that made it
    from ucpl.graph import Graph
    from ucpl.regions import Placement


def order(graph: Graph, *, name: str = "convert", spec_digest: str = "", layout_text: str = "") -> Plan:
    """The plan of a graph. Only tensors that take part are listed."""
    moves = []
    for batch in graph.batches:
        f = batch.fragments
        sort = np.lexsort((f.source, f.target_offset, f.target))
        f = f.take(sort)
        moves.append(
            Moves(
                batch.kind,  # type: ignore[arg-type]
                batch.state,
                f.tensor.astype(np.int32),
                f.source.astype(np.int32),
                f.target.astype(np.int32),
                f.shape,
                f.source_offset,
                f.source_stride,
                f.target_offset,
                f.target_stride,
                batch.source_value,
                batch.target_value,
                batch.lossy,
            )
        )
    source, target = structure_of(graph.source), structure_of(graph.target)
    return Plan(
        name=name,
        source_call=graph.source.layout.call,
        target_call=graph.target.layout.call,
        source=source,
        target=target,
        sources=tuple(graph.sources),
        targets=tuple(graph.targets),
        tensors=graph.target.tensors,
        moves=tuple(moves),
        origins=tuple(Origin(n, v, o) for n, v, o in graph.target.layout.origins),
        derived=tuple(graph.derived),
        dropped=tuple(graph.dropped),
        carry={b.name: b.fate for b in graph.target.layout.blobs},
        spec_digest=spec_digest,
        structure_digest=structure_digest(tuple(graph.sources)),
        layout_text=layout_text,
    )


def structure_digest(sources: tuple[StoredTensor, ...]) -> str:
    """SHA-256 over (file, key, shape, dtype) of every stored tensor that is read, in order."""
    rows = [[s.file, [str(k) for k in s.key], list(s.shape), s.dtype] for s in sources]
    return hashlib.sha256(json.dumps(rows, separators=(",", ":")).encode()).hexdigest()


def structure_of(placement: Placement) -> Structure:
    """A located layout in a framework's terms."""
    from ucpl.regions.sharding import shardings_of

    layout = placement.layout
    groups = layout.model_groups
    if not groups:
        trained = tuple(p for p, t in layout.tensors.items() if t.kind == "parameter")
        groups = (("parameters", trained),) if trained else ()
    tensors = tuple(
        NamedTensor(
            path,
            t.counts,
            t.dtype or "",
            t.kind,
            tuple(
                s.name
                for s in layout.states
                if t.kind == "parameter" and (s.groups is None or any(path in m for g, m in groups if g in s.groups))
            ),
        )
        for path, t in layout.tensors.items()
    )
    settings = {k: v for k, v in layout.settings.items() if v is None or isinstance(v, int | str | bool | float)}
    for mesh in layout.meshes:
        for axis, degree in zip(mesh.axes, mesh.degrees, strict=True):
            settings.setdefault(axis, degree)
    return Structure(
        framework=layout.framework,
        settings=settings,
        tensors=tensors,
        aliases=dict(layout.aliases),
        groups=groups,
        flats=tuple(_plain_flat(f) for f in placement.flats),
        derived={d.state: d.source for d in layout.derived},
        shardings=shardings_of(layout),
    )


def _plain_flat(flat: Flat) -> Flat:
    return attrs.evolve(flat, coordinates={k: int(v) for k, v in flat.coordinates.items()})
