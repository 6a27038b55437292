"""A target's optimizer states without payload.

At stage 0 they are one tensor per parameter, at stages 1 and 2 flat buffers, at stage 3 slices.
"""

from __future__ import annotations

from collections import OrderedDict
from math import prod
from typing import NoReturn

from ucpl.errors import Label, fail
from ucpl.extents import FlatBuffer, Global, Key, PickledCall
from ucpl.files.scalars import number_of
from ucpl.files.values import Value
from ucpl.formats.deepspeed import auto_ep
from ucpl.formats.deepspeed.config import loss_scale_numbers, loss_scaler, scaling_of
from ucpl.formats.deepspeed.names import state_in_file
from ucpl.formats.deepspeed.order import PlacedRun
from ucpl.formats.deepspeed.target import FORMAT_VERSION, FileBuilder, StepWriter, text_of
from ucpl.formats.run_steps import STEPS, optimizer_steps


def _states(writer: StepWriter, file: FileBuilder, key: Key, members: tuple[str, ...]) -> dict[str, object]:
    """The state_dict entry of one flat buffer or parameter, numbers first.

    torch's optimizers have this order.
    """
    out: dict[str, object] = {}
    for name, kept in writer.source.state.scalars.items():
        if not kept.keys().isdisjoint(members):
            out[state_in_file(name)] = writer.scalar(file, name, members)
    for name in writer.below.get((file.path, text_of(key)), {}):
        made = writer.tensor(file, (*key, name))
        if made is not None:
            out[state_in_file(name)] = made
    return out


def whole(writer: StepWriter, file: FileBuilder) -> dict[str, object] | None:
    """ZeRO-0's optimizer: numbered parameters, or a flat buffer per group."""
    here = _groups_here(writer, file)
    if not here:
        return None
    masters, flat = bool(writer.settings.get("masters")), bool(writer.settings.get("fused"))
    inner: Key = ("optimizer", "optimizer_state_dict", "state") if masters else ("optimizer", "state")
    state: dict[int, object] = {}
    groups: list[dict[str, object]] = []
    held: list[object] = []
    number = counted = 0
    trained = {name for _, members in writer.structure.groups for name in members}
    for g, members in here:
        if not members and writer.structure.groups[g][1]:
            _refuse_empty(writer, file, g)
        slots = [tuple(members)] if flat else [(name,) for name in members]
        ids = list(range(number, number + len(slots)))
        number += len(slots)
        groups.append({**_hyper(writer, file, g), "params": ids})
        key: Key = ("optimizer", "fp32_groups_flat" if flat else "fp32_groups", len(held))
        mine = [writer.tensor(file, key if flat else (*key, i), True) for i in range(len(slots))]
        held.append(mine[0] if flat else mine)
        for i, names in zip(ids, slots, strict=True):
            if names[0] in writer.empty and (states := _empty_states(writer, file, names[0])):
                state[i] = states
            if trained.isdisjoint(names):
                continue  # frozen: it has a number and no state
            if states := _states(writer, file, (*inner, counted), names):  # layouts count trained ones alone
                state[i] = states
            counted += 1
    base: dict[str, object] = {"state": state, "param_groups": groups}
    if not masters:
        return base
    numbers = file.storages.value(loss_scale_numbers({str(k): v for k, v in _scaling(writer).mapping().items()}))
    if not flat:
        return {**numbers, "optimizer_state_dict": base, "fp32_groups": held}
    return {
        **numbers,
        "optimizer_state_dict": base,
        "fp32_groups_flat": held,
        **({"clip_grad": 0.0} | clip_grad(writer)),
    }


def _empty_states(writer: StepWriter, file: FileBuilder, name: str) -> dict[str, object]:
    """States of a parameter without elements, in torch's order.

    Its numbers have the form of the others': torch adds 1 to the steps of all parameters at once, and these are tensors.
    """
    one = writer.empty[name]
    out: dict[str, object] = {}
    for state, number in one.numbers.items():
        alike = [n for n, value in writer.source.state.scalars.get(state, {}).items() if number_of(value) == number]
        out[state_in_file(state)] = writer.scalar(file, state, (alike[0],)) if alike else number
    return out | {state_in_file(state): file.storages.empty(dtype, one.shape) for state, dtype in one.states.items()}


