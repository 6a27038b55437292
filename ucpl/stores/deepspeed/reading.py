"""A step's folder to a Checkpoint: every tensor's place, the orders that the files state, and what is not a tensor.

Authoritative: `param_shapes` for order and shapes (never `param_slice_mappings`, which are wrong under round robin).
Read in deepspeed 0.19.8: engine.py (`_common_checkpoint_state`, `_save_zero_checkpoint`), stage_1_and_2.py, stage3.py,
bf16_optimizer.py, fp16/unfused_optimizer.py, fp16/fused_optimizer.py (`state_dict` of each).

Not here: pipeline stages and experts, what DeepSpeed keeps in swap files, and how the parts of tensor-parallel ranks make up
whole tensors (tensor_parallel).
"""

from __future__ import annotations

import os
from collections import OrderedDict
from math import prod
from pathlib import Path
from typing import Any, NoReturn

from attrs import field, frozen, mutable

from ucpl.errors import Label, fail
from ucpl.extents import (
    DTYPES,
    Call,
    Envelope,
    Extent,
    Flat,
    Key,
    NamedTensor,
    ParameterGroup,
    Setting,
    TensorRef,
    key_text,
)
from ucpl.stores.carrying import lifted
from ucpl.stores.checkpoint import Checkpoint
from ucpl.stores.deepspeed.names import OWNED, RUN_KEYS, Listing, list_files
from ucpl.stores.deepspeed.order import (
    SUB_GROUP_DEFAULT,
    Run,
    Shape,
    alignment_elements,
    match,
    pack,
    run,
    slice_numel,
    undeal,
)
from ucpl.stores.pickles import attributes_of
from ucpl.stores.torch_files import TorchFile, read_torch_file

_COMPARED_BYTES_MAX = 1 << 20  # of a weight and its master, where ZeRO-0's order has to be found by content


@mutable
class _Found:
    """What is gathered while reading."""

    payload: dict[tuple[str, Key], Extent] = field(factory=dict)
    consumed: set[tuple[str, Key]] = field(factory=set)  # scalars and placeholders: neither payload nor carried
    states: dict[str, dict[str, None]] = field(factory=dict)  # parameter -> its states, in order
    scalars: dict[str, dict[str, Any]] = field(factory=dict)  # state -> parameter -> value
    scalar_extents: dict[str, dict[str, Extent]] = field(factory=dict)
    settings: dict[str, Setting] = field(factory=dict)
    blobs: dict[str, Any] = field(factory=dict)
    remarks: list[str] = field(factory=list)
    groups: list[ParameterGroup] = field(factory=list)
    stated: list[Flat] = field(factory=list)

    def set(self, name: str, value: int | str, origin: str) -> None:
        self.settings[name] = Setting(value, origin)


@frozen
class _Model:
    """The `module` of rank 0 by kinds of names."""

    file: TorchFile
    meta: dict[Any, Any]
    tensors: dict[str, TensorRef]  # in the module's order, aliases too
    buffers: frozenset[str]
    shapes: dict[str, Shape]  # of trained and frozen parameters and buffers, whole
    trained: tuple[str, ...]
    frozen: tuple[str, ...]
    aliases: dict[str, str]
    empty: dict[str, tuple[str, Shape]]  # tensors without elements: dtype and shape


def open_step(top: Path, root: Path, tag: str) -> Checkpoint:
    """Read all headers of one step. Raises: UcplError E400-E427, E45x, E46x."""
    listing = list_files(root)
    _refuse_parallel(listing)
    if not listing.models:
        fail("E452", f"{root} has no file of model states", Label(str(root)), Label(str(root / listing.files[0])))
    is_sliced = any(dp is not None for dp, _ in listing.models)  # stage 3
    mp_degree = 1 + max(mp for _, mp in (*listing.models, *listing.optims))
    first = listing.models.get((0, 0) if is_sliced else (None, 0))
    if first is None:
        missing = "zero_pp_rank_0_mp_rank_00_model_states.pt" if is_sliced else "mp_rank_00_model_states.pt"
        fail(
            "E452",
            f"{missing} is missing",
            Label(str(root / missing), "not there"),
            Label(str(root), "files of other ranks"),
        )
    file = read_torch_file(root, first)
    meta = _meta(file)
    if mp_degree > 1 or meta.get("mp_world_size", 1) != 1:
        from ucpl.stores.deepspeed.tensor_parallel import open_tensor_parallel

        return open_tensor_parallel(top, root, tag, listing)
    dp = _degree(listing, meta, file, is_sliced)
    files = {first: file}
    for (rank, _), name in listing.models.items():
        if name not in files:
            files[name] = read_torch_file(root, name)
            _meta(files[name])
            if rank is None:
                fail("E453", "two files hold model states of one rank", Label(str(root / name)))
    optims = [read_torch_file(root, listing.optims[rank, 0]) for rank in range(dp)] if listing.optims else []
    stage = _stage(optims, is_sliced)
    found = _Found()
    _settings(found, meta, file, listing, stage, dp, optims)
    model = _model(file, meta, stage)
    metas = [files[listing.models[rank, 0]] for rank in range(dp)] if is_sliced else [file]
    _model_payload(found, model, metas, stage, dp)
    # What the configuration makes of it at stages 1 and 2, whose own files are checked below.
    wide = max(
        (DTYPES[model.tensors[name].storage.dtype].itemsize for name in model.shapes if name not in model.buffers),
        default=4,
    )
    aligned = found.settings["parameter_alignment"]
    found.set("alignment", alignment_elements(wide) if aligned.value else 1, aligned.origin)
    if stage in (1, 2):
        _flat_shards(found, model, optims, dp)
    elif stage == 3:
        _sliced_shards(found, model, optims, metas, dp)
    else:
        _whole(found, model)
    ordered = (*metas, *optims)
    carried = {
        (part.file, extent.key): extent
        for part in ordered
        for extent in part.extents()
        if (place := (part.file, extent.key)) not in found.payload and place not in found.consumed
    }
    client = {
        part.file: {key: lifted(value, part.file) for key, value in part.value.items() if key not in OWNED}
        for part in metas
    }
    _blobs(found, model, optims)
    version = str(meta.get("ds_version", ""))
    envelope = Envelope(
        framework="deepspeed",
        version=version,
        settings=found.settings,
        groups=tuple(found.groups),
        scalars=found.scalars,
        blobs=found.blobs,
        carried=client[file.file],
    )
    return Checkpoint(
        top=top,
        root=root,
        tag=tag,
        framework="deepspeed",
        version=version,
        extents=found.payload,
        carried_extents=carried,
        envelope=envelope,
        tensors=_named(model, found),
        aliases=model.aliases,
        stated=tuple(found.stated),
        files=tuple(part.file for part in ordered),
        remarks=tuple(found.remarks),
        carry={
            "scalar_extents": found.scalar_extents,
            # client_state of each data-parallel rank, where each wrote a file (stage 3)
            "client_state": [client[part.file] for part in metas],
        },
    )


