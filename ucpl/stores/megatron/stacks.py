"""Layers and experts: one tensor of all, as Megatron-Core saves models whose layers are alike, or one of each, as modules have.

A target is stacked where its tensors are those of layers; common.pt then says what each was called, so that it is read as
what was converted.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import prod

from attrs import evolve, field

from ucpl.extents import Extent, Key, NamedTensor, ParameterGroup
from ucpl.records import define, frozen
from ucpl.stores.checkpoint import Checkpoint
from ucpl.stores.dcp.metadata import METADATA
from ucpl.stores.megatron.groups import is_expert
from ucpl.stores.megatron.legacy_arguments import arguments_in
from ucpl.stores.megatron.orders import is_own_norm, registered

__all__ = ["Stacks", "apart", "in_modules", "is_of_a_layer", "stacks_of", "templates_of"]

_LAYER = re.compile(r"(?P<head>(?:.*\.)?layers\.)(?P<layer>\d{1,9})\.(?P<rest>.+)", re.DOTALL)
_EXPERT = re.compile(
    r"(?P<head>(?:.*\.)?experts\.)(?:local_experts|experts)\.(?P<expert>\d{1,9})\.(?P<rest>.+)", re.DOTALL
)
_STACK = re.compile(r"(?P<head>(?:.*\.)?layers\.)(?!\d+\.)(?P<rest>.+)", re.DOTALL)
_STACKED_EXPERTS = re.compile(r"(?P<head>(?:.*\.)?experts\.)experts\.(?!\d+\.)(?P<rest>.+)", re.DOTALL)
# Modules of Megatron-Core's own blocks have names that it saves under those of Transformer Engine's.
_SAVED = {
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
}
_ORDER = ".linear_qkv.layer_norm_weight", ".self_attention.linear_proj.weight"
_BLOCKS = "transformer_impl"  # of a run's arguments
_STATE = re.compile(r"optimizer\.state\.[A-Za-z0-9_]+\.", re.DOTALL)

Shape = tuple[int, ...]


@frozen
class _Place:
    stack: str
    template: str  # of the name, with {} for each number
    at: Shape  # layer, and expert where there is one


@define
class Stacks:
    """What tensors of layers become one."""

    places: dict[str, _Place] = field(factory=dict)
    counts: dict[str, Shape] = field(factory=dict)  # stack -> how many layers, and experts
    templates: dict[str, str] = field(factory=dict)  # stack -> what its tensors are called

    def of(self, entry: str) -> tuple[str, Shape, Shape] | None:
        """(name of the stack, place in it, its first dims) of a tensor or of a state of it. None: it is in none."""
        match = _STATE.match(entry)
        lead = match[0] if match is not None else ""
        place = self.places.get(entry.removeprefix(lead))
        return None if place is None else (lead + place.stack, place.at, self.counts[place.stack])


def is_of_a_layer(name: str) -> bool:
    """Whether a tensor is one layer's by its name, and not all layers'."""
    return _LAYER.fullmatch(name) is not None


def stacks_of(shapes: Mapping[str, Shape]) -> Stacks:
    """Stacks of tensors, by name, with their shapes; none where layers, or experts, differ."""
    out = Stacks()
    found: dict[str, dict[Shape, Shape]] = {}
    for name, shape in shapes.items():
        place = _place(name)
        if place is None:
            continue
        out.places[name] = place
        found.setdefault(place.stack, {})[place.at] = shape
        if out.templates.setdefault(place.stack, place.template) != place.template:
            return Stacks()
    layers = {at[0] for boxes in found.values() for at in boxes}
    for stack, boxes in found.items():
        counts = tuple(1 + max(at[d] for at in boxes) for d in range(len(next(iter(boxes)))))
        is_whole = len(boxes) == prod(counts) and len({len(at) for at in boxes}) == 1 and counts[0] == 1 + max(layers)
        if not is_whole or len(set(boxes.values())) > 1:
            return Stacks()
        out.counts[stack] = counts
    return out


def _place(name: str) -> _Place | None:
    match = _LAYER.fullmatch(name)
    if match is None:
        return None
    head, rest = match["head"], match["rest"]
    for own, saved in _SAVED.items():
        rest = saved + rest.removeprefix(own) if rest.startswith(own) else rest
    inner = _EXPERT.fullmatch(match["rest"]) if is_expert(name) else None
    if inner is None:
        return _Place(head + rest, f"{head}{{}}.{match['rest']}", (int(match["layer"]),))
    word = match["rest"][len(inner["head"]) : inner.start("expert")]  # what experts are in: `local_experts.`
    return _Place(
        f"{head}{inner['head']}experts.{inner['rest']}",
        f"{head}{{}}.{inner['head']}{word}{{}}.{inner['rest']}",
        (int(match["layer"]), int(inner["expert"])),
    )


def templates_of(checkpoint: Checkpoint) -> dict[str, str]:
    """Stack -> what its tensors are called as modules, of a folder that does not say it: Transformer Engine's blocks, or
    of Megatron-Core's own where the order of its optimizer's buckets or the run's arguments say so.
    """
    names = tuple(tensor.name for tensor in checkpoint.tensors)
    own = {saved: ours for ours, saved in _SAVED.items()} if _has_own_blocks(checkpoint) else {}
    out = {}
    for name in names:
        match = _STACK.fullmatch(name)
        if match is None:
            continue
        inner = _STACKED_EXPERTS.fullmatch(match["rest"]) if is_expert(name) else None
        rest = match["rest"] if inner is None else f"{inner['head']}local_experts.{{}}.{inner['rest']}"
        for saved, ours in own.items():
            rest = ours + rest.removeprefix(saved) if rest.startswith(saved) else rest
        out[name] = f"{match['head']}{{}}.{rest}"
    return out


def _has_own_blocks(checkpoint: Checkpoint) -> bool:
    """Whether a norm is a module of its own, which is registered before all others of its layer."""
    norm, out = (next((n for n, name in enumerate(checkpoint.registered) if name.endswith(end)), -1) for end in _ORDER)
    return norm < out if min(norm, out) >= 0 else arguments_in(checkpoint).get(_BLOCKS) == "local"


def in_modules(checkpoint: Checkpoint) -> Checkpoint:
    """A folder of Megatron-Core's as its modules have it: a tensor of each layer and expert, in order of registration, which
    no file of it says.
    """
    templates = templates_of(checkpoint)
    made = apart(checkpoint, templates)
    by_name = {tensor.name: tensor for tensor in made.tensors}
    is_fused = not any(map(is_own_norm, by_name))
    tensors = tuple(by_name[name] for name in registered(tuple(by_name), fused=is_fused))
    return evolve(made, tensors=tensors, is_apart=bool(templates))


def apart(checkpoint: Checkpoint, templates: Mapping[str, str]) -> Checkpoint:
    """A folder whose stacks are read as a tensor of each layer, and of each expert.

    templates: stack -> what its tensors are called. Chunks are of one layer, or made so.
    """
    shapes = {t.name: t.shape for t in checkpoint.tensors}
    # Of what has no elements, no file bounds how many layers there are.
    known = {stack: template for stack, template in templates.items() if prod(shapes.get(stack, (0,)))}
    extents: dict[tuple[str, Key], Extent] = {}
    for (file, key), extent in checkpoint.extents.items():
        entry = str(key[0])
        match = _STATE.match(entry)
        lead = match[0] if match is not None else ""
        template = known.get(entry.removeprefix(lead))
        if file != METADATA or template is None:
            extents[file, key] = extent
            continue
        count = template.count("{}")
        begin = tuple(int(step) for step in key[1:])
        for at, skipped in _cells(begin[:count], extent.shape[:count], extent.stride[:count]):
            made: Key = (lead + template.format(*at), *begin[count:])
            extents[file, made] = evolve(
                extent,
                key=made,
                shape=extent.shape[count:],
                stride=extent.stride[count:],
                offset=extent.offset + skipped,
            )

    def names_of(name: str) -> list[str]:
        if name not in known:
            return [name]
        leads = shapes[name][: known[name].count("{}")]
        return [known[name].format(*at) for at, _ in _cells((0,) * len(leads), leads, leads)]

    tensors = tuple(_parted(t, one, known) for t in checkpoint.tensors for one in names_of(t.name))
    envelope = checkpoint.envelope
    return evolve(
        checkpoint,
        extents=extents,
        tensors=tensors,
        envelope=evolve(
            envelope,
            groups=tuple(
                ParameterGroup(g.name, tuple(one for m in g.members for one in names_of(m)), g.hyper)
                for g in envelope.groups
            ),
            scalars={
                state: {one: value for name, value in values.items() for one in names_of(name)}
                for state, values in envelope.scalars.items()
            },
        ),
    )


def _parted(tensor: NamedTensor, name: str, known: Mapping[str, str]) -> NamedTensor:
    count = known[tensor.name].count("{}") if tensor.name in known else 0
    return evolve(tensor, name=name, shape=tensor.shape[count:])


def _cells(begin: Shape, size: Shape, stride: Shape) -> list[tuple[Shape, int]]:
    """Places in a box, and how many elements each is behind its first."""
    out: list[tuple[Shape, int]] = [((), 0)]
    for low, n, step in zip(begin, size, stride, strict=True):
        out = [((*at, low + i), skipped + i * step) for at, skipped in out for i in range(n)]
    return out
