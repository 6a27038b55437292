"""Model states with experts from DeepSpeed before 0.19.4.

They lack param_shapes, ds_config and buffer_names. The optimizer's shards have `ds_config`, and in
`param_slice_mappings` the names of a group's parameters in the order of its flat buffer. Those are the parameters that
a rank has a part of, as far as the release records them: before 0.13 a rank divides the buffers of experts by all
data-parallel ranks, though fewer share them, so that only the first names are recorded. The others are those of the
experts' files, in their order, if only one choice fills the buffer. With round_robin_gradients the names are in the
order before the deal.

Read in deepspeed 0.9.5 to 0.19.8: runtime/engine.py (`_save_moe_checkpoint`), runtime/zero/stage_1_and_2.py
(`_link_all_hp_params`, `_create_param_mapping`).
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Mapping
from math import prod

from attrs import evolve

from ucpl.errors import Label, fail
from ucpl.extents import Extent, Size, TensorRef
from ucpl.files.pickles import tensors_of
from ucpl.files.torch_files import TorchFile, crc_of
from ucpl.files.values import Value
from ucpl.formats.deepspeed.names import StepFiles, expert_place, read_shard
from ucpl.formats.deepspeed.order import deal
from ucpl.formats.matching import Shape, Slots, Unclear, match
from ucpl.records import frozen

_STATE = "optimizer_state_dict"
_NAMES = "param_slice_mappings"
_DEGREE = re.compile(r"ep_size_(?P<ep>[0-9]{1,9})\Z")
_ADVICE = "Load the step in the DeepSpeed that wrote it and save it with 0.19.4 or later, or give a layout with --from."

_LEAST = 64  # elements; equal bytes of fewer can be equal by chance

Shapes = Mapping[str, Shape]


def restated(meta: TorchFile, optims: tuple[TorchFile, ...], listing: StepFiles, mp: int) -> TorchFile:
    """A rank's model states with the missing fields from its optimizer's shards.

    Raises: UcplError E455, E457.
    """
    first = Value.of(optims[0])
    held = Value.of(meta).at("module").named()
    dense = {name: value.held.shape for name, value in held if isinstance(value.held, TensorRef)}
    groups = _groups(optims, _Names(dense, _of_experts(first, listing, mp)))
    trained = [name for group in groups for name in group if name in dense]
    more: dict[object, object] = {
        "param_shapes": [OrderedDict((name, Size(shape)) for name, shape in group.items()) for group in groups]
    }
    more["shared_params"] = _second_names(meta, trained, [name for name in dense if name not in trained])
    for key in ("ds_config", "ds_version"):
        if (value := first.find(key)) is not None:
            for step, _ in tensors_of(value.held, first.file):
                value.at(*step).wrong("a value without tensors")
            more[key] = value.held
    return evolve(meta, value={**Value.of(meta).mapping(), **more})


@frozen(eq=False)
class _Names:
    """Parameters that a rank may train, with shapes, in the module's order."""

    dense: Shapes
    experts: Shapes  # by the numbers that a rank gives them

    def of(self, name: str, value: Value) -> Shape:
        shape = self.dense.get(name) or self.experts.get(name)
        if shape is None:
            value.wrong("the name of a tensor of the module, or of an expert")
        return shape


def _groups(optims: tuple[TorchFile, ...], names: _Names) -> list[dict[str, Shape]]:
    """The parameters of each group, in the order of its buffer."""
    stated: list[dict[str, Shape]] = []
    for part in optims:
        mappings = Value.of(part).at(_STATE).find(_NAMES)
        if mappings is None:
            fail(
                "E457",
                f"{part.file}: param_shapes and {_NAMES} do not name the parameters in the optimizer's buffers,"
                " as of experts before DeepSpeed 0.7",
                Label(str(part.path), where=_STATE),
                remedy=_ADVICE,
            )
        for g, group in enumerate(mappings.items()):
            stated += [{} for _ in range(g + 1 - len(stated))]
            stated[g] |= {name: names.of(name, value) for name, value in group.named() if name not in stated[g]}
    rooms = [_room(optims, g) for g in range(len(stated))]
    short = [g for g, room in enumerate(rooms) if _numel(stated[g]) < room]
    if short:
        for g, rest in zip(short, _fill(optims[0], names, stated, {g: rooms[g] for g in short}), strict=True):
            stated[g] |= rest
    if _is_dealt(Value.of(optims[0])):
        return [dict(deal([*group.items()], _count(optims, g))) for g, group in enumerate(stated)]
    return stated