# ---- topology ------------------------------------------------------------------------------------------------------


def _not_yet(path: Path, why: str) -> NoReturn:
    fail("E457", f"this checkpoint is of a kind that is not read yet: {why}", Label(str(path)))


def _refuse_parallel(listing: Listing) -> None:
    old = [name for name in listing.optims.values() if "_optim_states" not in name]
    if old:
        _not_yet(listing.root / old[0], "its shards are named as before release 0.3.17")
    if listing.layers:
        _not_yet(listing.root / listing.layers[0], "its layers are in files of their own (PipelineModule)")
    if listing.experts:
        _not_yet(listing.root / listing.experts[0], "it has experts in files of their own (deepspeed.moe)")
    if (listing.root / "offloaded_tensors").is_dir():
        _not_yet(listing.root / "offloaded_tensors", "its optimizer state is in swap files (NVMe offload)")


def _degree(listing: Listing, meta: dict[Any, Any], file: TorchFile, is_sliced: bool) -> int:
    """The data-parallel degree, on which the names of files and `dp_world_size` must agree."""
    degree = meta.get("dp_world_size")
    if type(degree) is not int or degree < 1:
        _wrong(file, ("dp_world_size",), "a whole number")
    said = Label(str(file.path), f"dp_world_size is {degree}", where="dp_world_size")
    sets = [({rank for rank, _ in listing.optims}, "optim_states")] if listing.optims else []
    if is_sliced:
        sets.append(({rank for rank, _ in listing.models if rank is not None}, "model_states"))
        if not listing.optims:
            fail("E452", "no rank's optimizer shard is there", said, Label(str(listing.root)))
    names = {**{(r, "optim_states"): n for (r, _), n in listing.optims.items()}}
    names |= {(r, "model_states"): n for (r, _), n in listing.models.items() if r is not None}
    for ranks, what in sets:
        beyond = sorted(rank for rank in ranks if rank >= degree)
        if beyond:
            other = listing.root / names[beyond[0], what]
            fail("E454", f"dp rank {beyond[0]} has a file, but there are {degree} ranks", said, Label(str(other)))
        lacking = sorted(set(range(degree)) - ranks)
        if lacking:
            some = names[min(ranks), what]
            missing = some.replace(f"zero_pp_rank_{min(ranks)}_", f"zero_pp_rank_{lacking[0]}_")
            more = f" (and of {len(lacking) - 1} more ranks)" if len(lacking) > 1 else ""
            fail(
                "E452",
                f"{missing} is missing{more}: dp rank {lacking[0]} of {degree} has no {what}",
                Label(str(listing.root / missing), "not there"),
                said,
            )
    return degree


def _stage(optims: list[TorchFile], is_sliced: bool) -> int:
    stages: dict[int, TorchFile] = {}
    for part in optims:
        stages.setdefault(_stage_of(part), part)
    if len(stages) > 1:
        (one, a), (other, b) = sorted(stages.items())[:2]
        fail(
            "E456",
            f"shards of stage {one} and of stage {other} lie in one folder",
            Label(str(a.path), f"stage {one}"),
            Label(str(b.path), f"stage {other}"),
        )
    stage = next(iter(stages), 0)
    if (stage == 3) != is_sliced:
        where = Label(str(stages[stage].path), f"zero_stage {stage}") if stages else Label("", "no optimizer shard")
        fail("E456", f"optimizer shards of stage {stage} do not go with these model states", where)
    return stage


def _stage_of(part: TorchFile) -> int:
    """BF16_Optimizer states none: its shards are of stage 1."""
    state = _at(part, "optimizer_state_dict", dict)
    stage = state.get("zero_stage", 1)
    if type(stage) is Call and len(stage.args) == 1:  # ZeroStageEnum(2)
        stage = stage.args[0]
    if type(stage) is not int or stage not in (1, 2, 3):
        _wrong(part, ("optimizer_state_dict", "zero_stage"), "1, 2 or 3")
    return stage


