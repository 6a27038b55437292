"""A target's files of model states, layers and experts, without payload."""

from __future__ import annotations

from collections import OrderedDict
from math import prod

from ucpl.errors import Label, fail
from ucpl.extents import NamedTensor, Size, Structure, TensorRef
from ucpl.files.checkpoint import Checkpoint
from ucpl.files.pickles import set_attributes
from ucpl.files.values import Empty
from ucpl.formats.deepspeed import auto_ep
from ucpl.formats.deepspeed.config import blobs_of
from ucpl.formats.deepspeed.cuts import info_of
from ucpl.formats.deepspeed.names import INFO, is_of_expert, layer_place
from ucpl.formats.deepspeed.optimizer_states import whole
from ucpl.formats.deepspeed.target import FORMAT_VERSION, FileBuilder, StepWriter


def model_states(writer: StepWriter, file: FileBuilder, rank: int) -> dict[object, object]:
    frozen = [t for t in writer.structure.tensors if t.kind == "frozen"]
    has_layers = writer.has_layers
    value: dict[object, object] = {"module": None if has_layers else _module(writer, file)}
    here = writer.of_stage() if has_layers else {n for n in writer.names if writer.is_on_stage(file, n)}
    value["buffer_names"] = [n for n in writer.names if _is_buffer(writer, n) and n in here]
    value["optimizer"] = whole(writer, file) if writer.stage == 0 else None
    value["param_shapes"] = _param_shapes(writer) if writer.stage else _numbered_shapes(writer, file)
    empties = {name: Size(e.shape) for name, e in writer.empty.items() if not e.buffer}
    shapes = {t.name: Size(_local(writer, t)) for t in frozen} | empties
    in_order = [name for name in writer.names if name in shapes]
    # An engine asks a dict for everything that is frozen in it: there is none where nothing says that all of it is stored,
    # and no None, which would say that it was excluded, where nothing says that (stage 1 states neither).
    stated = writer.source.state.settings.get("frozen_fragments")
    keeps_frozen = writer.stage >= 2 and (bool(in_order) or (stated is not None and stated.value == 1))
    says_nothing = writer.stage >= 2 and not keeps_frozen and stated is None and not writer.left_out
    value["frozen_param_shapes"] = OrderedDict((n, shapes[n]) for n in in_order) if keeps_frozen else None
    if writer.stage:
        is_first = rank == 0 and writer.tp == 0 and writer.here["pp"] == 0
        left_out = {name: one.owner for name, one in writer.left_out.items() if one.owner is not None}
        aliases = auto_ep.without_routers(writer.structure.aliases, writer.source.state.parallel.experts)
        value["shared_params"] = {**aliases, **left_out} if is_first else {}
    else:
        value["shared_params"] = None
    fragments: OrderedDict[str, object] | None = None
    if keeps_frozen:
        fragments = OrderedDict((name, _fragment(writer, file, name)) for name in in_order)
    value["frozen_param_fragments"] = fragments
    if says_nothing:
        del value["frozen_param_shapes"], value["frozen_param_fragments"]
    for key in ("lr_scheduler", "data_sampler", "random_ltd"):
        value[key] = file.storages.value(writer.blob(key))
    value |= writer.counters()
    value["dp_world_size"] = writer.dp
    value["mp_world_size"] = writer.stages * writer.degree
    value["checkpoint_parallel_dimensions"] = {"pp_degree": writer.stages, "tp_degree": writer.degree}
    value["ds_config"] = file.storages.value(writer.config)
    value["ds_version"] = FORMAT_VERSION
    if writer.source.state.parallel.experts is not None:
        value |= {"num_experts": _num_experts(writer), auto_ep.LAYERS: _auto_ep_layers(writer)}
    universal = info_for(writer.source, writer.structure, writer.degree)
    if isinstance(universal, dict) and auto_ep.LAYERS in universal:
        universal = {**universal, auto_ep.LAYERS: value.get(auto_ep.LAYERS)}
    if universal is not None:
        value["universal_checkpoint_info"] = file.storages.value(universal)
    return value | file.storages.value(_client_state(writer, rank))


