"""Layers and experts as one tensor of all, or one tensor each.

Megatron-Core saves one tensor of all if layers are alike; modules have one each. A target is stacked if its tensors are
those of layers; common.pt then has the original names, so that reading restores them.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from math import prod

from attrs import evolve, field

from ucpl.extents import Extent, Key, NamedTensor, ParameterGroup
from ucpl.files.checkpoint import Checkpoint
from ucpl.formats.dcp.metadata import METADATA
from ucpl.formats.leaving import OPTIMIZER_VALUES, with_names
from ucpl.formats.megatron.groups import is_expert
from ucpl.formats.megatron.homes import core_of
from ucpl.formats.megatron.legacy_arguments import arguments_in
from ucpl.formats.megatron.orders import is_own_norm, registered
from ucpl.records import define, frozen

__all__ = [
    "Stacks",
    "apart",
    "blocks_of",
    "in_modules",
    "is_of_a_layer",
    "stacks_of",
    "stored_alone",
    "templates_of",
]

_LAYER = re.compile(r"(?P<head>(?:.*\.)?(?<!mtp\.)layers\.)(?P<layer>\d{1,9})\.(?P<rest>.+)", re.DOTALL)
# Layers of multi-token prediction, which Megatron-Core never stacks.
_AHEAD = re.compile(
    r"(?P<head>(?:.*\.)?mtp\.layers\.\d{1,9}\.(?:transformer_layer|mtp_model_layer)\.)(?P<rest>.+)", re.DOTALL
)
_EXPERT = re.compile(
    r"(?P<head>(?:.*\.)?experts\.)(?:"
    r"(?P<word>local_experts\.|experts\.)(?P<expert>\d{1,9})\.(?P<rest>.+)"
    r"|(?P<grouped>linear_fc[12]\.(?:weight|bias))(?P<number>\d{1,9}))",  # TEGroupedMLP's
    re.DOTALL,
)
_STACK = re.compile(r"(?P<head>(?:.*\.)?layers\.)(?!\d+\.)(?P<rest>.+)", re.DOTALL)
_STACKED_EXPERTS = re.compile(r"(?P<head>(?:.*\.)?experts\.)experts\.(?!\d+\.)(?P<rest>.+)", re.DOTALL)
_ONE_EXPERT = re.compile(r"(?P<head>(?:.*\.)?experts\.)experts\.(?P<rest>\d+\..+)", re.DOTALL)
_HALF = re.compile(r"(?P<whole>.*\.linear_fc1\.(?:weight|bias))_(?P<half>[wv])", re.DOTALL)
# Modules of Megatron-Core's own blocks have names that it saves under those of Transformer Engine's; not of latent attention.
_SAVED = {
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
}
_FIRST_NORM, _LATENT = "input_layernorm.weight", "self_attention.linear_kv_down_proj.weight"
_ORDER = ".linear_qkv.layer_norm_weight", ".self_attention.linear_proj.weight"
_BLOCKS = "transformer_impl"  # of a run's arguments
_STATE = re.compile(r"optimizer\.state\.[A-Za-z0-9_]+\.", re.DOTALL)

Shape = tuple[int, ...]


def stored_alone(names: Iterable[str]) -> list[str]:
    """Names of stacks, halves and single experts, which no module has."""
    forms = (_STACK, _STACKED_EXPERTS, _ONE_EXPERT, _HALF)
    return [name for name in names if any(form.fullmatch(name) for form in forms)]


@frozen
class _Place:
    stack: str
    template: str  # of the name, with {} for each number
    at: Shape  # layer, and expert where there is one


@define
class Stacks:
    """Tensors of modules and their stacks or saved names.

    A tensor is in a stack of all layers, in one of all experts of a layer, or has a saved name.
    """

    places: dict[str, _Place] = field(factory=dict)
    counts: dict[str, Shape] = field(factory=dict)  # stack -> how many layers, and experts
    templates: dict[str, str] = field(factory=dict)  # stack -> the names of its tensors

    def of(self, entry: str) -> tuple[str, Shape, Shape] | None:
        """(stack, place in it, its first dims) of a tensor or state.

        None: it is in no stack.
        """
        match = _STATE.match(entry)
        lead = match[0] if match is not None else ""
        place = self.places.get(entry.removeprefix(lead))
        return None if place is None else (lead + place.stack, place.at, self.counts[place.stack])

    def add(self, found: Mapping[str, _Place], shapes: Mapping[str, Shape]) -> None:
        """Add complete stacks.

        A tensor for each number, of equal shapes and names.
        """
        held: dict[str, dict[Shape, str]] = {}
        for name, place in found.items():
            held.setdefault(place.stack, {})[place.at] = name
        many = {place.stack: 0 for place in found.values()}
        for place in found.values():
            many[place.stack] += 1
        for stack, boxes in held.items():
            names = list(boxes.values())
            counts = tuple(1 + max(at[d] for at in boxes) for d in range(min(map(len, boxes))))
            is_whole = len(boxes) == prod(counts) == many[stack] and len({len(at) for at in boxes}) == 1
            is_whole &= stack not in shapes or stack in found
            one = {(found[name].template, shapes[name]) for name in names}
            if is_whole and len(one) == 1 and (names != [stack] or counts):
                self.places |= {name: found[name] for name in names}
                self.counts[stack], self.templates[stack] = counts, found[names[0]].template


def is_of_a_layer(name: str) -> bool:
    """Test whether a tensor's name is of one layer.

    Layers of multi-token prediction are never stacked.
    """
    return _LAYER.fullmatch(name) is not None


def stacks_of(shapes: Mapping[str, Shape], *, of_layers: bool = True) -> Stacks:
    """Megatron-Core's saved form of modules, by name, with shapes.

    If layers differ, each has names of its own. of_layers: tensors of all layers become one if the layers are alike.
    """
    own = _own_blocks(shapes)
    layers = {name: place for name in shapes if (place := _of_all_layers(name, own)) is not None} if of_layers else {}
    out, alike = Stacks(), Stacks()
    alike.add(layers, shapes)
    count = 1 + max((place.at[0] for place in layers.values()), default=0)
    if len(alike.places) == len(layers) and all(counts[0] == count for counts in alike.counts.values()):
        out = alike
    numbered = {name: _of_one_layer(name, own) for name in shapes if name not in out.places}
    out.add({name: place for name, place in numbered.items() if place is not None}, shapes)
    return out


def blocks_of(names: Collection[str]) -> dict[object, object]:
    """The run's argument for Megatron-Core's own blocks, if names show them.

    A folder loses other evidence with the stacks: the place of a norm among modules.
    """
    return {_BLOCKS: "local"} if _own_blocks(names) else {}


def _own_blocks(names: Collection[str]) -> set[str]:
    """Prefixes of layers that are Megatron-Core's own."""
    layers = {name.removesuffix(_FIRST_NORM) for name in names if name.endswith(_FIRST_NORM)}
    return {layer for layer in layers if layer + _LATENT not in names}


