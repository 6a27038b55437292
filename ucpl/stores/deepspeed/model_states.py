"""A target's files of model states, and those of layers and experts, before their tensors' bytes."""

from __future__ import annotations

from collections import OrderedDict
from math import prod
from typing import Any

from ucpl.errors import Label, fail
from ucpl.extents import NamedTensor, Size, TensorRef
from ucpl.stores.deepspeed.cuts import INFO, info_of
from ucpl.stores.deepspeed.optimizer_states import whole
from ucpl.stores.deepspeed.target import FORMAT_VERSION, TargetFile, Writer
from ucpl.stores.pickles import set_attributes


def model_states(writer: Writer, file: TargetFile, rank: int) -> dict[str, Any]:
    frozen = [t for t in writer.structure.tensors if t.kind == "frozen"]
    layers = writer.blob("layer_files")
    value: dict[str, Any] = {"module": _module(writer, file) if layers is None else None}
    on_stage = None if layers is None else _tensors_of_stage(writer)
    value["buffer_names"] = [n for n in writer.names if _is_buffer(writer, n) and (on_stage is None or n in on_stage)]
    value["optimizer"] = whole(writer, file) if writer.stage == 0 else None
    value["param_shapes"] = _param_shapes(writer) if writer.stage else None
    keeps_frozen = writer.stage >= 2
    empties = {name: Size(e["shape"]) for name, e in writer.empty.items() if not e["buffer"]}
    shapes = {t.name: Size(_local(writer, t)) for t in frozen} | empties
    in_order = [name for name in writer.names if name in shapes]
    value["frozen_param_shapes"] = OrderedDict((n, shapes[n]) for n in in_order) if keeps_frozen else None
    if writer.stage:
        is_first = rank == 0 and writer.tp == 0 and writer.here["pp"] == 0
        value["shared_params"] = dict(writer.structure.aliases) if is_first else {}
    else:
        value["shared_params"] = None
    fragments: OrderedDict[str, Any] | None = None
    if keeps_frozen:
        fragments = OrderedDict((name, _fragment(writer, file, name)) for name in in_order)
    value["frozen_param_fragments"] = fragments
    for key in ("lr_scheduler", "data_sampler", "random_ltd"):
        value[key] = file.storages.value(writer.blob(key))
    for key in ("skipped_steps", "global_steps", "global_samples"):
        value[key] = writer.blob(key, 0)
    value["dp_world_size"] = writer.dp
    value["mp_world_size"] = writer.stages * writer.degree
    value["checkpoint_parallel_dimensions"] = {"pp_degree": writer.stages, "tp_degree": writer.degree}
    value["ds_config"] = file.storages.value(writer.config)
    value["ds_version"] = FORMAT_VERSION
    if writer.source.experts is not None:
        value |= {"num_experts": writer.blob("num_experts"), "ds_autoep_layers": None}
    if (universal := _universal(writer)) is not None:
        value["universal_checkpoint_info"] = file.storages.value(universal)
    client: dict[str, Any] = file.storages.value(_client_state(writer, rank))
    return value | client


def _client_state(writer: Writer, rank: int) -> dict[str, Any]:
    """Each rank's own where both sides have a file a rank and as many ranks; else the first rank's for all."""
    callers = writer.source.caller_states
    if not callers.of:
        return writer.source.envelope.carried
    pp = writer.here["pp"] if callers.pp == writer.stages else 0
    tp = writer.tp if callers.tp == writer.degree else 0
    return callers.at(pp, tp, rank if writer.stage == 3 and callers.files == writer.dp else 0)


def _universal(writer: Writer) -> Any:
    """universal_checkpoint_info: as the model's class gave it, and with tensor parallelism what AutoTP says of the cuts."""
    kept = writer.blob(INFO)
    is_autotp = isinstance(kept, dict) and "tp_replicated_parameter_patterns" in kept
    if writer.degree == 1:
        is_of_ranks = isinstance(kept, dict) and bool({"affine_map", "sub_param_shard_widths"} & kept.keys())
        return None if is_of_ranks or (is_autotp and writer.source.shardings) else kept
    known = writer.structure.shardings
    parameters = [t.name for t in writer.structure.tensors if t.kind != "buffer"]
    if any(name not in known for name in parameters):
        return None  # cut in a way that has no name there
    return info_of({name: known[name] for name in parameters}, writer.degree, kept if is_autotp else {})