# ---- checked access to values -----------------------------------------------------------------------------------------


def _wrong(part: TorchFile, key: Key, expected: str) -> NoReturn:
    fail(
        "E455",
        f"{part.file}: {key_text(key)} is not {expected}, which DeepSpeed would have written",
        Label(str(part.path), where=key_text(key)),
    )


def _meta(part: TorchFile) -> dict[Any, Any]:
    if not isinstance(part.value, dict) or "module" not in part.value:
        _wrong(part, ("module",), "there")
    if part.value["module"] is None:
        _not_yet(part.path, "its layers are in files of their own (PipelineModule)")
    meta: dict[Any, Any] = part.value
    return meta


def _at(part: TorchFile, path: str, kind: type[Any] | tuple[type[Any], ...]) -> Any:
    value: Any = part.value
    steps = tuple(path.split("/"))
    for n, step in enumerate(steps):
        if not isinstance(value, dict) or step not in value:
            _wrong(part, steps[: n + 1], "there")
        value = value[step]
    if not isinstance(value, kind):
        _wrong(part, steps, "of the form")
    return value


def _flag(value: Any) -> int:
    return 1 if value is True or value == 1 else 0


def _section(config: Any, *names: str) -> dict[Any, Any]:
    for name in names:
        if isinstance(config, dict) and isinstance(config.get(name), dict):
            section: dict[Any, Any] = config[name]
            return section
    return {}


# ---- settings --------------------------------------------------------------------------------------------------------


def _settings(
    found: _Found, meta: dict[Any, Any], file: TorchFile, listing: Listing, stage: int, dp: int, optims: list[TorchFile]
) -> None:
    config = meta.get("ds_config")
    origin = f"ds_config of {file.file}"
    zero = _section(config, "zero_optimization")
    bf16_section = _section(config, "bf16", "bfloat16")
    bf16 = _flag(bf16_section.get("enabled"))
    fp16 = _flag(_section(config, "fp16").get("enabled"))
    bf16_origin = origin
    if optims:
        by_name = int(listing.prefix == "bf16_")
        if bf16 != by_name and type(bf16_section.get("enabled")) is bool:
            fail(
                "E456",
                f"ds_config says bf16 is {'on' if bf16 else 'off'}, the optimizer shards' names say it is not",
                Label(str(file.path), f"bf16: {bf16_section.get('enabled')}", where="ds_config"),
                Label(str(optims[0].path)),
            )
        bf16, bf16_origin = by_name, f"name of {optims[0].file}"
    found.set("stage", stage, f"zero_stage of {optims[0].file}" if optims else "there are no optimizer shards")
    found.set(
        "dp",
        dp,
        f"dp_world_size of {file.file}, and the number of files" if optims else f"dp_world_size of {file.file}",
    )
    for axis in ("tp", "pp", "ep"):
        found.set(axis, 1, f"names of the files of {listing.root.name}")
    found.set("bf16", bf16, bf16_origin)
    found.set("fp16", fp16, origin)
    found.set("round_robin", _flag(zero.get("round_robin_gradients")), origin)
    size = zero.get("sub_group_size")
    if isinstance(size, (int, float)) and size >= 1 and size == int(size):
        found.set("sub_group_size", int(size), origin)
    else:
        found.set("sub_group_size", SUB_GROUP_DEFAULT, "DeepSpeed's default")
    accumulates_wide = _section(config, "data_types").get("grad_accum_dtype") in ("fp32", "float32")
    offloads = _section(zero, "offload_optimizer").get("device", "none") not in ("none", None) or _flag(
        zero.get("cpu_offload")
    )
    found.set("bf16_optimizer", int(bool(bf16 and accumulates_wide and not offloads)), origin)
    found.set("elastic", 0, "rigid: not elastic_checkpoint")
    optimizer = _section(config, "optimizer").get("type")
    if isinstance(optimizer, str):
        found.set("optimizer_class", optimizer, origin)
    found.set("parameter_alignment", _flag(zero.get("parameter_alignment")), origin)


# ---- the module ------------------------------------------------------------------------------------------------------


