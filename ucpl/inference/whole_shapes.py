"""Complete shapes of tensors whose cut only a layout has."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import evolve

from ucpl.errors import Label, fail
from ucpl.language import nodes
from ucpl.language.walk import walk
from ucpl.layout import Layout, Library
from ucpl.layout.expand import wildcards_of
from ucpl.placement.sharding import TP, shardings_of

if TYPE_CHECKING:
    from ucpl.files.checkpoint import Checkpoint

# Megatron-DeepSpeed's names, and its layout of models without a gate.
_ONE, _SPEC = "gpt", "specs/megatron_deepspeed.ucpl"
_UP, _DOWN = ".dense_h_to_4h.weight", ".dense_4h_to_h.weight"


def with_shapes(checkpoint: Checkpoint, library: Library, call: nodes.Call) -> Checkpoint:
    """The checkpoint with complete shapes of tensors that only a layout cuts.

    The cut dim is as long as all parts together.
    """
    from ucpl.inference.infer import inherited_settings, model_of  # a plan of two texts reads no checkpoint

    local = checkpoint.state.parallel.local_shapes
    unknown = {name: shapes for name, shapes in local.items() if name not in checkpoint.state.parallel.shardings}
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
    if _has_no_gate(library, call):
        _check_no_gate(whole, lines, checkpoint)
    tensors = tuple(evolve(t, shape=whole.get(t.name, t.shape)) for t in checkpoint.state.tensors)
    return evolve(checkpoint, state=evolve(checkpoint.state, tensors=tensors))


def check_gate_kept(library: Library, call: nodes.Call, layout: Layout) -> None:
    """Stop if a target would cut a gated projection as one matrix.

    No rank could compute with it. Raises: UcplError E322.
    """
    if not _has_no_gate(library, call):
        return
    for name, sharding in shardings_of(layout).items():
        back = layout.tensors.get(name.removesuffix(_UP) + _DOWN)
        if not name.endswith(_UP) or back is None or sharding.dim != 0 or len(sharding.sections) != 1:
            continue
        if sharding.shape[0] == 2 * back.counts[-1]:
            fail(
                "E322",
                f"`{name}` has {sharding.shape[0]} rows, twice the columns of `{name.removesuffix(_UP) + _DOWN}`: a gate and"
                f" an up projection. Each rank needs its part of both, and `{_ONE}` would cut them as one matrix: the first"
                " ranks would hold the gate",
                Label(_SPEC, where=name),
                remedy="--to 'megatron_deepspeed.ucpl:llama(...)', with the same degrees, which cuts the two",
            )


def _has_no_gate(library: Library, call: nodes.Call) -> bool:
    """Test for the layout of models without a gate, or an extension."""
    return any(link.node.name == _ONE and link.file.name == _SPEC for link in library.chain(call.name))


def _check_no_gate(whole: dict[str, tuple[int, ...]], lines: dict[str, nodes.Entry], checkpoint: Checkpoint) -> None:
    """Stop if a gated projection was cut as one matrix.

    Its rows would be in another order. Raises: UcplError E322.
    """
    for name, (rows, *_) in whole.items():
        back = name.removesuffix(_UP) + _DOWN
        axis = (lines[name].shape or (None,))[0]
        if name.endswith(_UP) and rows == 2 * whole.get(back, (0, 0))[-1] and isinstance(axis, nodes.Cut):
            fail(
                "E322",
                f"`{name}` has {rows} rows, twice the columns of `{back}`: a gate and an up projection. Each rank has its part"
                f" of both, and `{_ONE}` takes the ranks' rows for parts of one matrix",
                Label(str(checkpoint.root), where=name),
                remedy="--from 'megatron_deepspeed.ucpl:llama()', which cuts the two",
            )


def _is_cut(axis: nodes.Axis) -> bool:
    """Test whether tensor parallelism cuts an axis or a part of it."""
    return any(s.mesh_axis == TP for node in walk(axis) if isinstance(node, nodes.Cut) for s in node.splits)