def _local(writer: Writer, tensor: NamedTensor) -> tuple[int, ...]:
    """A tensor's shape on this tensor-parallel rank."""
    known = writer.structure.shardings.get(tensor.name)
    return tensor.shape if known is None else known.local(writer.tp)


def _is_buffer(writer: Writer, name: str) -> bool:
    return (
        writer.kinds[name].kind == "buffer" if name in writer.kinds else bool(writer.empty.get(name, {}).get("buffer"))
    )


def _module(writer: Writer, file: TargetFile) -> OrderedDict[str, Any]:
    module: OrderedDict[str, Any] = OrderedDict()
    extra = writer.blob("module_extra") or {}
    experts = writer.source.experts
    for name in writer.names:
        if experts is not None and name in experts.of:
            continue  # in a file of its own
        if name in extra:
            module[name] = file.storages.value(extra[name])
            continue
        owner = writer.kinds.get(writer.structure.aliases.get(name, name))
        made = writer.tensor(file, ("module", name))
        if made is None and owner is not None and (writer.stage == 3 and owner.kind != "buffer"):
            made = file.storages.empty(owner.dtype)  # the values are in the shards and fragments
        if made is None and name in writer.empty:
            here = writer.empty[name]
            shape = (0,) if writer.stage == 3 and not here["buffer"] else tuple(here["shape"])
            made = file.storages.empty(here["dtype"], shape)
        if made is None and owner is not None and prod(owner.shape) == 0:
            made = file.storages.empty(owner.dtype, owner.shape)
        if made is None and owner is not None and name in writer.structure.aliases:
            module[name] = module.get(owner.name)  # one tensor under two names
            if module[name] is None:
                module[name] = writer.tensor(file, ("module", owner.name))
            continue
        if made is None:
            fail("E471", f"the plan writes no weight of {name}", Label(file.path, where=f"module/{name}"))
        module[name] = made
    set_attributes(module, file.storages.value(writer.blob("module_attributes")))
    return module


def parts(writer: Writer, file: TargetFile, names: list[str]) -> dict[str, Any]:
    """The file of one layer of a pipeline, or of one expert."""
    known = (writer.blob("layer_files") or {}).get(file.path)
    out: dict[str, Any] = {} if known is None else OrderedDict()
    for name in names if known is None else known["names"]:
        made = writer.tensor(file, (name,))
        if made is None and known is not None and name in known["empty"]:
            made = file.storages.empty(known["empty"][name]["dtype"], tuple(known["empty"][name]["shape"]))
        if made is None and known is not None and name in known["extra"]:
            out[name] = file.storages.value(known["extra"][name])
            continue
        if made is None:
            fail("E471", f"the plan writes no {name} of {file.path}", Label(file.path, where=name))
        out[name] = made
    if isinstance(out, OrderedDict) and known is not None:
        set_attributes(out, file.storages.value(known["attributes"]))
    return out


def _tensors_of_stage(writer: Writer) -> set[str]:
    """Tensors in files of layers on the stage whose file is being made."""
    assert writer.source.pipeline is not None
    names = {(x.file, local): tensor for x in writer.source.pipeline.layers for local, tensor in x.names}
    ranks = writer.dp * writer.degree  # of a stage
    return {
        names[t.file, str(t.key[0])]
        for t in writer.targets
        if t.rank // ranks == writer.here["pp"] and (t.file, str(t.key[0])) in names
    }


def _fragment(writer: Writer, file: TargetFile, name: str) -> TensorRef:
    made = writer.tensor(file, ("frozen_param_fragments", name))
    if made is not None:
        return made
    if name in writer.empty:
        return file.storages.empty(
            writer.empty[name]["dtype"], (0,) if writer.stage == 3 else tuple(writer.empty[name]["shape"])
        )
    fail("E471", f"the plan writes no fragment of the frozen {name}", Label(file.path, where=name))


def _param_shapes(writer: Writer) -> list[OrderedDict[str, Size]]:
    """Names are those of this rank's module: experts have local numbers there."""
    return [OrderedDict((writer.live(name), Size(shape)) for name, shape in flat.members) for flat in writer.flats]