def _second_names(meta: TorchFile, trained: list[str], rest: list[str]) -> dict[str, str]:
    """Second names: untrained tensors with the bytes of a trained one.

    Later releases save copies of them.
    """
    module = Value.of(meta).at("module")
    of = {name: meta.extent(("module", name), module.at(name).tensor()) for name in (*trained, *rest)}
    out = {}
    for name in (n for n in rest if of[n].numel >= _LEAST and of[n].is_contiguous):
        alike = [n for n in trained if _form(of[n]) == _form(of[name])]
        same = [n for n in alike if crc_of(meta.root, of[n]) == crc_of(meta.root, of[name])]
        if len(same) == 1:
            out[name] = same[0]
    return out


def _form(extent: Extent) -> tuple[object, ...]:
    return extent.dtype, extent.shape, extent.stride, extent.offset, extent.storage_bytes


def _numel(group: Shapes) -> int:
    return sum(map(prod, group.values()))


def _room(optims: tuple[TorchFile, ...], g: int) -> int:
    """Elements of a group's buffer without its padding."""
    stated = [Value.of(optim).at(_STATE).find("group_paddings") for optim in optims]
    paddings = [held.items()[g].whole() if held is not None else 0 for held in stated]
    first = Value.of(optims[0]).at(_STATE, "single_partition_of_fp32_groups").items()[g].tensor()
    count = _count(optims, g)  # each of the parts is on as many ranks as another
    return (prod(first.shape) + paddings[0]) * count - sum(paddings) * count // len(optims)


def _count(optims: tuple[TorchFile, ...], g: int) -> int:
    """The number of ranks over which a group's buffer is cut."""
    return Value.of(optims[0]).at(_STATE, "partition_count").items()[g].whole(1)


def _is_dealt(optim: Value) -> bool:
    """Test whether the run had round_robin_gradients."""
    config = optim.find("ds_config")
    zero = config.find("zero_optimization") if config is not None else None
    found = zero.find("round_robin_gradients") if zero is not None else None
    return found is not None and found.held is True


def _fill(
    file: TorchFile, names: _Names, stated: list[dict[str, Shape]], rooms: dict[int, int]
) -> list[dict[str, Shape]]:
    """The parameters that these groups have behind those that are stated."""
    known = {name for group in stated for name in group}
    experts = {g: any(name in names.experts for name in stated[g]) for g in rooms}
    rest = [(name, shape) for name, shape in {**names.dense, **names.experts}.items() if name not in known]
    slots = [
        Slots(room - _numel(stated[g]), lambda name, _, at, g=g: (name in names.experts) == experts[g])  # type: ignore[misc]
        for g, room in rooms.items()
    ]
    found = match(rest, slots, prod)
    if isinstance(found, Unclear):
        lacking = ", ".join(map(str, rooms))
        fail(
            "E457",
            f"{file.file}: {_NAMES} names some parameters of group {lacking} alone, as DeepSpeed before 0.13 does of experts,"
            f" and {'several choices' if found.is_several else 'no choice'} of the others would fill it",
            Label(str(file.path), where=f"{_STATE}/{_NAMES}"),
            remedy=_ADVICE,
        )
    shapes = dict(rest)
    return [{name: shapes[name] for name in group} for group in found]


def _of_experts(optim: Value, listing: StepFiles, mp: int) -> Shapes:
    """Tensors of the first rank's experts, by local numbers.

    These equal the global numbers of its files.
    """
    places = sorted((place, name) for name in listing.experts if (place := expert_place(name)) is not None)
    mine = [(place, name) for place, name in places if place[2] == mp]
    degree = _degree(optim)
    counts: dict[int, int] = {}
    for (layer, _, _), _ in mine:
        counts[layer] = counts.get(layer, 0) + 1
    out: dict[str, Shape] = {}
    for (layer, number, _), name in mine:
        if number < counts[layer] // degree:
            held = Value.of(read_shard(listing.root, name)).named()
            out |= {key: value.tensor().shape for key, value in held}
    return out


def _degree(optim: Value) -> int:
    """The number of ranks over which experts are dealt, by group names.

    A name is `ep_size_2`.
    """
    state = optim.at(_STATE).find("base_optimizer_state")
    groups = state.find("param_groups") if state is not None and isinstance(state.held, dict) else None
    names = [group.find("name") for group in groups.items()] if groups is not None else []
    found = {int(m["ep"]) for n in names if n is not None and isinstance(n.held, str) and (m := _DEGREE.match(n.held))}
    return max(1, *found) if found else 1