def _client_state(writer: StepWriter, rank: int) -> dict[object, object]:
    """The rank's own client_state if ranks match, otherwise the first rank's.

    Ranks match if both sides have one file per rank, and equally many.
    """
    callers = writer.source.state.parallel.carried_by_rank
    if not callers.of:
        return writer.source.state.carried
    at, degrees = (writer.here["pp"], writer.tp, rank), (writer.stages, writer.degree, writer.files)
    return callers.of[callers.number(at, degrees)]


def info_for(source: Checkpoint, structure: Structure, degree: int) -> object:
    """universal_checkpoint_info: the class's own, or AutoTP's cuts with tensor parallelism."""
    kept, rule = source.state.blobs.get(INFO), source.state.settings.get("tp_rule")
    autotp = kept if isinstance(kept, dict) and "tp_replicated_parameter_patterns" in kept else {}
    if degree == 1 and rule is None:
        is_of_ranks = isinstance(kept, dict) and bool({"affine_map", "sub_param_shard_widths"} & kept.keys())
        return None if is_of_ranks or (autotp and source.state.parallel.shardings) else kept
    if rule is not None and (kept is not None or degree == 1):
        return kept  # the model's own lists of patterns, which hold at any degree
    known = structure.shardings
    parameters = [t.name for t in structure.tensors if t.kind != "buffer"]
    if any(name not in known for name in parameters):
        return None  # cut in a way that has no name there
    return info_of({name: known[name] for name in parameters}, degree, autotp)


def _local(writer: StepWriter, tensor: NamedTensor) -> tuple[int, ...]:
    """A tensor's shape on this tensor-parallel rank."""
    known = writer.structure.shardings.get(tensor.name)
    return tensor.shape if known is None else known.local(writer.tp)


def _is_buffer(writer: StepWriter, name: str) -> bool:
    if name in writer.kinds:
        return writer.kinds[name].kind == "buffer"
    return name in writer.empty and writer.empty[name].buffer


def _module(writer: StepWriter, file: FileBuilder) -> OrderedDict[str, object]:
    module: OrderedDict[str, object] = OrderedDict()
    kept = writer.blob("module_extra")
    extra = kept if isinstance(kept, dict) else {}
    experts = writer.source.state.parallel.experts
    for name in writer.names:
        if experts is not None and name in experts.of:
            continue  # in a file of its own
        if not writer.is_on_stage(file, name):
            continue
        if name in extra:
            module[name] = file.storages.value(extra[name])
            continue
        if name in writer.left_out:
            if (stays := _left_behind(writer, file, name)) is not None:
                module[name] = stays
            continue
        owner = writer.kinds.get(writer.structure.aliases.get(name, name))
        made = writer.tensor(file, ("module", name))
        if made is None and owner is not None and (writer.stage == 3 and owner.kind != "buffer"):
            made = file.storages.empty(owner.dtype)  # the values are in the shards and fragments
        if made is None and name in writer.empty:
            here = writer.empty[name]
            made = file.storages.empty(here.dtype, (0,) if writer.stage == 3 and not here.buffer else here.shape)
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
    attributes = blobs_of(writer.source).find("module_attributes")
    set_attributes(module, None if attributes is None else file.storages.value(attributes.mapping()))
    return module


def _left_behind(writer: StepWriter, file: FileBuilder, name: str) -> object:
    """The module's entry of a parameter that is not stored.

    It is the value under a second name, or at stage 3 a placeholder.
    """
    one = writer.left_out[name]
    if one.value is not None and (writer.stage < 3 or one.owner is None):
        return file.storages.value(one.value)
    return file.storages.empty(one.dtype) if writer.stage == 3 else None