def _model(file: TorchFile, meta: dict[Any, Any], stage: int) -> _Model:
    module = _at(file, "module", dict)
    tensors = {name: value for name, value in module.items() if isinstance(value, TensorRef) and isinstance(name, str)}
    buffers = frozenset(meta.get("buffer_names") or ())
    groups = _param_shapes(file, meta.get("param_shapes"))
    trained = {name: shape for group in groups for name, shape in group.items()}
    if len(trained) < sum(len(group) for group in groups):
        fail("E456", "param_shapes names a parameter twice", Label(str(file.path), where="param_shapes"))
    frozen_shapes = {
        name: _shape(file, shape, ("frozen_param_shapes", name))
        for name, shape in (meta.get("frozen_param_shapes") or {}).items()
    }
    aliases = _aliases(file, meta, tensors, buffers, stage)
    shapes: dict[str, Shape] = {}
    frozen_names: list[str] = []
    empty: dict[str, tuple[str, Shape]] = {}
    unplaced = [name for name in (*trained, *frozen_shapes) if name not in tensors]
    for name in unplaced:
        if name in trained:
            fail(
                "E459",
                f"{name} is in param_shapes but not in the module",
                Label(str(file.path), where="param_shapes"),
                Label(str(file.path), where="module"),
            )
    for name, tensor in tensors.items():
        if name in aliases:
            continue
        known = trained.get(name, frozen_shapes.get(name))
        shape = tensor.shape if known is None else known
        if prod(shape) == 0 and (stage < 3 or name in buffers or known is not None):
            empty[name] = (tensor.storage.dtype, shape)
            continue
        if stage == 3 and known is None and name not in buffers:
            fail(
                "E459",
                f"{name} is in the module, but no file holds its values: it is in neither param_shapes nor frozen_param_shapes",
                Label(str(file.path), where=f"module/{name}"),
                remedy="Stage 3 saves no parameter that is neither in the optimizer nor frozen: freeze it and save again.",
            )
        if known is not None and stage < 3 and tensor.shape != known:
            fail(
                "E458",
                f"{name} has the shape {list(tensor.shape)} in the module and {list(known)} in param_shapes",
                Label(str(file.path), where=f"module/{name}"),
                Label(str(file.path), where="param_shapes"),
            )
        shapes[name] = shape
        if stage and name not in buffers and name not in trained:
            frozen_names.append(name)
            if stage == 2 and frozen_shapes and name not in frozen_shapes:
                fail(
                    "E459",
                    f"{name} is trained by no group of the optimizer, and not frozen either",
                    Label(str(file.path), where=f"module/{name}"),
                    remedy="Freeze it (requires_grad False) or give it to the optimizer, and save again.",
                )
    return _Model(file, meta, tensors, buffers, shapes, tuple(trained), tuple(frozen_names), aliases, empty)


def _param_shapes(file: TorchFile, stated: Any) -> list[dict[str, Shape]]:
    if stated is None:
        return []
    if not isinstance(stated, list) or not all(isinstance(group, dict) for group in stated):
        _wrong(file, ("param_shapes",), "a list of dicts")
    return [
        {name: _shape(file, shape, ("param_shapes", g, name)) for name, shape in group.items()}
        for g, group in enumerate(stated)
    ]


def _shape(file: TorchFile, value: Any, key: Key) -> Shape:
    if not isinstance(value, (tuple, list)) or not all(type(n) is int and n >= 0 for n in value):
        _wrong(file, key, "a shape")
    return tuple(value)


def _aliases(
    file: TorchFile, meta: dict[Any, Any], tensors: dict[str, TensorRef], buffers: frozenset[str], stage: int
) -> dict[str, str]:
    """Second names. Where `shared_params` is not stated (ZeRO-0, old releases): names of one place in one storage."""
    stated = meta.get("shared_params")
    if isinstance(stated, dict) and stage:
        for alias, owner in stated.items():
            if alias not in tensors or owner not in tensors:
                fail("E459", f"shared_params ties {alias} to {owner}, and the module lacks one", Label(str(file.path)))
        return dict(stated)
    if stage == 3:
        return {}
    owners: dict[Any, str] = {}
    aliases: dict[str, str] = {}
    for name, tensor in tensors.items():
        if name in buffers or prod(tensor.shape) == 0:
            continue
        place = (tensor.storage.name, tensor.offset, tensor.shape, tensor.stride, tensor.storage.dtype)
        if place in owners:
            aliases[name] = owners[place]
        else:
            owners[place] = name
    return aliases


def _model_payload(found: _Found, model: _Model, metas: list[TorchFile], stage: int, dp: int) -> None:
    fragments = model.meta.get("frozen_param_fragments")
    for rank, part in enumerate(metas):
        module = _at(part, "module", dict)
        if rank and [*module] != [*_at(metas[0], "module", dict)]:
            _differ(metas[0], part, "module", "names")
        if rank and part.value.get("param_shapes") != model.meta.get("param_shapes"):
            _differ(metas[0], part, "param_shapes", "parameters")
        for name, tensor in module.items():
            if not isinstance(tensor, TensorRef):
                continue
            place = (part.file, ("module", name))
            owner = model.aliases.get(name, name)
            if name in model.empty or prod(tensor.shape) == 0 or (stage == 3 and owner not in model.buffers):
                found.consumed.add(place)
            else:
                found.payload[place] = part.extent(place[1], tensor)
        for name, tensor in (part.value.get("frozen_param_fragments") or {}).items():
            place = (part.file, ("frozen_param_fragments", name))
            if not isinstance(tensor, TensorRef):
                _wrong(part, place[1], "a tensor")
            if name in model.empty or name not in model.shapes:
                found.consumed.add(place)
                continue
            expected: Shape = (slice_numel(model.shapes[name], dp),) if stage == 3 else model.shapes[name]
            if tensor.shape != expected:
                fail(
                    "E458",
                    f"the frozen {name} has the shape {list(tensor.shape)} here, expected {list(expected)}",
                    Label(str(part.path), where=key_text(place[1])),
                )
            found.payload[place] = part.extent(place[1], tensor)
    if stage == 3:
        lacking = [name for name in model.frozen if name not in (fragments or {})]
        if lacking:
            fail(
                "E459",
                f"the frozen {lacking[0]} has no fragment",
                Label(str(model.file.path), where="frozen_param_fragments"),
            )
    found.set("frozen_fragments", int(bool(fragments)), f"frozen_param_fragments of {model.file.file}")


def _differ(one: TorchFile, other: TorchFile, key: str, what: str) -> NoReturn:
    fail(
        "E456",
        f"{one.file} and {other.file} do not state the same {what}",
        Label(str(one.path), where=key),
        Label(str(other.path), where=key),
        remedy="They are of different runs or steps: copy all files of one step again.",
    )


