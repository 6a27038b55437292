"""AutoEP's experts at stage 3: no expert has a file.

A rank's experts of a layer are one parameter. The ranks with the same experts have a slice of it each, in their
optimizer shards. `ds_autoep_layers` of each rank's model states has the rank's experts; `ds_zero_partition_groups` of
each shard has the ranks over which a sub-group is cut. Source: deepspeed 0.19.8: runtime/engine.py
(`_save_moe_checkpoint`), runtime/zero/stage3.py (`_zero3_partition_group_metadata`),
checkpoint/autoep_zero3_metadata.py.
"""

from __future__ import annotations

from attrs import evolve

from ucpl.errors import Label, fail
from ucpl.extents import NamedTensor, ParameterGroup
from ucpl.extents.parallel_facts import Expert, Experts
from ucpl.files.torch_files import TorchFile
from ucpl.files.values import Value
from ucpl.formats.deepspeed import auto_ep
from ucpl.formats.deepspeed.blobs import keep_left_out, keep_module_facts, keep_run, keep_scaling
from ucpl.formats.deepspeed.experts import members_of
from ucpl.formats.deepspeed.flat_shards import Sharers, read_sliced_shards
from ucpl.formats.deepspeed.gathered import Gathered, StepFacts, callers_of
from ucpl.formats.deepspeed.module import Groups, RankModule, groups_of, keep_module, module_of, named_tensors
from ucpl.formats.deepspeed.order import Shape
from ucpl.formats.deepspeed.settings import is_data_first, set_alignment
from ucpl.formats.deepspeed.topology import Topology, not_yet


def read_sliced_experts(gathered: Gathered, topology: Topology) -> tuple[tuple[TorchFile, ...], StepFacts]:
    """Read module, shards and experts, and return files and facts.

    Raises: UcplError E454-E459.
    """
    first, shard = topology.first, topology.shards[0]
    groups = groups_of(first)
    experts = _experts_of(gathered, topology, groups)
    edp = topology.dp // experts.ep
    ours = _groups_of_experts(first, groups, experts)
    rest = frozenset(range(len(groups))) - ours
    for rank, (meta, optim) in enumerate(zip(topology.metas, topology.optims, strict=True)):
        _check_rank(meta, rank, (experts, edp))
        _check_counts(optim, [edp if s in ours else topology.dp for s in range(len(groups))])
    module = module_of(first, tuple(groups[s] for s in sorted(rest)), 3, Value.of(first).find("shared_params"))
    keep_module(gathered, module, shard, 3)
    set_alignment(gathered, (module.tensors[name] for name in module.parameters()))
    every = evolve(module, groups=groups)
    read_sliced_shards(gathered, every, Sharers(shard.optims, only=rest))
    _read_groups(gathered, every, topology, (experts, ours))
    gathered.groups.sort(key=lambda group: int(group.name))
    keep_run(gathered, first, "num_experts")
    keep_left_out(gathered, module, topology.tp)
    keep_module_facts(gathered, module, module)
    keep_scaling(gathered, shard.optims[0])
    shapes = {name: shape for group in groups for name, shape in group.items()}
    tensors = (*named_tensors(gathered, module, module.shapes), *_named(gathered, module, experts, shapes))
    facts = StepFacts(tensors=tensors, aliases=module.aliases, callers=callers_of(topology.metas), experts=experts)
    return (*topology.metas, *topology.optims), facts


def _experts_of(gathered: Gathered, topology: Topology, groups: Groups) -> Experts:
    """Every tensor of every expert, by its number among all."""
    first = topology.first
    stated = auto_ep.layers_of(first)
    assert stated is not None
    shapes = {name: shape for group in groups for name, shape in group.items()}
    of: dict[str, Expert] = {}
    degrees: set[int] = set()
    for number, layer in enumerate(stated.items()):
        form = layer.find("checkpoint_format"), layer.find("checkpoint_format_version")
        if tuple(one.held if one is not None else None for one in form) != auto_ep.SLICED:
            not_yet(first.path, "its experts are AutoEP's at ZeRO stage 3, in a form of another release")
        prefix, count, ep = (
            layer.at("expert_key_prefix").text(),
            layer.at("num_experts").whole(1),
            layer.at("ep_size").whole(1),
        )
        degrees.add(ep)
        local = {inner: shapes.get(f"{prefix}.{inner}") for inner in ("w1", "w2", "w3")}
        for inner, shape in local.items():
            if shape is None or len(shape) < 2 or shape[0] * ep != count:
                text = f"the shape {list(shape)}" if shape is not None else "none"
                fail(
                    "E456",
                    f"{prefix}.{inner} has {text} on a rank, and {count} experts over {ep} ranks",
                    Label(str(first.path), where="param_shapes"),
                    Label(str(first.path), where=auto_ep.LAYERS),
                )
        for n in range(count):
            for inner in local:
                name = f"{prefix}.{inner}.{n}"
                of[name] = Expert(name, f"{prefix}.", n, count, inner, number, (0,), True)
    ep = next(iter(degrees), 1)
    if len(degrees) > 1 or topology.dp % ep:
        not_yet(first.path, f"its experts are dealt over {sorted(degrees)} of {topology.dp} ranks")
    experts = Experts(ep, is_data_first(topology), of)
    gathered.set("ep", ep, auto_ep.check_placement(first, stated, experts))
    origin = f"use_data_before_expert_parallelism in ds_config of {first.file}"
    gathered.set("data_first", int(experts.is_data_first), origin)
    return experts