def _of_all_layers(name: str, own: set[str]) -> _Place | None:
    match = _LAYER.fullmatch(name)
    if match is None:
        return None
    head, rest = match["head"], _saved(match["rest"], f"{match['head']}{match['layer']}." in own)
    found = _of_expert(match["rest"]) if is_expert(name) else None
    if found is None:
        return _Place(head + rest, f"{head}{{}}.{match['rest']}", (int(match["layer"]),))
    stack, template, expert = found
    return _Place(head + stack, f"{head}{{}}.{template}", (int(match["layer"]), expert))


def _of_one_layer(name: str, own: set[str]) -> _Place | None:
    """A layer's tensor under its saved name.

    Experts under torch_dist's name are saved one by one, and stay so.
    """
    match = _LAYER.fullmatch(name)
    ahead = _AHEAD.fullmatch(name) if match is None else None
    if match is None and ahead is None:
        return None
    rest = match["rest"] if match is not None else ahead["rest"] if ahead is not None else ""
    head = name.removesuffix(rest)
    found = _of_expert(rest) if is_expert(name) and _ONE_EXPERT.fullmatch(rest) is None else None
    if found is None:
        saved = head + _saved(rest, head in own)
        return None if saved == name else _Place(saved, name, ())
    stack, template, expert = found
    return _Place(head + stack, head + template, (expert,))