def _named(model: _Model, found: _Found) -> tuple[NamedTensor, ...]:
    """The model's tensors in the module's order."""
    kinds = dict.fromkeys(model.frozen, "frozen")
    if found.groups:
        trained = {name for group in found.groups for name in group.members}
        kinds |= {name: "frozen" for name in model.shapes if name not in trained}
    kinds |= dict.fromkeys(model.buffers, "buffer")
    return tuple(
        NamedTensor(
            name,
            shape,
            model.tensors[name].storage.dtype,
            kinds.get(name, "parameter"),
            tuple(found.states.get(name, ())),
        )
        for name, shape in model.shapes.items()
    )


# ---- states: one value for each element, or one for the whole ---------------------------------------------------------


def _keep(found: _Found, part: TorchFile, key: Key, tensor: TensorRef) -> None:
    """A rank that holds padding alone saves masters without elements: layouts name them, too."""
    found.payload[part.file, key] = part.extent(key, tensor)


def _state(
    found: _Found,
    part: TorchFile,
    key: Key,
    state: dict[Any, Any],
    numels: tuple[Shape, ...],
    members: tuple[str, ...],
) -> None:
    """The states of one flat buffer (or, at stage 0, of one parameter): elementwise tensors or scalars."""
    for name, value in state.items():
        here = (*key, name)
        if not isinstance(name, str):
            _wrong(part, here, "a state with a name")
        if isinstance(value, TensorRef) and value.shape in numels and (value.shape or name != "step"):
            _keep(found, part, here, value)
            for member in members:
                found.states.setdefault(member, {})[name] = None
        elif isinstance(value, TensorRef) and value.shape == ():
            found.consumed.add((part.file, here))
            scalar = part.read_scalar(value)
            _scalar(found, part, here, name, scalar, members)
            extent = part.extent(here, value)
            kept = found.scalar_extents.setdefault(name, {})
            for member in members:
                kept.setdefault(member, extent)
        elif isinstance(value, (int, float, bool, str)) or value is None:
            _scalar(found, part, here, name, value, members)
        else:
            what = f"of shape {list(value.shape)}" if isinstance(value, TensorRef) else f"a {type(value).__name__}"
            fail(
                "E460",
                f"{part.file}: the state {name} is {what}: neither one value for each of {numels[0]} elements nor a number",
                Label(str(part.path), where=key_text(here)),
            )


def _scalar(found: _Found, part: TorchFile, key: Key, name: str, value: Any, members: tuple[str, ...]) -> None:
    kept = found.scalars.setdefault(name, {})
    for member in members:
        if member in kept and kept[member] != value:
            fail(
                "E456",
                f"ranks do not agree on {name} of {member}",
                Label(str(part.path), where=key_text(key)),
                remedy="They are of different steps: copy all files of one step again.",
            )
        kept[member] = value


def _hyper(part: TorchFile, group: dict[Any, Any]) -> dict[str, Any]:
    return {str(key): lifted(value, part.file) for key, value in group.items() if key != "params"}


# ---- stages 1 and 2 ----------------------------------------------------------------------------------------------------


def _flat_shards(
    found: _Found, model: _Model, optims: list[TorchFile], dp: int, only: frozenset[int] | None = None
) -> None:
    """Flat buffers of the groups `only` (None: all), which `dp` ranks share: `optims` are theirs, in order."""
    shapes = _param_shapes(model.file, model.meta.get("param_shapes"))
    is_plain_bf16 = "zero_stage" not in optims[0].value["optimizer_state_dict"]
    found.set("bf16_optimizer", int(is_plain_bf16), f"zero_stage of {optims[0].file}")
    alignment = _alignment(found, model, optims[0], shapes)
    found.set("alignment", alignment, found.settings["parameter_alignment"].origin)
    runs = [run([*group.values()], alignment) for group in shapes]
    bases = [_at(part, "optimizer_state_dict/base_optimizer_state", (dict, list)) for part in optims]
    elastic = isinstance(bases[0], list)
    found.set("elastic", int(elastic), f"base_optimizer_state of {optims[0].file}")
    for rank, (part, base) in enumerate(zip(optims, bases, strict=True)):
        if isinstance(base, list) != elastic:
            _differ(optims[0], part, "optimizer_state_dict/base_optimizer_state", "form")
        _partition_counts(part, dp, only)
        parts = _at(part, "optimizer_state_dict/single_partition_of_fp32_groups", list)
        if len(parts) != len(runs):
            fail(
                "E456",
                f"{part.file} holds {len(parts)} flat buffers, param_shapes states {len(runs)} groups",
                Label(str(part.path), where="optimizer_state_dict/single_partition_of_fp32_groups"),
                Label(str(model.file.path), where="param_shapes"),
            )
        for g, (flat, tensor) in enumerate(zip(runs, parts, strict=True)):
            if only is not None and g not in only:
                continue
            key: Key = ("optimizer_state_dict", "single_partition_of_fp32_groups", g)
            whole, lean = flat.part(dp), flat.lean(dp, rank)
            _flat(part, key, tensor, whole if is_plain_bf16 else lean, model)
            _keep(found, part, key, tensor)
            members = tuple(shapes[g])
            for member in members:
                found.states.setdefault(member, {})["fp32"] = None
            numel = lean if elastic else whole
            if elastic:
                where: Key = ("optimizer_state_dict", "base_optimizer_state", g)
                states = base[g] if g < len(base) else {}
            else:
                number = _ids(part, base, g)
                where = ("optimizer_state_dict", "base_optimizer_state", "state", number)
                states = base["state"].get(number, {})
            # A rank that holds padding alone has states without elements; a pad may stand where elastic lists have none.
            _state(found, part, where, states, ((numel,), (whole,)) if numel == 0 else ((numel,),), members)
    dealt = dp if found.settings["round_robin"].value and not is_plain_bf16 else 1
    hypers: list[dict[str, Any]]
    if elastic:
        hypers = _rates(model, len(shapes))
        found.remarks.append(
            "elastic_checkpoint keeps no hyper-parameters: weight decay, betas and the like are not in this checkpoint"
            + ("; learning rates are those of the schedule" if hypers[:1] != [{}] else ", nor are learning rates")
        )
        step = optims[0].value["optimizer_state_dict"].get("base_optimizer_state_step")
        if step is not None and "step" not in found.scalars:
            hypers = [{**hyper, "step": step} for hyper in hypers]
    else:
        hypers = [_hyper(optims[0], group) for group in bases[0]["param_groups"]]
        if len(hypers) != len(shapes):
            fail(
                "E456",
                f"the optimizer has {len(hypers)} parameter groups, param_shapes states {len(shapes)}",
                Label(str(optims[0].path), where="optimizer_state_dict/base_optimizer_state/param_groups"),
                Label(str(model.file.path), where="param_shapes"),
            )
    for g, (group, flat, hyper) in enumerate(zip(shapes, runs, hypers, strict=True)):
        if only is not None and g not in only:
            continue
        name = str(g)
        found.groups.append(ParameterGroup(name, undeal(tuple(group), dealt), hyper))
        found.stated.append(Flat(g, name, {}, tuple(group.items()), flat.starts, flat.numel, "dp"))