def _groups_of_experts(first: TorchFile, groups: Groups, experts: Experts) -> frozenset[int]:
    """The numbers of the experts' sub-groups."""
    fused = {one.fused for one in experts.of.values()}
    kinds = [{name in fused for name in group} for group in groups]
    for s, kind in enumerate(kinds):
        if len(kind) > 1:
            not_yet(first.path, f"sub-group {s} has experts and others")
    return frozenset(s for s, kind in enumerate(kinds) if True in kind)


def place_of(rank: int, experts: Experts, edp: int) -> dict[str, int]:
    """The coordinates of a rank.

    Its experts, and its place among their ranks.
    """
    if experts.is_data_first:
        return {"ep": rank // edp, "edp": rank % edp}
    return {"edp": rank // experts.ep, "ep": rank % experts.ep}


def _check_rank(meta: TorchFile, rank: int, degrees: tuple[Experts, int]) -> None:
    """Check that a rank's own file has the experts of its number."""
    experts, edp = degrees
    here = place_of(rank, experts, edp)
    stated = auto_ep.layers_of(meta)
    for layer in stated.items() if stated is not None else ():
        said = layer.at("ep_rank").whole(), layer.at("expert_data_parallel_rank").whole()
        if said != (here["ep"], here["edp"]):
            fail(
                "E456",
                f"{meta.file} is of expert-parallel rank {said[0]}, copy {said[1]}, and rank {rank} of {edp * experts.ep} is of"
                f" {here['ep']}, copy {here['edp']}",
                Label(str(meta.path), where=auto_ep.LAYERS),
                Label(str(meta.path), where="ds_config: use_data_before_expert_parallelism"),
            )


def _check_counts(optim: TorchFile, degrees: list[int]) -> None:
    """Over how many ranks each sub-group is cut."""
    stated = Value.of(optim).at("optimizer_state_dict", auto_ep.GROUPS)
    counts = [one.at("partition_count").whole(1) for one in stated.items()]
    if counts != degrees:
        fail(
            "E454",
            f"{optim.file}: its sub-groups are cut over {counts} ranks, and its experts make {degrees}",
            Label(str(optim.path), where=f"optimizer_state_dict/{auto_ep.GROUPS}"),
        )


def _read_groups(
    gathered: Gathered, module: RankModule, topology: Topology, held: tuple[Experts, frozenset[int]]
) -> None:
    """The sub-groups of experts, of the ranks that share each."""
    experts, ours = held
    edp = topology.dp // experts.ep
    by_rank: list[list[ParameterGroup]] = []
    for e in range(experts.ep):
        optims = tuple(o for r, o in enumerate(topology.optims) if place_of(r, experts, edp)["ep"] == e)
        parts: dict[str, tuple[str, ...]] = {}
        for name, one in experts.of.items():
            if experts.rank(name, experts.ep) == e:
                parts[one.fused] = (*parts.get(one.fused, ()), name)
        mine = gathered.apart()
        read_sliced_shards(mine, module, Sharers(optims, {"ep": e}, ours, "edp", parts))
        by_rank.append(mine.groups)
        gathered.stated += mine.stated
    for i, group in enumerate(by_rank[0]):
        members = members_of(topology.first, int(group.name), [mine[i].members for mine in by_rank], experts.of)
        # Its name is that of the ranks that share it, ep_size_2: the target's is made anew.
        hyper = {key: value for key, value in group.hyper.items() if key != "name"}
        gathered.groups.append(ParameterGroup(group.name, members, hyper))


def _named(
    gathered: Gathered, module: RankModule, experts: Experts, shapes: dict[str, Shape]
) -> tuple[NamedTensor, ...]:
    """All tensors of experts: trained, with the dtype of the other tensors."""
    dtype = next(module.tensors[name].storage.dtype for name in module.trained)
    return tuple(
        NamedTensor(name, shapes[one.fused][1:], dtype, "parameter", tuple(gathered.states.get(name, ())))
        for name, one in experts.of.items()
    )