def _groups_here(writer: StepWriter, file: FileBuilder) -> list[tuple[int, list[str]]]:
    """The groups' numbers, and their parameters on the current file's rank."""
    here = writer.numbered(file)
    groups = enumerate(writer.groups_numbered())
    return [(g, [name for name in members if writer.is_numbered(file, here, name)]) for g, members in groups]


def shard(writer: StepWriter, file: FileBuilder) -> dict[str, object]:
    state = _sliced(writer, file) if writer.stage == 3 else _flat(writer, file)
    return {
        "optimizer_state_dict": state,
        "ds_config": file.storages.value(writer.config),
        "ds_version": FORMAT_VERSION,
    }


def scaling(writer: StepWriter, file: FileBuilder) -> dict[str, object]:
    blobs = _scaling(writer)
    scaler = loss_scaler(blobs, blobs.find("ds_config"), bool(writer.settings.get("fp16")))
    dynamic = scaler.state.get("dynamic", False) is True if isinstance(scaler.state, dict) else False
    known = blobs.mapping()
    return {
        "loss_scaler": file.storages.value(scaler),
        "dynamic_loss_scale": known.get("dynamic_loss_scale", dynamic),
        "overflow": known.get("overflow", False),
    }


def _scaling(writer: StepWriter) -> Value:
    return scaling_of(writer.source, bool(writer.settings.get("fp16")))


def clip_grad(writer: StepWriter) -> dict[str, object]:
    """The clipping, if the source or its ds_config has it.

    Otherwise the loading engine keeps its own.
    """
    value = writer.blob("clip_grad", writer.config.get("gradient_clipping"))
    return {"clip_grad": value} if isinstance(value, (int, float)) else {}


def _flat(writer: StepWriter, file: FileBuilder) -> dict[str, object]:
    """A shard of stages 1 and 2."""
    if writer.stages > 1 and len(writer.flats) < len(writer.structure.groups):
        lacking = next(
            g for g, (name, _) in enumerate(writer.structure.groups) if name not in {f.group for f in writer.flats}
        )
        _refuse_empty(writer, file, lacking)
    if len(writer.flats) != len(writer.structure.groups):
        fail(
            "E471",
            f"stage {writer.stage} keeps one flat buffer a parameter group: {len(writer.structure.groups)} groups make "
            f"{len(writer.flats)}",
            Label(file.path),
        )
    is_bf16_optimizer = bool(writer.settings.get("bf16_optimizer"))
    out: dict[str, object] = {} if is_bf16_optimizer else scaling(writer, file)
    out |= clip_grad(writer)
    here: Key = ("optimizer_state_dict",)
    runs = [PlacedRun(flat.starts, flat.numel) for flat in writer.flats]
    if writer.settings.get("elastic"):
        out["base_optimizer_state"] = [
            _states(writer, file, (*here, "base_optimizer_state", g), flat.names) for g, flat in enumerate(writer.flats)
        ]
        # Without it DeepSpeed refuses to load; it saves it for optimizers alone that keep `step` in their groups.
        counted = optimizer_steps(writer.source.state)
        out["base_optimizer_state_step"] = max(counted, default=writer.blob(STEPS, 0))
    else:
        held = {
            g: _states(writer, file, (*here, "base_optimizer_state", "state", g), flat.names)
            for g, flat in enumerate(writer.flats)
        }
        check_whole_tensors(writer, file, held)
        out["base_optimizer_state"] = {
            "state": {g: state for g, state in held.items() if state},
            "param_groups": [{**_hyper(writer, file, g), "params": [g]} for g in range(len(writer.hypers))],
        }
    key: Key = (*here, "single_partition_of_fp32_groups")
    out["single_partition_of_fp32_groups"] = [
        writer.tensor(file, (*key, g), True) or file.storages.empty("f32", (0,), True) for g in range(len(runs))
    ]
    shared = [(*_cut(writer, flat), run) for flat, run in zip(writer.flats, runs, strict=True)]
    if is_bf16_optimizer:
        out["group_paddings"] = [
            run.part(ways) * ways - run.numel if place == ways - 1 else 0 for ways, place, run in shared
        ]
    else:
        out["zero_stage"] = stage_of(writer.stage)
        out["group_paddings"] = [run.part(ways) - run.lean(ways, place) for ways, place, run in shared]
        out["param_alignment_paddings"] = [_gaps(writer.saved(flat)) for flat in writer.flats]
    out["partition_count"] = [ways for ways, _, _ in shared]
    out["ds_version"] = FORMAT_VERSION
    out["param_slice_mappings"] = [
        _fragments(writer.saved(flat), place * run.part(ways), (place + 1) * run.part(ways))
        for flat, (ways, place, run) in zip(writer.flats, shared, strict=True)
    ]
    return out


