"""Whole shapes of tensors whose cut over tensor-parallel ranks only a layout says, and no file."""

from __future__ import annotations

from attrs import evolve

from ucpl.frontends.infer import inherited_settings, model_of
from ucpl.layout import Library
from ucpl.layout.expand import wildcards_of
from ucpl.regions.sharding import TP
from ucpl.stores.checkpoint import Checkpoint
from ucpl.syntax import nodes
from ucpl.syntax.walk import walk


def with_shapes(checkpoint: Checkpoint, library: Library, call: nodes.Call) -> Checkpoint:
    """The checkpoint with whole shapes of tensors whose cut only a layout says: the dim it cuts is as long as all parts."""
    local = checkpoint.local_shapes
    unknown = {name: shapes for name, shapes in local.items() if name not in checkpoint.shardings}
    if not unknown:
        return checkpoint
    wild = wildcards_of(library, call, model_of(checkpoint, {}), inherited=inherited_settings(checkpoint))
    lines = {name: entries[0] for name, entries in wild.items()}
    named: dict[str, nodes.Entry] = {}
    for link in library.chain(call.name):
        mine = [i for i in link.node.items if isinstance(i, nodes.Entry) and i.shape is not None and i.path in local]
        named = {**{i.path: i for i in mine}, **named}
    lines |= named
    whole: dict[str, tuple[int, ...]] = {}
    for name, shapes in unknown.items():
        entry = lines.get(name)
        dims = [d for d, axis in enumerate(entry.shape or ()) if _is_cut(axis)] if entry is not None else []
        if len(dims) == 1 and dims[0] < len(shapes[0]):
            d = dims[0]
            whole[name] = (*shapes[0][:d], sum(s[d] for s in shapes), *shapes[0][d + 1 :])
    return evolve(checkpoint, tensors=tuple(evolve(t, shape=whole.get(t.name, t.shape)) for t in checkpoint.tensors))


def _is_cut(axis: nodes.Axis) -> bool:
    """Whether tensor parallelism cuts an axis, or something in it."""
    return any(s.mesh_axis == TP for node in walk(axis) if isinstance(node, nodes.Cut) for s in node.splits)
