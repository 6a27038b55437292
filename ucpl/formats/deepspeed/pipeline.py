"""A PipelineModule's folder: weights in a file per layer, shards per stage.

Names are those of param_shapes: `3.weight` of layer 3, `tied_modules.embed.weight` of a tied module. Read in deepspeed
0.19.8: runtime/pipe/module.py (`save_state_dict`, `_build`, `_index_tied_modules`), runtime/pipe/engine.py.

Not here: the layers of each stage (stages), and the choice among copies of a tied tensor (copies).
"""

from __future__ import annotations

from collections import OrderedDict
from math import prod

from attrs import evolve

from ucpl.errors import Label, UcplError, fail
from ucpl.extents import NamedTensor, ParameterGroup, TensorRef
from ucpl.extents.pipeline import Pipeline
from ucpl.files.carrying import lifted
from ucpl.files.checkpoint import Order
from ucpl.files.pickles import attributes_of
from ucpl.files.torch_files import TorchFile
from ucpl.files.values import Value
from ucpl.formats.deepspeed.across_tp import cuts_over_tp, local_shapes, same_tensors
from ucpl.formats.deepspeed.blobs import keep_run, keep_scaling, keep_whole_scaling
from ucpl.formats.deepspeed.copies import trusted
from ucpl.formats.deepspeed.flat_shards import Sharers, read_flat_shards
from ucpl.formats.deepspeed.gathered import Gathered, StepFacts, callers_of
from ucpl.formats.deepspeed.module import RankModule
from ucpl.formats.deepspeed.names import StepFiles, layer_place, read_shard
from ucpl.formats.deepspeed.order import Shape
from ucpl.formats.deepspeed.settings import set_alignment
from ucpl.formats.deepspeed.stages import LayerTensors, StageFacts, canonical, pipeline_of, refs_of
from ucpl.formats.deepspeed.topology import ModelRank, Topology, not_yet
from ucpl.formats.deepspeed.unstaged import ShardGroups, shard_groups
from ucpl.formats.deepspeed.whole_states import read_whole_states


def read_pipeline(
    gathered: Gathered, topology: Topology, order: Order | None
) -> tuple[tuple[TorchFile, ...], StepFacts]:
    """Read files of layers and shards of stages; return files and facts."""
    by_tp = _layer_files(topology.listing)
    first = by_tp[0]
    told = shard_groups(topology, by_tp, order)
    pipeline = pipeline_of(
        {n: LayerTensors(f, refs_of(f), layer_place(f.file)[1]) for n, f in first.items()},
        topology,
        StageFacts(is_by_tp=layer_place(topology.listing.layers[0])[2] is not None, groups=told.groups[:: topology.tp]),
    )
    modules = [_module(topology, pipeline, files) for files in by_tp]
    for module in modules[1:]:
        same_tensors(modules[0], module)
    set_alignment(gathered, modules[0].tensors.values())
    for files in by_tp:
        for file in files.values():
            for name, ref in refs_of(file).items():
                gathered.keep_where_full(file, (name,), ref)
    names = canonical(pipeline)
    gathered.groups += common_groups(topology, _read_shards(gathered, topology, modules, told), names)
    pipeline = evolve(pipeline, trusted=trusted(topology.listing.root, pipeline, gathered, topology.tp))
    for tensor, stage in pipeline.trusted.items():
        gathered.set(f"copy of {tensor}", f"stage {stage}", "moments that are zero throughout on its other stages")
    keep_run(gathered, topology.first)
    if topology.optim is not None:
        keep_scaling(gathered, topology.optim)
    else:
        keep_whole_scaling(gathered, modules[0])
    gathered.remark(*told.remarks)
    gathered.blobs["layer_files"] = {layer_place(f.file)[1]: _facts(f) for f in first.values()}
    local = local_shapes(modules)
    shardings = cuts_over_tp(gathered, topology.first, modules[0], local)
    shapes = {
        name: shardings[name].shape if name in shardings else ref.shape for name, ref in modules[0].tensors.items()
    }
    facts = StepFacts(
        tensors=_named(gathered, pipeline, names, modules[0].tensors, shapes, _trained(gathered, told, names)),
        aliases={},
        callers=callers_of(topology.metas, pp=topology.pp, tp=topology.tp),
        shardings=shardings,
        local_shapes=local if topology.tp > 1 else {},
        pipeline=pipeline,
    )
    return (*topology.metas, *(f for files in by_tp for f in files.values()), *topology.optims), facts


def _layer_files(listing: StepFiles) -> list[dict[int, TorchFile]]:
    """Files by tensor-parallel rank, then by number of the layer."""
    out: dict[int, dict[int, TorchFile]] = {}
    for name in listing.layers:
        file = read_shard(listing.root, name)
        refs_of(file)
        number, _, tp = layer_place(name)
        mine = out.setdefault(tp or 0, {})
        if number in mine:
            fail(
                "E453",
                f"two files hold layer {number}",
                Label(str(mine[number].path)),
                Label(str(file.path)),
            )
        mine[number] = file
    return [dict(sorted(out[tp].items())) for tp in sorted(out)]


def _module(topology: Topology, pipeline: Pipeline, files: dict[int, TorchFile]) -> RankModule:
    """All layers' tensors as one tensor-parallel rank holds them."""
    tensors: dict[str, TensorRef] = {}
    for layer in pipeline.layers:
        if layer.number in files:
            refs = refs_of(files[layer.number])
            if list(refs) != [name for name, _ in layer.names]:
                other = next(f for f in topology.listing.layers if layer_place(f)[0] == layer.number)
                fail(
                    "E463",
                    f"tensor-parallel ranks do not have the same tensors in layer {layer.number}",
                    Label(str(topology.listing.root / other)),
                    Label(str(files[layer.number].path)),
                )
            tensors |= {tensor: refs[name] for name, tensor in layer.names}
    shapes = {name: ref.shape for name, ref in tensors.items() if prod(ref.shape)}
    empty = {name: (ref.storage.dtype, ref.shape) for name, ref in tensors.items() if not prod(ref.shape)}
    return RankModule(topology.first, (), tensors, frozenset(pipeline.buffers), shapes, empty=empty)