def _refuse_empty(writer: StepWriter, file: FileBuilder, group: int) -> NoReturn:
    fail(
        "E471",
        f"stage {writer.here['pp']} of the pipeline holds no parameter of group {group}, and DeepSpeed keeps no empty one",
        Label(file.path),
        remedy="Deal the layers differently: give stages = [...] with pp.",
    )


def _sliced(writer: StepWriter, file: FileBuilder) -> dict[str, object]:
    """A shard of stage 3."""
    here: Key = ("optimizer_state_dict",)
    held = {
        s: _states(writer, file, (*here, "optimizer_state_dict", "state", s), writer.tensors_in(flat))
        for s, flat in enumerate(writer.flats)
    }
    groups = [
        {
            **_hyper(writer, file, g),
            "params": [s for s, flat in enumerate(writer.flats) if _group_of(writer, flat) == name],
        }
        for g, (name, _) in enumerate(writer.structure.groups)
    ]
    flats = [writer.tensor(file, (*here, "fp32_flat_groups", s), True) for s in range(len(writer.flats))]
    if None in flats:
        s = flats.index(None)
        fail("E471", f"the plan writes no masters of sub-group {s}", Label(file.path, where=f"fp32_flat_groups/{s}"))
    return {
        "zero_stage": stage_of(3),
        **scaling(writer, file),
        "partition_count": writer.dp,
        **_partition_groups(writer),
        "optimizer_state_dict": {
            "state": {s: state for s, state in held.items() if state},
            "param_groups": groups,
        },
        "fp32_flat_groups": flats,
    }


def _group_of(writer: StepWriter, flat: FlatBuffer) -> str:
    """The optimizer's group of a sub-group: `2` of `2.0` and `2.1`."""
    known = {name for name, _ in writer.structure.groups}
    return flat.group if flat.group in known else flat.group.rpartition(".")[0]


def _partition_groups(writer: StepWriter) -> dict[str, object]:
    """Stage 3 with AutoEP: the ranks that share each sub-group.

    An engine compares them with its own.
    """
    experts = writer.source.state.parallel.experts
    if experts is None or not experts.is_fused:
        return {}
    ep = int(writer.settings.get("ep") or 1)
    out: list[object] = []
    for s, flat in enumerate(writer.flats):
        is_ours = flat.cut == "edp"
        ways, place = _cut(writer, flat) if is_ours else (writer.dp, writer.here["dp"])
        ranks = [*range(writer.dp)]
        if is_ours:
            e = writer.here["ep"]
            ranks = [*range(e * ways, e * ways + ways)] if experts.is_data_first else [*range(e, writer.dp, ep)]
        out.append(
            {
                "sub_group": s,
                "partition_count": ways,
                "partition_rank": place,
                "partition_ranks": ranks,
                "families": ["autoep_expert" if is_ours else "replicated"],
                "group_names": [f"ep_size_{ep}" if is_ours else "replicated"],
            }
        )
    return {auto_ep.GROUPS: out}