def _rates(model: _Model, count: int) -> list[dict[str, Any]]:
    """Learning rates of an elastic checkpoint's groups, from the schedule: nothing else keeps them."""
    schedule = model.meta.get("lr_scheduler")
    out: list[dict[str, Any]] = [{} for _ in range(count)]
    for key, name in (("_last_lr", "lr"), ("base_lrs", "initial_lr")):
        rates = schedule.get(key) if isinstance(schedule, dict) else None
        if isinstance(rates, list) and len(rates) == count and all(isinstance(rate, (int, float)) for rate in rates):
            for hyper, rate in zip(out, rates, strict=True):
                hyper[name] = rate
    return out


def _ids(part: TorchFile, base: dict[Any, Any], g: int) -> Any:
    key: Key = ("optimizer_state_dict", "base_optimizer_state", "param_groups", g)
    groups = base.get("param_groups")
    if not isinstance(groups, list) or not isinstance(base.get("state"), dict):
        _wrong(part, key[:2], "an optimizer's state_dict")
    if g >= len(groups) or not isinstance(groups[g], dict) or len(groups[g].get("params") or ()) != 1:
        _wrong(part, key, "a group of one flat buffer")
    return groups[g]["params"][0]


def _flat(part: TorchFile, key: Key, tensor: Any, numel: int, model: _Model) -> None:
    if not isinstance(tensor, TensorRef):
        _wrong(part, key, "a tensor")
    if tensor.shape != (numel,):
        fail(
            "E458",
            f"{part.file}: the flat buffer has {prod(tensor.shape)} elements, its parameters make {numel} here",
            Label(str(part.path), f"shape {list(tensor.shape)}", where=key_text(key)),
            Label(str(model.file.path), where="param_shapes"),
        )


def _partition_counts(part: TorchFile, dp: int, only: frozenset[int] | None = None) -> None:
    counts = _at(part, "optimizer_state_dict", dict).get("partition_count")
    if counts is None:
        return
    for g, count in enumerate(counts if isinstance(counts, list) else [counts]):
        if count != dp and (only is None or g in only):
            fail(
                "E454",
                f"{part.file} was written by {count} data-parallel ranks, the folder has files of {dp}",
                Label(str(part.path), f"partition_count {count}", where="optimizer_state_dict/partition_count"),
            )


def _alignment(found: _Found, model: _Model, part: TorchFile, shapes: list[dict[str, Shape]]) -> int:
    """The multiple that each parameter starts at: from parameter_alignment, checked against the paddings in the file."""
    stated = part.value["optimizer_state_dict"].get("param_alignment_paddings")
    alignment = 1
    if found.settings["parameter_alignment"].value and stated is not None:
        sizes = {DTYPES[model.tensors[next(iter(group))].storage.dtype].itemsize for group in shapes if group}
        if len({alignment_elements(size) for size in sizes}) > 1:
            _not_yet(part.path, "its groups are of several dtypes and aligned")
        alignment = alignment_elements(max(sizes, default=4))
    if stated is not None:
        expected = []
        for group in shapes:
            flat = run([*group.values()], alignment)
            ends = [start + prod(shape) for start, shape in zip(flat.starts, group.values(), strict=True)]
            expected.append([after - end for after, end in zip((*flat.starts[1:], flat.numel), ends, strict=True)])
        if stated != expected:
            fail(
                "E456",
                "param_alignment_paddings are not those that ds_config's parameter_alignment makes",
                Label(str(part.path), where="optimizer_state_dict/param_alignment_paddings"),
                Label(str(model.file.path), f"alignment {alignment}", where="ds_config/zero_optimization"),
            )
    return alignment