def _of_expert(rest: str) -> tuple[str, str, int] | None:
    """(stack of all experts, their name, number) of one expert's tensor.

    rest: the name behind its layer.
    """
    match = _EXPERT.fullmatch(rest)
    if match is None:
        return None
    head = match["head"]
    if match["grouped"] is not None:
        return f"{head}experts.{match['grouped']}", f"{head}{match['grouped']}{{}}", int(match["number"])
    return f"{head}experts.{match['rest']}", f"{head}{match['word']}{{}}.{match['rest']}", int(match["expert"])


def _saved(rest: str, is_own: bool) -> str:
    """The saved form of a name behind its layer.

    is_own: of a block of Megatron-Core's own, whose norms are modules.
    """
    for own, saved in _SAVED.items() if is_own else ():
        if rest.startswith(own):
            return saved + rest.removeprefix(own)
    return rest


def templates_of(checkpoint: Checkpoint) -> dict[str, str]:
    """Tensor -> its name in modules, for a folder without these names.

    They are Transformer Engine's, or Megatron-Core's own if the order of the optimizer's buckets or the run's arguments
    show these. A {} is each number of a stack. Names of two halves become one name.
    """
    own = {saved: ours for ours, saved in _SAVED.items()} if _has_own_blocks(checkpoint) else {}
    out = {}
    for name in (tensor.name for tensor in checkpoint.state.tensors):
        match = _STACK.fullmatch(name)
        one = _LAYER.fullmatch(name) or _AHEAD.fullmatch(name) if match is None else None
        if match is None and one is None:
            continue
        head = (
            f"{match['head']}{{}}." if match is not None else name.removesuffix(one["rest"] if one is not None else "")
        )
        rest = match["rest"] if match is not None else one["rest"] if one is not None else ""
        if is_expert(name) and (inner := _STACKED_EXPERTS.fullmatch(rest)) is not None:
            rest = f"{inner['head']}local_experts.{{}}.{inner['rest']}"
        elif is_expert(name) and (inner := _ONE_EXPERT.fullmatch(rest)) is not None:
            rest = f"{inner['head']}local_experts.{inner['rest']}"
        for saved, ours in own.items():
            rest = ours + rest.removeprefix(saved) if rest.startswith(saved) else rest
        half = _HALF.fullmatch(rest)
        made = head + (half["whole"] if half is not None else rest)
        if made != name:
            out[name] = made
    return out


def _has_own_blocks(checkpoint: Checkpoint) -> bool:
    """Test whether a norm is a separate module, registered first."""
    norm, out = (
        next((n for n, name in enumerate(core_of(checkpoint).registered) if name.endswith(end)), -1) for end in _ORDER
    )
    return norm < out if min(norm, out) >= 0 else arguments_in(checkpoint).get(_BLOCKS) == "local"


def in_modules(checkpoint: Checkpoint) -> Checkpoint:
    """A folder of Megatron-Core in the form of its modules.

    It has a tensor of each layer and expert, in order of registration, which its files do not record.
    """
    templates = templates_of(checkpoint)
    made = apart(checkpoint, templates)
    by_name = {tensor.name: tensor for tensor in made.state.tensors}
    is_fused = not any(map(is_own_norm, by_name))
    tensors = tuple(by_name[name] for name in registered(tuple(by_name), fused=is_fused))
    own = evolve(core_of(made), is_unstacked=True) if templates else made.own
    return evolve(made, state=evolve(made.state, tensors=tensors), own=own)


