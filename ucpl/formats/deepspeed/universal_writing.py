"""A universal folder without payload: model states, states of parameters, shared values.

Cuts over tensor-parallel ranks are next to each tensor for the loader, and in lists of patterns. Source: deepspeed 0.19.8:
checkpoint/universal_checkpoint.py (`load_hp_checkpoint_state`), checkpoint/ds_to_universal.py (`merge_tp_slices`). The
loader cuts each part of a tensor as torch.chunk does, at any degree of the engine. AutoTP's layers have their own cuts,
and none are written.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import prod

from attrs import evolve

from ucpl.errors import Label, fail
from ucpl.extents import FlatBuffer, Global, PickledCall, Scalar, Sharding, StoredTensor, Structure, key_text
from ucpl.files.checkpoint import Checkpoint, Skeleton
from ucpl.files.groups import named_hyper
from ucpl.files.scalars import is_step
from ucpl.formats.deepspeed.model_states import model_states
from ucpl.formats.deepspeed.names import (
    ATOMS,
    GLOBAL_STATE,
    INFO,
    LATEST_UNIVERSAL,
    is_of_expert,
    is_taken,
    model_file,
    state_in_file,
)
from ucpl.formats.deepspeed.optimizer_states import clip_grad, scaling, stage_of
from ucpl.formats.deepspeed.target import FORMAT_VERSION, FileBuilder, Made, StepWriter, check_numbers, skeleton_of

VERSION = 0.4
_PARTS = Global("deepspeed.checkpoint.universal_checkpoint", "SubparamShape")
Cuts = Mapping[str, Sharding]


def skeleton(structure: Structure, targets: tuple[StoredTensor, ...], source: Checkpoint, tag: str | None) -> Skeleton:
    """All files of a universal folder. Raises: UcplError E470, E471."""
    _reject_experts(source)
    _reject_states(structure, source)
    check_numbers(structure.settings)
    stage = int(structure.settings.get("stage") or 1)
    # Stage 2 would ask for frozen parameters a second time, which no universal folder has.
    settings = {**structure.settings, "dp": 1, "tp": 1, "pp": 1, "stage": 3 if stage == 3 else 1}
    whole = evolve(structure, flats=_whole_flats(structure), settings=settings, shardings={})
    writer = StepWriter.of(whole, targets, source)
    cuts = cuts_of(writer, structure.shardings)
    files: Made = []
    for rank in range(int(structure.settings.get("files") or 1) if stage == 3 else 1):
        model = writer.file(model_file(stage, rank, 0))
        writer.turn_to(0, rank)
        value = model_states(writer, model, rank)
        value.setdefault(INFO, lists_of(cuts) if cuts else {"universal_checkpoint_version": VERSION})
        files.append((model, value))
    writer.turn_to(0, 0)
    shared = writer.file(GLOBAL_STATE)
    files.append((shared, _shared(writer, shared, stage)))
    files += _atoms(writer, cuts)
    if stage < 3:
        files += _numbers(writer)
    folder = tag or writer.folder
    return skeleton_of(folder if folder.endswith("_universal") else f"{folder}_universal", LATEST_UNIVERSAL, files)


def _reject_experts(source: Checkpoint) -> None:
    """Reject fused experts: the loader requests local numbers, equal on all ranks."""
    if source.state.parallel.experts is not None and source.state.parallel.experts.is_fused:
        fail(
            "E471",
            "a universal folder keeps AutoEP's experts of a layer as one tensor, and that is not written",
            Label(str(source.root)),
            remedy="zero1(dp=..., ep=...) or zero2(dp=..., ep=...): DeepSpeed loads it on those ranks",
        )
    apart = next((file for file in source.files if is_of_expert(file)), None)
    if apart is not None:
        fail(
            "E471",
            f"a universal folder has no place for experts such as those of {apart}: every rank would load the first ones",
            Label(str(source.root / apart)),
            remedy="zero1(...) or zero2(...), with ep = ...: DeepSpeed loads these plainly; or plain(), one file.",
        )


def _reject_states(structure: Structure, source: Checkpoint) -> None:
    """Reject states that the loader cannot read.

    It requests a tensor of the parameter's shape, and takes the state's name from the file.
    """
    known = {t.name for t in structure.tensors}
    why = {
        state: f"`{state_in_file(state)}` is a name of the parameter itself"
        for state in dict.fromkeys((*(s for t in structure.tensors for s in t.states), *source.state.scalars))
        if is_taken(state)
    }
    for state, held in source.state.scalars.items():
        for value in (value for name, value in held.items() if name in known):
            if not isinstance(value, int | float | Scalar):
                why.setdefault(state, _kind_of(value))
            elif isinstance(value, Scalar) and value.shape and not is_step(state, value.shape):
                why.setdefault(state, f"of another shape, {list(value.shape)}")
            elif state != "step":
                why.setdefault(state, _NUMBER)
    if why:
        keeps = "zero1(...), zero2(...) or plain(), which keep every state"
        is_needed = _NUMBER in why.values()  # an optimizer such as NAdam takes no step without its numbers
        fail(
            "E471",
            "DeepSpeed's loader requests a tensor of the parameter's shape from each file of a state, and other states are "
            + ", ".join(f"{state} ({reason})" for state, reason in why.items()),
            Label(str(source.root)),
            remedy=keeps if is_needed else f"leave them out: {' '.join(f'--drop {s}' for s in why)}; or {keeps}",
        )


_NUMBER = "a number"


def _kind_of(value: object) -> str:
    return "None" if value is None else f"a {type(value).__name__}"


def _whole_flats(structure: Structure) -> tuple[FlatBuffer, ...]:
    """Flat buffers of one rank, without cuts and padding.

    A group without trained parameters has none.
    """
    shapes = {t.name: t.shape for t in structure.tensors}
    flats = []
    for g, (name, members) in enumerate(group for group in structure.groups if group[1]):
        sizes = [prod(shapes[m]) for m in members]
        starts = [sum(sizes[:i]) for i in range(len(members))]
        flats.append(FlatBuffer(g, name, {}, tuple((m, shapes[m]) for m in members), tuple(starts), sum(sizes)))
    return tuple(flats)


def _atoms(writer: StepWriter, cuts: Cuts) -> Made:
    """A file for each state of each parameter: the remaining targets."""
    vocabulary = writer.source.state.parallel.vocabulary
    by_file: dict[str, list[int]] = {}
    for i, target in enumerate(writer.targets):
        if i not in writer.used:
            by_file.setdefault(target.file, []).append(i)
    files: Made = []
    for path, indices in by_file.items():
        (i, *more_of_it) = indices
        if more_of_it or not path.startswith(
            f"{ATOMS}/"
        ):  # of a module whose tensors the source has by other names by now
            fail(
                "E471",
                f"a universal folder of this source has no place for {key_text(writer.targets[i].key)} of {path}",
                Label(str(writer.source.root)),
            )
        file = writer.file(path)
        key = writer.targets[i].key
        made = writer.tensor(file, key, path.endswith("/fp32.pt"))
        name = path.removeprefix(f"{ATOMS}/").rpartition("/")[0]
        more = keys_of_cut(cuts.get(name), name in vocabulary) if key else {}
        files.append((file, {"param": made, **more} if key else made))
    return files


def _numbers(writer: StepWriter) -> Made:
    """A file for each number that an optimizer keeps of a parameter."""
    known = {t.name for t in writer.structure.tensors}
    files: Made = []
    for state, held in writer.source.state.scalars.items():
        for member in held:
            if member in known:
                file = writer.file(f"{ATOMS}/{member}/{state}.pt")
                files.append((file, writer.scalar(file, state, (member,))))
    return files


def _shared(writer: StepWriter, file: FileBuilder, stage: int) -> dict[str, object]:
    """zero/optimizer_state.pt, with the values that all parameters share."""
    # Numbers are those of groups that train something: DeepSpeed looks for the steps of number 0.
    held = [members for _, members in writer.structure.groups if members]
    numbers = iter(range(len(held)))
    params = [[next(numbers)] if members else [] for _, members in writer.structure.groups]
    groups = [
        {**named_hyper(file.storages.value(hyper), members), "params": mine}
        for hyper, mine, (_, members) in zip(writer.hypers, params, writer.structure.groups, strict=True)
    ]
    out = {
        **scaling(writer, file),
        **clip_grad(writer),
        "zero_stage": stage_of(stage),
        "ds_version": FORMAT_VERSION,
    }
    members = [m for _, ms in writer.structure.groups for m in ms]
    if stage == 3:
        state = {
            g: {name: writer.scalar(file, name, ms) for name in writer.source.state.scalars}
            for g, ms in enumerate(held)
        }
        out["partition_count"] = 1
        out["optimizer_state_dict"] = {
            "state": {g: {k: v for k, v in s.items() if v is not None} for g, s in state.items()},
            "param_groups": groups,
        }
    else:
        out["group_paddings"] = [0] * len(groups)
        out["partition_count"] = [1] * len(groups)
        out["param_alignment_paddings"] = [[0] * len(ms) for _, ms in writer.structure.groups]
    out["param_groups"] = groups
    assert members or not groups
    return out


# ---- cuts over tensor-parallel ranks ---------------------------------------------------------------------------------


def cuts_of(writer: StepWriter, stated: Cuts) -> dict[str, Sharding]:
    """The cuts of parameters in a model that cuts them itself.

    stated: by the layout of the source. Empty if AutoTP cuts them, or if no cut is known.
    """
    kept = writer.blob(INFO)
    is_autotp = isinstance(kept, dict) and bool({"affine_map", "sub_param_shard_widths"} & kept.keys())
    if is_autotp and writer.source.state.settings.get("tp_rule") is None:
        return {}
    known = {**writer.source.state.parallel.shardings, **stated}
    named = [t.name for t in writer.structure.tensors if t.kind != "buffer" and t.name in known]
    return {name: known[name] for name in named}


def keys_of_cut(cut: Sharding | None, is_vocabulary: bool) -> dict[str, object]:
    """The keys next to a tensor's `param`.

    cut: None if nothing is known; then rows are assumed.
    """
    out: dict[str, object] = {}
    if cut is None:
        out["cat_dim"] = 0
    elif cut.dim is not None:
        sizes = [section.size for section in cut.sections]
        if len(set(sizes)) == 1:
            out["cat_dim"] = cut.dim
        if len(sizes) > 1 and len(set(sizes)) == 1:
            out["param_n_sub_params"] = len(sizes)
        elif len(sizes) > 1:
            out["sub_param_shape"] = _parts(cut, "")
    if is_vocabulary:
        out["vocab_tensor"] = True
    return out


def _parts(cut: Sharding, pattern: str) -> PickledCall:
    fields = {"patterns": [pattern] if pattern else [], **_shape(cut)}
    return PickledCall(_PARTS, new=True, state=fields)


def _shape(cut: Sharding) -> dict[str, object]:
    shape: list[object] = list(cut.shape)
    assert cut.dim is not None
    shape[cut.dim] = tuple(section.size for section in cut.sections)
    return {"shape": tuple(shape), "partition_dim": cut.dim}


def lists_of(cuts: Cuts) -> dict[str, object]:
    """universal_checkpoint_info of models that cut their tensors themselves.

    Tensors outside all lists are cut by rows.
    """
    replicated: list[str] = []
    rows: list[str] = []
    halves: list[str] = []
    several: list[object] = []
    for name, cut in cuts.items():
        pattern = f"^{re.escape(name)}$"
        sizes = [section.size for section in cut.sections]
        if cut.dim is None:
            replicated.append(pattern)
        elif len(sizes) == 2 and sizes[0] == sizes[1] and cut.dim == 0:
            halves.append(pattern)
        elif len(sizes) > 1:
            several.append({"patterns": [pattern], **_shape(cut)})
        elif cut.dim == 1:
            rows.append(pattern)
    return {
        "universal_checkpoint_version": 0.2,  # later versions also have the widths of parts at one degree
        "tp_replicated_parameter_patterns": replicated,
        "parameter_with_row_parallelism_patterns": rows,
        "parameter_with_2_sub_params_cat_dim_0": halves,
        "parameter_with_sub_params": several,
    }