# ---- stage 3 -----------------------------------------------------------------------------------------------------------


def _sliced_shards(found: _Found, model: _Model, optims: list[TorchFile], metas: list[TorchFile], dp: int) -> None:
    shapes = _param_shapes(model.file, model.meta.get("param_shapes"))
    numels = [sum(slice_numel(shape, dp) for shape in group.values()) for group in shapes]
    for part in optims:
        state = _at(part, "optimizer_state_dict", dict)
        if "ds_zero_partition_groups" in state:
            _not_yet(part.path, "its experts are partitioned by groups of their own (AutoEP)")
        _partition_counts(part, dp)
        parts = _at(part, "optimizer_state_dict/fp32_flat_groups", list)
        base = _at(part, "optimizer_state_dict/optimizer_state_dict", dict)
        if len(parts) != len(shapes):
            fail(
                "E456",
                f"{part.file} holds {len(parts)} sub-groups, param_shapes states {len(shapes)}",
                Label(str(part.path), where="optimizer_state_dict/fp32_flat_groups"),
                Label(str(model.file.path), where="param_shapes"),
            )
        for s, tensor in enumerate(parts):
            key: Key = ("optimizer_state_dict", "fp32_flat_groups", s)
            _flat(part, key, tensor, numels[s], model)
            _keep(found, part, key, tensor)
            members = tuple(shapes[s])
            for member in members:
                found.states.setdefault(member, {})["fp32"] = None
            where: Key = ("optimizer_state_dict", "optimizer_state_dict", "state", s)
            _state(found, part, where, base["state"].get(s, {}), ((numels[s],),), members)
    groups = _at(optims[0], "optimizer_state_dict/optimizer_state_dict/param_groups", list)
    owner: dict[int, int] = {}
    for g, group in enumerate(groups):
        for s in group.get("params", ()):
            owner[s] = g
    if sorted(owner) != list(range(len(shapes))):
        fail(
            "E456",
            f"the optimizer's groups name the sub-groups {sorted(owner)}, param_shapes states {len(shapes)}",
            Label(str(optims[0].path), where="optimizer_state_dict/optimizer_state_dict/param_groups"),
            Label(str(model.file.path), where="param_shapes"),
        )
    for g, group in enumerate(groups):
        mine = [s for s in range(len(shapes)) if owner[s] == g]
        member_shapes = {name: shape for s in mine for name, shape in shapes[s].items()}
        found.groups.append(ParameterGroup(str(g), tuple(member_shapes), _hyper(optims[0], group)))
        size = found.settings["sub_group_size"]
        packed = pack([*member_shapes.values()], dp, int(size.value or 0))
        if packed != [len(shapes[s]) for s in mine]:
            fail(
                "E456",
                f"sub-groups of {[len(shapes[s]) for s in mine]} parameters are not what sub_group_size {size.value} makes",
                Label(str(model.file.path), "a list for each sub-group", where="param_shapes"),
                Label(str(model.file.path), f"{packed} parameters", where="ds_config/zero_optimization/sub_group_size"),
            )
    for s, held in enumerate(shapes):
        # Each parameter is padded and cut on its own: `starts` count whole parameters with their padding.
        starts, begin, end = [], 0, 0
        for shape in held.values():
            starts.append(begin)
            end = begin + prod(shape)
            begin += slice_numel(shape, dp) * dp
        found.stated.append(Flat(s, str(owner[s]), {}, tuple(held.items()), tuple(starts), end, "dp"))


# ---- stage 0 -----------------------------------------------------------------------------------------------------------


def _whole(found: _Found, model: _Model) -> None:
    """ZeRO-0: the optimizer's own state_dict; masters beside it in 16-bit training. It names no parameter."""
    optimizer = model.meta.get("optimizer")
    found.set("masters", 0, f"optimizer of {model.file.file}")
    if optimizer is None:
        found.remarks.append("there is no optimizer state: weights alone")
        return
    if not isinstance(optimizer, dict):
        _wrong(model.file, ("optimizer",), "a dict")
    if "fp32_groups_flat" in optimizer:
        _not_yet(model.file.path, "its masters are flat (FP16_Optimizer of a fused Adam without ZeRO)")
    base = optimizer.get("optimizer_state_dict") if "fp32_groups" in optimizer else optimizer
    inner: Key = ("optimizer", "optimizer_state_dict") if "fp32_groups" in optimizer else ("optimizer",)
    if (
        not isinstance(base, dict)
        or not isinstance(base.get("param_groups"), list)
        or not isinstance(base.get("state"), dict)
    ):
        _wrong(model.file, inner, "an optimizer's state_dict")
    masters = optimizer.get("fp32_groups")
    shapes = _shapes_by_group(model, base, masters, inner)
    names = _names_by_group(found, model, masters, shapes)
    found.set("masters", int(masters is not None), f"optimizer/fp32_groups of {model.file.file}")
    for g, group in enumerate(base["param_groups"]):
        found.groups.append(ParameterGroup(str(g), tuple(names[g]), _hyper(model.file, group)))
        for i, (number, name) in enumerate(zip(group["params"], names[g], strict=True)):
            if masters is not None:
                _keep(found, model.file, ("optimizer", "fp32_groups", g, i), masters[g][i])
                found.states.setdefault(name, {})["fp32"] = None
            state = base["state"].get(number, {})
            _state(found, model.file, (*inner, "state", number), state, (model.shapes[name],), (name,))