def apart(checkpoint: Checkpoint, templates: Mapping[str, str]) -> Checkpoint:
    """A folder with its stacks as tensors of layers and experts.

    Halves of a gated linear_fc1 are one tensor. templates: stack -> the names of its tensors. Chunks are of one layer,
    or are cut so.
    """
    shapes = {t.name: t.shape for t in checkpoint.state.tensors}
    # A stack has elements, else no file bounds the number of layers, and a dim for each number in the names.
    known = {
        stack: template
        for stack, template in templates.items()
        if stack in shapes and len(shapes[stack]) >= template.count("{}") and prod(shapes[stack]) > 0
    }
    rows = {name: _rows_before(name, shapes, known) for name in known}
    extents: dict[tuple[str, Key], Extent] = {}
    for (file, key), extent in checkpoint.extents.items():
        entry = str(key[0])
        match = _STATE.match(entry)
        lead = match[0] if match is not None else ""
        name = entry.removeprefix(lead)
        template = known.get(name)
        if file != METADATA or template is None:
            extents[file, key] = extent
            continue
        count = template.count("{}")
        begin = tuple(int(step) for step in key[1:])
        for at, skipped in _cells(begin[:count], extent.shape[:count], extent.stride[:count]):
            inner = begin[count:]
            if rows[name]:
                inner = (inner[0] + rows[name], *inner[1:])
            made: Key = (lead + template.format(*at), *inner)
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

    tensors = tuple(
        _parted(t, one, known) for t in checkpoint.state.tensors if not rows.get(t.name) for one in names_of(t.name)
    )
    state = checkpoint.state
    blobs = {**state.blobs}
    if OPTIMIZER_VALUES in blobs:
        parts = {one: (t.name,) for t in state.tensors for one in names_of(t.name)}
        blobs[OPTIMIZER_VALUES] = with_names(blobs[OPTIMIZER_VALUES], parts, checkpoint.top)
    return evolve(
        checkpoint,
        extents=extents,
        state=evolve(
            state,
            tensors=tensors,
            blobs=blobs,
            groups=tuple(
                ParameterGroup(g.name, tuple(dict.fromkeys(one for m in g.members for one in names_of(m))), g.hyper)
                for g in state.groups
            ),
            scalars={
                called: {one: value for name, value in values.items() for one in names_of(name)}
                for called, values in state.scalars.items()
            },
        ),
    )


def _rows_before(name: str, shapes: Mapping[str, Shape], known: Mapping[str, str]) -> int:
    """The rows of a gated linear_fc1 before this half.

    Those of the gate.
    """
    match = _HALF.fullmatch(name)
    gate = f"{match['whole']}_w" if match is not None and match["half"] == "v" else ""
    is_one = known.get(gate) == known[name]
    return shapes[gate][known[gate].count("{}")] if is_one else 0


def _parted(tensor: NamedTensor, name: str, known: Mapping[str, str]) -> NamedTensor:
    count = known[tensor.name].count("{}") if tensor.name in known else 0
    shape = tensor.shape[count:]
    if tensor.name in known and _HALF.fullmatch(tensor.name) is not None and _HALF.fullmatch(name) is None:
        shape = (2 * shape[0], *shape[1:])
    return evolve(tensor, name=name, shape=shape)


def _cells(begin: Shape, size: Shape, stride: Shape) -> list[tuple[Shape, int]]:
    """Places in a box, and the number of elements before each."""
    out: list[tuple[Shape, int]] = [((), 0)]
    for low, n, step in zip(begin, size, stride, strict=True):
        out = [((*at, low + i), skipped + i * step) for at, skipped in out for i in range(n)]
    return out
