"""Placement of torch.distributed.checkpoint's chunks as a layout that extends the shipped `dcp`.

A line is written for each tensor that differs from the shipped layout's line for its kind. If no mesh of FSDP and
tensor parallelism makes the chunks, each dim is cut over an axis of its own, by the widths of the chunks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from attrs import evolve

from ucpl.errors import Label, fail
from ucpl.formats.dcp.grids import Lines, by_dims
from ucpl.formats.dcp.mesh import Boxes, TensorCut, boxes_by, boxes_of, mesh_of
from ucpl.formats.dcp.metadata import METADATA
from ucpl.inference.parallel import STORED, TARGET, Base, Extended, extended
from ucpl.language import nodes

if TYPE_CHECKING:
    from ucpl.extents import Sharding
    from ucpl.files.checkpoint import Checkpoint

FSDP, TP = "fsdp", "tp"

Shape = tuple[int, ...]


def stored(base: Base, checkpoint: Checkpoint) -> Extended:
    """The layout of an opened folder. Raises: UcplError E523."""
    prefix = str(checkpoint.state.settings["prefix"].value)
    shapes = {t.name: t.shape for t in checkpoint.state.tensors}
    kinds = {t.name: t.kind for t in checkpoint.state.tensors}
    shapes |= {alias: shapes[owner] for alias, owner in checkpoint.state.aliases.items()}
    found = boxes_of(checkpoint.extents.values(), {prefix + name: len(shape) for name, shape in shapes.items()})
    boxes = {name: found[prefix + name] for name in shapes}
    mesh = mesh_of(shapes, boxes)
    if mesh is None:
        return _by_dims(base, checkpoint, shapes, boxes)
    entries = []
    for name, shape in shapes.items():
        usual = (nodes.Rest(),) if kinds.get(name) == "buffer" else (_by_fsdp(), nodes.Rest())
        cut = mesh.cuts[name]
        is_usual = shape != () and boxes_by(shape, TensorCut(whole=len(usual) == 1), mesh.fsdp, mesh.tp) == boxes[name]
        axes = usual if is_usual else _pattern(shape, cut)
        if axes != usual:
            entries.append(_entry(name, axes, name in checkpoint.state.aliases))
    return extended(base, STORED, (), entries) if entries else Extended(base.library, base.call)


def target(base: Base, shardings: Mapping[str, Sharding]) -> Extended:
    """The shipped layout at a tensor-parallel degree.

    Every tensor is cut along the same dim as in the source, as torch.chunk cuts it. Raises: UcplError E472 if these
    dims are unknown.
    """
    aliases = {item.path: item.owner for item in base.model.items if isinstance(item, nodes.Alias)}
    scalars = without_dims(base.model)
    whole = scalars | {i.path for i in base.model.items if isinstance(i, nodes.Tensor) and i.kind == "buffer"}
    cut = {name for name, one in shardings.items() if one.dim is not None} if base.asked(TP) > 1 else set()
    seconds = [alias for alias, owner in aliases.items() if owner in whole - cut]
    alone = [_entry(name, (nodes.Rest(),), name in aliases) for name in (*sorted(scalars), *seconds)]
    degree = base.asked(TP)
    if degree <= 1:
        return extended(base, TARGET, (), alone) if alone else Extended(base.library, base.call)
    if not any(one.dim is not None for one in shardings.values()):
        fail(
            "E472",
            f"`{base.call.name}` at tp = {degree}: the source is not tensor parallel, and the dims to cut are not known",
            Label("<call>", where=f"tp = {degree}"),
            remedy="write a layout that extends dcp, with a line for each tensor that tp cuts: "
            '"layers.0.q.weight" = _@chunk(tp)@chunk(fsdp) ...  as "{prefix}layers.0.q.weight"',
        )
    places = [(name, name) for name in shardings] + [
        (alias, owner) for alias, owner in aliases.items() if owner in shardings
    ]
    entries = [
        _entry(place, _pattern(shardings[owner].shape, TensorCut(shardings[owner].dim)), place != owner)
        for place, owner in places
        if shardings[owner].dim is not None
    ]
    note = ("cuts over tp", f"{len(entries)} tensors", "along the dims that the source cuts, as torch.chunk does")
    return evolve(extended(base, TARGET, (), [*alone, *entries]), notes=(note,))


def without_dims(model: nodes.Model, *, buffers: bool = False) -> set[str]:
    """Tensors that nothing can cut; `buffers` adds those without own lines."""
    return {
        i.path for i in model.items if isinstance(i, nodes.Tensor) and (buffers or i.kind != "buffer") and not i.dims
    }


def _by_fsdp() -> nodes.Axis:
    return nodes.Cut(nodes.Any_(), (nodes.Split(FSDP, "chunk"),))


def _entry(name: str, axes: tuple[nodes.Axis, ...], is_alias: bool) -> nodes.Entry:
    return nodes.Entry(name, (), axes, (nodes.Clause("as", (_template(is_alias),)),), None)


def _template(is_alias: bool) -> str:
    """A template that ignores braces and slashes in names."""
    return "{prefix}{alias}" if is_alias else "{prefix}{name}"


def _pattern(shape: tuple[int, ...], cut: TensorCut) -> tuple[nodes.Axis, ...]:
    """`_@chunk(tp)@chunk(fsdp) ...`, `_@chunk(fsdp) _@chunk(tp)`, `...`."""
    splits: list[list[nodes.Split]] = [[] for _ in shape]
    if cut.dim is not None:
        splits[cut.dim].append(nodes.Split(TP, "chunk"))
    if shape and not cut.whole:
        splits[0].append(nodes.Split(FSDP, "chunk"))
    last = max((d for d, one in enumerate(splits) if one), default=-1)
    axes: list[nodes.Axis] = [
        nodes.Cut(nodes.Any_(), tuple(one)) if one else nodes.Any_() for one in splits[: last + 1]
    ]
    return (*axes, nodes.Rest()) if last + 1 < len(shape) or not axes else tuple(axes)


# ---- any other mesh ----------------------------------------------------------------------------------------------------


def _by_dims(base: Base, checkpoint: Checkpoint, shapes: Mapping[str, Shape], boxes: Mapping[str, Boxes]) -> Extended:
    asked = {n: base.inherited[n][0] for n in ("prefix", "states", "file")}
    asked["flat"] = base.inherited.get("flat", (0, ""))[0]  # without an optimizer no name is flat
    masters = base.inherited["masters"][0]
    if masters:
        asked["master_state"] = base.inherited.get("master_state", ("fp32", ""))[0]
    lines = Lines(
        shapes,
        boxes,
        {name: _template(name in checkpoint.state.aliases) for name in shapes},
        settings=asked,
        framework="framework dcp(prefix = prefix, states = states, flat = flat)",
        states=(
            *(('state fp32 for * = like  as "{states}{name}.{master_state}"',) if masters else ()),
            'state * for * = like  as "{states}{name}.{state}"',
            *(() if masters else ("derive fp32 from weight",)),
        ),
    )
    return by_dims(base, lines, checkpoint.root / METADATA)