def parts(writer: StepWriter, file: FileBuilder, names: list[str]) -> dict[str, object]:
    """The file of one layer of a pipeline, or of one expert."""
    layers = blobs_of(writer.source).find("layer_files") if writer.source.state.parallel.pipeline is not None else None
    known = layers.find(layer_place(file.path)[1]) if layers is not None and not is_of_expert(file.path) else None
    if known is None:
        return {name: _needed(file, name, writer.tensor(file, (name,))) for name in names}
    empty, extra, attributes = known.find("empty"), known.find("extra"), known.find("attributes")
    out: OrderedDict[str, object] = OrderedDict()
    for name in known.at("names").texts():
        made = writer.tensor(file, (name,))
        noted = empty.find(name) if empty is not None and made is None else None
        if noted is not None:
            one = Empty.of(noted)
            made = file.storages.empty(one.dtype, one.shape)
        if made is None and extra is not None and name in extra.mapping():
            out[name] = file.storages.value(extra.mapping()[name])
        else:
            out[name] = _needed(file, name, made)
    set_attributes(out, file.storages.value(attributes.mapping()) if attributes is not None else None)
    return out


def _needed(file: FileBuilder, name: str, made: TensorRef | None) -> TensorRef:
    if made is None:
        fail("E471", f"the plan writes no {name} of {file.path}", Label(file.path, where=name))
    return made


def _num_experts(writer: StepWriter) -> object:
    """The number of experts of each layer on this stage."""
    kept, experts = writer.blob("num_experts"), writer.source.state.parallel.experts
    if experts is None or (writer.stages == 1 and writer.source.state.parallel.pipeline is None):
        return kept
    held = {
        experts.of[str(t.key[0])].module
        for t in writer.targets
        if is_of_expert(t.file) and t.rank // (writer.dp * writer.degree) == writer.here["pp"]
    }
    counts = {one.module: one.count for one in experts.of.values()}
    return [counts[module] for module in experts.modules if module in held]


def _auto_ep_layers(writer: StepWriter) -> list[object] | None:
    """AutoEP's layers, with the cut of each rank's experts.

    A file has them twice, as one object.
    """
    experts = writer.source.state.parallel.experts
    if experts is None or not experts.is_fused:
        return None
    shapes = {name: writer.kinds[name].shape for name in experts.of if name in writer.kinds}
    return auto_ep.layers(experts, shapes, writer.settings, writer.here)


def _fragment(writer: StepWriter, file: FileBuilder, name: str) -> TensorRef:
    made = writer.tensor(file, ("frozen_param_fragments", name))
    if made is not None:
        return made
    if name in writer.empty:
        here = writer.empty[name]
        return file.storages.empty(here.dtype, (0,) if writer.stage == 3 else here.shape)
    experts = writer.source.state.parallel.experts
    if experts is not None and name in experts.of:
        fail(
            "E471",
            f"{name} is frozen and an expert's: stage {writer.stage} states frozen parameters once more, by the numbers that"
            " experts have on one rank, and of the others' it has none",
            Label(file.path, where="frozen_param_fragments"),
            remedy=f"zero1(...), which states none; or --train '{experts.of[name].every}', where they may be trained",
        )
    fail("E471", f"the plan writes no fragment of the frozen {name}", Label(file.path, where=name))


def _numbered_shapes(writer: StepWriter, file: FileBuilder) -> list[OrderedDict[str, Size]] | None:
    """param_shapes without ZeRO, so that the optimizer's numbers have names.

    DeepSpeed neither writes nor reads them there.
    """
    here = writer.numbered(file)
    groups = [[n for n in members if writer.is_numbered(file, here, n)] for members in writer.groups_numbered()]
    return [OrderedDict((n, Size(_shape_of(writer, n))) for n in names) for names in groups] or None


def _shape_of(writer: StepWriter, name: str) -> tuple[int, ...]:
    return writer.empty[name].shape if name in writer.empty else _local(writer, writer.kinds[name])


def _param_shapes(writer: StepWriter) -> list[OrderedDict[str, Size]]:
    """Names are those of this rank's module: experts have local numbers there."""
    every = [writer.saved(flat) for flat in writer.flats]
    return [OrderedDict((name, Size(shape)) for name, shape in flat.members) for flat in every]