def _read_shards(
    gathered: Gathered, topology: Topology, modules: list[RankModule], told: ShardGroups
) -> list[list[ParameterGroup]]:
    """All shards' optimizers. Gives the parameter groups of each shard."""
    out = []
    for shard, groups in zip(topology.shards, told.groups, strict=True):
        mine = gathered.apart()
        module = evolve(modules[shard.tp], file=shard.first, groups=groups)
        coordinates = {"pp": shard.pp} | ({"tp": shard.tp} if topology.tp > 1 else {})
        if shard.optims:
            read_flat_shards(mine, module, Sharers(shard.optims, coordinates))
        else:
            read_whole_states(mine, module, ModelRank(coordinates, origin=told.origin))
        out.append(mine.groups)
        gathered.stated += mine.stated
        gathered.remark(*mine.remarks)
    return out


def _trained(gathered: Gathered, told: ShardGroups, names: list[str]) -> set[str]:
    """Trained parameters: of the optimizer, else of param_shapes, else all."""
    members = {name for group in gathered.groups for name in group.members}
    return members or {name for groups in told.groups for group in groups for name in group} or set(names)


def _named(
    gathered: Gathered,
    pipeline: Pipeline,
    names: list[str],
    tensors: dict[str, TensorRef],
    shapes: dict[str, Shape],
    trained: set[str],
) -> tuple[NamedTensor, ...]:
    buffers = set(pipeline.buffers)
    return tuple(
        NamedTensor(
            name,
            shapes[name],
            tensors[name].storage.dtype,
            "buffer" if name in buffers else "parameter" if name in trained else "frozen",
            tuple(gathered.states.get(name, ())),
        )
        for name in names
        if prod(tensors[name].shape)
    )


def common_groups(topology: Topology, by_shard: list[list[ParameterGroup]], names: list[str]) -> list[ParameterGroup]:
    """Parameter groups over all ranks; weights alone may have none.

    Their order on each stage must be the module's; otherwise there is no common order.
    """
    try:
        return _common_groups(topology, by_shard, names)
    except UcplError:
        if any(group.hyper for mine in by_shard for group in mine):
            raise
        return []  # of weights alone nothing depends on the groups


def _common_groups(topology: Topology, by_shard: list[list[ParameterGroup]], names: list[str]) -> list[ParameterGroup]:
    metas = [shard.first for shard in topology.shards]
    counts = {len(mine) for mine in by_shard}
    if len(counts) > 1:
        fail(
            "E456",
            f"stages state {' and '.join(map(str, sorted(counts)))} parameter groups",
            *(Label(str(meta.path), where="param_shapes") for meta in metas[:2]),
        )
    place = {name: i for i, name in enumerate(names)}
    out = []
    for g, mine in enumerate(zip(*by_shard, strict=True)):
        for shard, meta, group in zip(topology.shards, metas, mine, strict=True):
            s = shard.pp
            if (unknown := next((name for name in group.members if name not in place), None)) is not None:
                fail(
                    "E456",
                    f"param_shapes names {unknown!a}, which no layer's file has",
                    Label(str(meta.path), where="param_shapes"),
                    Label(str(topology.listing.root), "the layers' files"),
                )
            if list(group.members) != sorted(group.members, key=place.__getitem__):
                not_yet(meta.path, f"the parameters of group {g} are not in the order of the module on stage {s}")
            if not group.members:
                not_yet(meta.path, f"stage {s} has no parameter in group {g}")
            if group.members != mine[s * topology.tp].members:
                fail(
                    "E463",
                    f"tensor-parallel ranks of stage {s} do not have the same members in group {g}",
                    Label(str(metas[s * topology.tp].path), where="param_shapes"),
                    Label(str(meta.path), where="param_shapes"),
                )
            here, first = _comparable(group.hyper), _comparable(mine[0].hyper)
            if here != first:
                odd = ", ".join(sorted(k for k in {**here, **first} if here.get(k, ...) != first.get(k, ...)))
                fail(
                    "E456",
                    f"stages 0 and {s} do not agree on the hyper-parameters of group {g}: {odd}",
                    Label(str(metas[0].path)),
                    Label(str(meta.path)),
                    remedy="They are of different steps: copy all files of one step again.",
                )
        members = sorted({name for group in mine for name in group.members}, key=place.__getitem__)
        out.append(ParameterGroup(str(g), tuple(members), mine[0].hyper))
    return out


def _comparable(hyper: dict[str, object]) -> dict[str, object]:
    """The comparable hyper-parameters: numbers, texts, and tuples of these."""
    plain = (int, float, str, bool)
    return {
        key: value
        for key, value in hyper.items()
        if isinstance(value, plain) or (isinstance(value, tuple) and all(isinstance(part, plain) for part in value))
    }


def _facts(file: TorchFile) -> dict[str, object]:
    """A layer file's other values, in the order of its names."""
    value = Value.of(file)
    named = dict(value.named())
    return {
        "names": [*named],
        "extra": {k: lifted(v.held, file.file) for k, v in named.items() if not isinstance(v.held, TensorRef)},
        "empty": {
            k: {"dtype": ref.storage.dtype, "shape": list(ref.shape)}
            for k, ref in refs_of(file).items()
            if not prod(ref.shape)
        },
        "attributes": lifted(attributes_of(value.held), file.file) if isinstance(value.held, OrderedDict) else None,
    }