def _shapes_by_group(model: _Model, base: dict[Any, Any], masters: Any, inner: Key) -> list[list[Shape | None]]:
    """The shape of each numbered parameter, from its master or its states; None where it has neither."""
    out: list[list[Shape | None]] = []
    for g, group in enumerate(base["param_groups"]):
        numbers = group.get("params") if isinstance(group, dict) else None
        if not isinstance(numbers, list):
            _wrong(model.file, (*inner, "param_groups", g), "a parameter group")
        if masters is not None:
            if not isinstance(masters, list) or len(masters) <= g or len(masters[g]) != len(numbers):
                _wrong(model.file, ("optimizer", "fp32_groups"), "a master for each parameter")
            out.append([master.shape for master in masters[g]])
            continue
        shapes: list[Shape | None] = []
        for number in numbers:
            states = base["state"].get(number, {})
            shapes.append(next((v.shape for v in states.values() if isinstance(v, TensorRef) and v.shape), None))
        out.append(shapes)
    return out


def _names_by_group(found: _Found, model: _Model, masters: Any, groups: list[list[Shape | None]]) -> list[list[str]]:
    names = [(name, shape) for name, shape in model.shapes.items() if name not in model.buffers]
    names_or_ways = match(names, groups)
    how = "shapes, in the module's order"
    if names_or_ways == 2 and masters is not None:
        contents = _Contents(model, masters)
        names_or_ways = match(names, groups, contents.agree)
        how = "shapes and values of the masters, in the module's order"
    if isinstance(names_or_ways, int):
        several = "several ways" if names_or_ways else "no way"
        fail(
            "E461",
            f"ZeRO-0 numbers the optimizer's parameters and names none: there is {several} to match them to the module's",
            Label(
                str(model.file.path), f"groups of {[len(g) for g in groups]} parameters", where="optimizer/param_groups"
            ),
            Label(str(model.file.path), f"{len(names)} parameters", where="module"),
        )
    found.set("parameter_order", how, f"optimizer of {model.file.file} names no parameter")
    return names_or_ways


class _Contents:
    """Whether a weight is its master, rounded to nearest even: tells parameters of one shape apart."""

    def __init__(self, model: _Model, masters: Any) -> None:
        self._model = model
        self._masters = masters
        self._memo: dict[tuple[str, int, int], bool] = {}
        self._read_memo: dict[Any, bytes] = {}

    def agree(self, name: str, g: int, i: int) -> bool:
        key = (name, g, i)
        if key not in self._memo:
            self._memo[key] = self._compare(self._model.tensors[name], self._masters[g][i])
        return self._memo[key]

    def _compare(self, weight: TensorRef, master: TensorRef) -> bool:
        import numpy as np

        a, b = self._read(weight), self._read(master)
        wide = np.frombuffer(b, dtype="<f4")
        match weight.storage.dtype:
            case "f32":
                return a == b
            case "bf16":
                bits = wide.view("<u4").astype(np.uint64)
                rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")
            case "f16":
                with np.errstate(over="ignore"):
                    rounded = wide.astype("<f2").view("<u2")
            case _:
                return True
        held = min(len(a) // 2, len(rounded))
        return bool((np.frombuffer(a, dtype="<u2")[:held] == rounded[:held]).all())

    def _read(self, tensor: TensorRef) -> bytes:
        extent = self._model.file.extent((), tensor)
        if extent not in self._read_memo:
            itemsize = DTYPES[extent.dtype].itemsize
            size = min(extent.numel, _COMPARED_BYTES_MAX // 4) * itemsize
            if not extent.is_contiguous:
                size = 0
            with self._model.file.path.open("rb") as file:
                self._read_memo[extent] = os.pread(file.fileno(), size, extent.storage_start + extent.offset * itemsize)
        return self._read_memo[extent]


# ---- what is not a tensor ------------------------------------------------------------------------------------------------


def _blobs(found: _Found, model: _Model, optims: list[TorchFile]) -> None:
    blobs = found.blobs
    file = model.file.file
    for key in (*RUN_KEYS, "ds_config", "ds_version", "universal_checkpoint_info", "num_experts"):
        if model.meta.get(key) is not None:
            blobs[key] = lifted(model.meta[key], file)
    module = model.meta["module"]
    blobs["module_names"] = [*module]  # the module's own order, aliases in their places
    extra = {name: lifted(value, file) for name, value in module.items() if not isinstance(value, TensorRef)}
    if extra:
        blobs["module_extra"] = extra
    if isinstance(module, OrderedDict) and (attributes := attributes_of(module)):
        blobs["module_attributes"] = lifted(attributes, file)
    if model.empty:
        blobs["empty_tensors"] = {
            name: {"dtype": dtype, "shape": list(shape), "buffer": name in model.buffers}
            for name, (dtype, shape) in model.empty.items()
        }
    if optims:
        state = optims[0].value["optimizer_state_dict"]
        for key in ("loss_scaler", "dynamic_loss_scale", "overflow", "clip_grad"):
            if key in state:
                blobs[key] = lifted(state[key], optims[0].file)
    elif isinstance(model.meta.get("optimizer"), dict):
        scale = {
            key: value
            for key, value in model.meta["optimizer"].items()
            if key not in ("optimizer_state_dict", "fp32_groups", "state", "param_groups")
        }
        if scale:
            blobs["loss_scale_config"] = lifted(scale, file)


__all__ = ["open_step", "Run"]