def _cut(writer: StepWriter, flat: FlatBuffer) -> tuple[int, int]:
    """The number of ranks of a flat buffer, and this rank's number."""
    axis = flat.cut if flat.cut is not None and flat.cut in writer.here else "dp"
    return int(writer.settings.get(axis) or writer.dp), writer.here[axis]


def _hyper(writer: StepWriter, file: FileBuilder, g: int) -> dict[str, object]:
    """A group's hyper-parameters; a group of experts has its degree as name.

    torch's names of its parameters (`param_names`) are replaced by the current ones.
    """
    value = file.storages.value(writer.hypers[g])
    if "param_names" in value:
        named = writer.listed[g] if writer.stage else writer.groups_numbered()[g]
        value = {**value, "param_names": list(named)}
    if writer.source.state.parallel.experts is not None and value.get("moe") is True:
        value = {**value, "name": f"ep_size_{writer.settings.get('ep') or 1}"}
    return value


def stage_of(stage: int) -> PickledCall:
    """As DeepSpeed writes it: ZeroStageEnum(2)."""
    return PickledCall(Global("deepspeed.runtime.zero.config", "ZeroStageEnum"), (stage,))


def _gaps(flat: FlatBuffer) -> list[int]:
    """Padding behind each member: none behind the last."""
    ends = [start + prod(shape) for start, (_, shape) in zip(flat.starts, flat.members, strict=True)]
    return [after - end for after, end in zip((*flat.starts[1:], flat.numel), ends, strict=True)]


def _fragments(flat: FlatBuffer, low: int, high: int) -> OrderedDict[str, PickledCall]:
    """The place of each member's part inside the rank's part [low, high)."""
    out: OrderedDict[str, PickledCall] = OrderedDict()
    for start, (name, shape) in zip(flat.starts, flat.members, strict=True):
        first, last = max(start, low), min(start + prod(shape), high)
        if first < last:
            state = {"numel": last - first, "start": first - low}
            out[name] = PickledCall(
                Global("deepspeed.utils.tensor_fragment", "fragment_address"), new=True, state=state
            )
    return out


# ---- Muon at ZeRO-1 and 2 --------------------------------------------------------------------------------------------


STATE = "momentum_buffer"
_TRIED, _SHOWN = 64, 6  # degrees that are looked at for the remedy, and named


def check_whole_tensors(writer: StepWriter, file: FileBuilder, states: dict[int, dict[str, object]]) -> None:
    """Check that no part ends within a tensor that Muon trains.

    DeepSpeed would read its momentum differently. states: of each flat buffer. Raises: UcplError E471.
    """
    if _is_offloaded(writer.config):
        return
    for g, (flat, hyper) in enumerate(zip(writer.flats, writer.hypers, strict=True)):
        if hyper.get("use_muon") is not True or STATE not in states.get(g, {}):
            continue
        cut = _cut_within(flat, writer.dp)
        if cut is not None:
            fits = [str(dp) for dp in range(1, _TRIED) if _cut_within(flat, dp) is None][:_SHOWN]
            fail(
                "E471",
                f"dp = {writer.dp} cuts {cut}, which Muon trains: at ZeRO-1 and 2 DeepSpeed keeps its full momentum on each"
                " rank that has a part of it",
                Label(file.path, where=f"optimizer_state_dict/base_optimizer_state/state/{g}/{STATE}"),
                remedy=f"Choose zero3, or a dp that cuts no tensor of group {flat.group}: {', '.join(fits)}.",
            )


def _cut_within(flat: FlatBuffer, dp: int) -> str | None:
    """The first tensor that an end of a rank's part is within."""
    part = PlacedRun(flat.starts, flat.numel).part(dp)
    ends = {rank * part for rank in range(1, dp)}
    bounds = [
        *((start, start + prod(shape), name) for start, (name, shape) in zip(flat.starts, flat.members, strict=True))
    ]
    return next((name for low, high, name in bounds if any(low < end < high for end in ends)), None)


def _is_offloaded(config: dict[object, object]) -> bool:
    zero = config.get("zero_optimization")
    device = zero.get("offload_optimizer") if isinstance(zero, dict) else None
    return isinstance(device, dict) and device.get("device") == "cpu"
