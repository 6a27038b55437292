"""How the chunks of a torch_dist folder lie, as a layout in the language."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ucpl.frontends.dcp import without_dims
from ucpl.frontends.grids import Lines, by_dims
from ucpl.frontends.parallel import TARGET, Base, Extended, extended
from ucpl.stores.dcp.mesh import boxes_of
from ucpl.stores.dcp.metadata import METADATA
from ucpl.syntax import nodes

if TYPE_CHECKING:
    from ucpl.stores.checkpoint import Checkpoint


def stored(base: Base, checkpoint: Checkpoint) -> Extended:
    """The layout of an opened folder, whose chunks the store gives as cells of a grid."""
    shapes = {t.name: t.shape for t in checkpoint.tensors}
    boxes = boxes_of(checkpoint.extents.values(), {name: len(shape) for name, shape in shapes.items()})
    has_masters = base.inherited["masters"][0]
    lines = Lines(
        shapes,
        boxes,
        dict.fromkeys(shapes, "{name}"),
        settings={n: base.inherited[n][0] for n in ("file", "masters", "master")},
        framework="framework megatron_core(masters = masters, master = master)",
        states=(
            *(('state fp32 of * = like  as "optimizer.state.{master}.{name}"',) if has_masters else ()),
            'state * of * = like  as "optimizer.state.{state}.{name}"',
            *(() if has_masters else ("derive fp32 from weight",)),
        ),
    )
    return by_dims(base, lines, checkpoint.root / METADATA)


def target(base: Base) -> Extended:
    """The shipped layout, which cuts the first dim of each tensor, with a line for each that has none."""
    alone = [
        nodes.Entry(name, (), (nodes.Rest(),), (nodes.Clause("as", ("{name}",)),), None)
        for name in sorted(without_dims(base.model))
    ]
    return extended(base, TARGET, (), alone) if alone else Extended(base.library, base.call)
