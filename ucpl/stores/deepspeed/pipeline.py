"""A step's folder of a PipelineModule: weights in a file a layer, optimizer shards a stage.

Names are those of param_shapes: `3.weight` of layer 3, `tied_modules.embed.weight` of a tied module. Read in deepspeed
0.19.8: runtime/pipe/module.py (`save_state_dict`, `_build`, `_index_tied_modules`), runtime/pipe/engine.py.

Not here: which layer lies on which stage (stages), and which copy of a tied tensor counts (copies).
"""

from __future__ import annotations

from collections import OrderedDict
from math import prod

from attrs import evolve

from ucpl.errors import Label, fail
from ucpl.extents import NamedTensor, ParameterGroup, TensorRef
from ucpl.extents.pipeline import Pipeline
from ucpl.stores.carrying import lifted
from ucpl.stores.deepspeed.blobs import keep_run, keep_scaling
from ucpl.stores.deepspeed.copies import trusted
from ucpl.stores.deepspeed.flat_shards import Sharers, read_flat_shards
from ucpl.stores.deepspeed.gathered import Facts, Gathered, callers_of
from ucpl.stores.deepspeed.module import Module, groups_of
from ucpl.stores.deepspeed.names import Listing, layer_number
from ucpl.stores.deepspeed.settings import set_alignment
from ucpl.stores.deepspeed.stages import Layers, canonical, pipeline_of, refs_of
from ucpl.stores.deepspeed.topology import Topology, not_yet
from ucpl.stores.pickles import attributes_of
from ucpl.stores.torch_files import TorchFile, read_torch_file
from ucpl.stores.values import Value


def read_pipeline(gathered: Gathered, topology: Topology) -> tuple[tuple[TorchFile, ...], Facts]:
    """Files of layers, and shards of all stages. Gives the files, and what they say together."""
    layers = _layer_files(topology.listing)
    pipeline = pipeline_of(layers, topology)
    tensors: dict[str, TensorRef] = {}
    for layer in pipeline.layers:
        if layer.file is not None:
            refs = refs_of(layers[layer.number])
            tensors |= {tensor: refs[name] for name, tensor in layer.names}
    set_alignment(gathered, tensors.values())
    for file in layers.values():
        for name, ref in refs_of(file).items():
            gathered.keep_where_full(file, (name,), ref)
    by_stage: list[list[ParameterGroup]] = []
    for shard in topology.shards:
        mine = gathered.apart()
        module = Module(shard.first, groups_of(shard.first), tensors)
        read_flat_shards(mine, module, Sharers(shard.optims, {"pp": shard.pp}))
        by_stage.append(mine.groups)
        gathered.stated += mine.stated
        gathered.remark(*mine.remarks)
    names = canonical(pipeline)
    gathered.groups += _groups(topology.metas, by_stage, names)
    pipeline = evolve(pipeline, trusted=trusted(topology.listing.root, pipeline, gathered))
    for tensor, stage in pipeline.trusted.items():
        gathered.set(f"copy of {tensor}", f"stage {stage}", "moments that are zero throughout on its other stages")
    keep_run(gathered, topology.first)
    keep_scaling(gathered, topology.optims[0])
    gathered.blobs["layer_files"] = {file.file: _facts(file) for file in layers.values()}
    facts = Facts(
        tensors=_named(gathered, pipeline, {name: tensors[name] for name in names}),
        aliases={},
        callers=callers_of(topology.metas, pp=topology.pp),
        pipeline=pipeline,
    )
    return (*topology.metas, *layers.values(), *topology.optims), facts


def _layer_files(listing: Listing) -> Layers:
    out: Layers = {}
    for name in listing.layers:
        file = read_torch_file(listing.root, name)
        refs_of(file)  # a dict of tensors by name
        number = layer_number(name)
        if number in out:
            fail(
                "E453",
                f"two files hold layer {number}",
                Label(str(out[number].path)),
                Label(str(file.path)),
            )
        out[number] = file
    return dict(sorted(out.items()))


def _named(gathered: Gathered, pipeline: Pipeline, tensors: dict[str, TensorRef]) -> tuple[NamedTensor, ...]:
    trained = {name for group in gathered.groups for name in group.members}
    buffers = set(pipeline.buffers)
    return tuple(
        NamedTensor(
            name,
            tensor.shape,
            tensor.storage.dtype,
            "buffer" if name in buffers else "parameter" if name in trained else "frozen",
            tuple(gathered.states.get(name, ())),
        )
        for name, tensor in tensors.items()
        if prod(tensor.shape)
    )


def _groups(
    metas: tuple[TorchFile, ...], by_stage: list[list[ParameterGroup]], names: list[str]
) -> list[ParameterGroup]:
    """Parameter groups over all stages. Their order on each stage is the module's own, or there is no common one."""
    counts = {len(mine) for mine in by_stage}
    if len(counts) > 1:
        fail(
            "E456",
            f"stages state {' and '.join(map(str, sorted(counts)))} parameter groups",
            *(Label(str(meta.path), where="param_shapes") for meta in metas[:2]),
        )
    place = {name: i for i, name in enumerate(names)}
    out = []
    for g, mine in enumerate(zip(*by_stage, strict=True)):
        for s, group in enumerate(mine):
            if list(group.members) != sorted(group.members, key=place.__getitem__):
                not_yet(metas[s].path, f"the parameters of group {g} are not in the order of the module on stage {s}")
            if not group.members:
                not_yet(metas[s].path, f"stage {s} has no parameter in group {g}")
            if _told(group.hyper) != _told(mine[0].hyper):
                fail(
                    "E456",
                    f"stages 0 and {s} do not agree on the hyper-parameters of group {g}",
                    Label(str(metas[0].path)),
                    Label(str(metas[s].path)),
                    remedy="They are of different steps: copy all files of one step again.",
                )
        members = sorted({name for group in mine for name in group.members}, key=place.__getitem__)
        out.append(ParameterGroup(str(g), tuple(members), mine[0].hyper))
    return out


def _told(hyper: dict[str, object]) -> dict[str, object]:
    """Of hyper-parameters, what can be compared: numbers, texts, and tuples of such."""
    plain = (int, float, str, bool)
    return {
        key: value
        for key, value in hyper.items()
        if isinstance(value, plain) or (isinstance(value, tuple) and all(isinstance(part, plain) for part in value))
    }


def _facts(file: TorchFile) -> dict[str, object]:
    """What a layer's file holds beside tensors with elements, in the order of its names."""
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
