"""The chunks of a torch_dist folder as a layout in the language."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ucpl.formats.dcp.grids import Lines, by_dims
from ucpl.formats.dcp.mesh import boxes_of
from ucpl.formats.dcp.metadata import METADATA
from ucpl.formats.megatron import bucket_layouts as megatron_buckets
from ucpl.formats.megatron.dealt import with_whole
from ucpl.inference.parallel import Base, Extended
from ucpl.language import nodes

if TYPE_CHECKING:
    from ucpl.files.checkpoint import Checkpoint


def is_in_buckets(layout: nodes.Layout, call: nodes.Call) -> bool:
    """Test whether a target has its optimizer in buckets.

    Buckets are of modules, and not of stacks of layers.
    """
    return megatron_buckets.form_of(layout, call) == megatron_buckets.BUCKETS


def stored(base: Base, checkpoint: Checkpoint) -> Extended:
    """The layout of a folder, with chunks as cells of a grid."""
    shapes = {t.name: t.shape for t in checkpoint.state.tensors}
    boxes = boxes_of(checkpoint.extents.values(), {name: len(shape) for name, shape in shapes.items()})
    has_masters = base.inherited["masters"][0]
    lines = Lines(
        shapes,
        boxes,
        dict.fromkeys(shapes, "{name}"),
        settings={n: base.inherited[n][0] for n in ("file", "masters", "master")},
        framework="framework megatron_core(masters = masters, master = master)",
        states=(
            *(('state fp32 for * = like  as "optimizer.state.{master}.{name}"',) if has_masters else ()),
            'state * for * = like  as "optimizer.state.{state}.{name}"',
            *(() if has_masters else ("derive fp32 from weight",)),
        ),
    )
    return by_dims(base, lines, checkpoint.root / METADATA)


def target(base: Base, source: Checkpoint | None) -> Extended:
    """The layout of a target: the shipped one, or one of buckets.

    The shipped one cuts the first dim of each tensor; tensors without dims have a line of their own.
    Raises: UcplError E542, E543, E547 if the model cannot be split over the ranks of the buckets.
    """
    megatron_buckets.demand(base)
    if is_in_buckets(base.layout, base.call):
        return megatron_buckets.target(base, source)
    return with_whole(base)
