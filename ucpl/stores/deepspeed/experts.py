"""A step's folder of a model with deepspeed.moe layers: each expert in a file of its own, its optimizer state in flat buffers
that fewer ranks share.

Experts have global numbers in their files and local ones (0 to experts / ep - 1) in param_shapes and in the live module; a
tensor's name here has the global number. Of the `dp` ranks of the dense parameters, `ep` hold different experts, and
dp / ep hold the same ones and cut their optimizer state among them. Read in deepspeed 0.19.8: runtime/engine.py
(`_save_moe_checkpoint`, `load_moe_state_dict`), utils/groups.py (`_create_expert_and_data_parallel`), moe/utils.py.

Not here: AutoEP's fused experts, experts without ZeRO (expp_rank files), beside tensor or pipeline parallelism (E457).
"""

from __future__ import annotations

import re
from math import prod

from attrs import evolve, field, frozen

from ucpl.errors import Label, fail
from ucpl.extents import NamedTensor, ParameterGroup, TensorRef
from ucpl.extents.experts import Expert, Experts
from ucpl.stores.deepspeed.blobs import keep_module_facts, keep_run, keep_scaling
from ucpl.stores.deepspeed.flat_shards import Sharers, read_flat_shards
from ucpl.stores.deepspeed.gathered import Facts, Gathered, callers_of
from ucpl.stores.deepspeed.module import Groups, Module, groups_of, keep_module, module_of, named_tensors
from ucpl.stores.deepspeed.names import Listing
from ucpl.stores.deepspeed.settings import is_data_first, set_alignment
from ucpl.stores.deepspeed.topology import Topology, not_yet
from ucpl.stores.torch_files import TorchFile, read_torch_file
from ucpl.stores.values import Value

_FILE = re.compile(r"layer_(?P<layer>\d+)_expert_(?P<expert>\d+)_mp_rank_(?P<mp>\d+)_model_states\.pt\Z")
_MARK = ".deepspeed_moe.experts.deepspeed_experts."
_NAME = re.compile(rf"(?P<module>.*{re.escape(_MARK)})(?P<number>\d{{1,18}})\.(?P<inner>.+)\Z", re.DOTALL)


@frozen(eq=False)
class _Files:
    """All tensors of experts by global name, layer by layer and expert by expert."""

    tensors: dict[str, TensorRef] = field(factory=dict)
    of: dict[str, Expert] = field(factory=dict)
    parts: dict[str, TorchFile] = field(factory=dict)  # by name of the file


def read_experts(gathered: Gathered, topology: Topology) -> tuple[tuple[TorchFile, ...], Facts]:
    """The dense part as without experts, and each expert's own. Gives the files, and what they say together."""
    (shard,) = topology.shards
    file, stage = topology.first, topology.stage
    held = _expert_files(topology.listing)
    groups = groups_of(file)
    ours = _groups_of_experts(file, groups)
    edp = _expert_degree(shard.optims[0], ours, topology.dp)
    experts = Experts(topology.dp // edp, is_data_first(topology), held.of)
    gathered.set("ep", experts.ep, f"partition_count of {shard.optims[0].file}")
    origin = f"use_data_before_expert_parallelism in ds_config of {file.file}"
    gathered.set("data_first", int(experts.is_data_first), origin)
    _check_counts(file, experts, [groups[g] for g in sorted(ours)])

    dense = tuple(group for g, group in enumerate(groups) if g not in ours)
    module = module_of(file, dense, stage, Value.of(file).find("shared_params"))
    keep_module(gathered, module, shard, stage)
    for name, one in held.of.items():
        gathered.keep(held.parts[one.file], (one.name,), held.tensors[name])
    every = {**module.tensors, **held.tensors}
    set_alignment(gathered, (every[name] for name in (*module.trained, *held.tensors)))
    whole = Module(file, tensors=every)
    rest = frozenset(range(len(groups))) - ours
    mine = gathered.apart()
    read_flat_shards(mine, _local(whole, groups, experts, 0), Sharers(shard.optims, {}, rest))
    gathered.groups += mine.groups
    gathered.stated += mine.stated
    gathered.remark(*mine.remarks)
    by_rank: list[list[ParameterGroup]] = []
    for e in range(experts.ep):
        mine = gathered.apart()
        ranks = [r for r in range(topology.dp) if (r // edp if experts.is_data_first else r % experts.ep) == e]
        sharers = Sharers(tuple(shard.optims[rank] for rank in ranks), {"ep": e}, ours, "edp")
        read_flat_shards(mine, _local(whole, groups, experts, e), sharers)
        by_rank.append(mine.groups)
        gathered.stated += mine.stated
    for i, g in enumerate(sorted(ours)):
        members = _members(file, g, [by_rank[e][i].members for e in range(experts.ep)], held.of)
        # Its name is that of the ranks that share it, ep_size_2: the target's is made anew.
        hyper = {key: value for key, value in by_rank[0][i].hyper.items() if key != "name"}
        gathered.groups.append(ParameterGroup(str(g), members, hyper))
    keep_run(gathered, file, "num_experts")
    keep_module_facts(gathered, module)
    keep_scaling(gathered, shard.optims[0])
    facts = Facts(
        tensors=(*named_tensors(gathered, module, module.shapes), *_named_experts(gathered, held)),
        aliases=module.aliases,
        callers=callers_of((file,)),
        experts=experts,
    )
    return (file, *held.parts.values(), *shard.optims), facts


def _named_experts(gathered: Gathered, held: _Files) -> tuple[NamedTensor, ...]:
    trained = {name for group in gathered.groups for name in group.members}
    return tuple(
        NamedTensor(
            name,
            tensor.shape,
            tensor.storage.dtype,
            "parameter" if name in trained else "frozen",
            tuple(gathered.states.get(name, ())),
        )
        for name, tensor in held.tensors.items()
    )


def _groups_of_experts(file: TorchFile, groups: Groups) -> frozenset[int]:
    """Which parameter groups are experts': DeepSpeed gives them groups of their own, behind the others."""
    kinds = [{_NAME.match(name) is not None for name in group} for group in groups]
    for g, kind in enumerate(kinds):
        if len(kind) > 1:
            not_yet(file.path, f"parameter group {g} has experts and others")
    ours = frozenset(g for g, kind in enumerate(kinds) if True in kind)
    if not ours:
        not_yet(file.path, "no group of the optimizer has experts")
    if min(ours) < max(frozenset(range(len(groups))) - ours, default=-1):
        not_yet(file.path, "a parameter group of experts stands before another")
    return ours


def _expert_files(listing: Listing) -> _Files:
    numbers: dict[int, set[int]] = {}
    ordered = []
    for name in listing.experts:
        found = _FILE.match(name)
        if found is None:
            not_yet(listing.root / name, "it has experts and no ZeRO, or was written before layers had numbers")
        numbers.setdefault(int(found["layer"]), set()).add(int(found["expert"]))
        ordered.append((int(found["layer"]), int(found["expert"]), name))
    for layer, present in numbers.items():
        lacking = next((n for n in range(max(present)) if n not in present), None)
        if lacking is not None:
            missing = f"layer_{layer}_expert_{lacking}_mp_rank_00_model_states.pt"
            fail(
                "E452",
                f"{missing} is missing",
                Label(str(listing.root / missing), "not there"),
                Label(str(listing.root)),
            )
    held = _Files()
    for layer, number, name in sorted(ordered):
        part = held.parts[name] = read_torch_file(listing.root, name)
        for key, value in Value.of(part).named():
            match = _NAME.match(key)
            if match is None or int(match["number"]) != number or not isinstance(value.held, TensorRef):
                fail(
                    "E455",
                    f"{name}: {key[:200]} is no tensor of expert {number}, which DeepSpeed would have written",
                    Label(str(part.path), where=key[:200]),
                )
            if key in held.tensors or not prod(value.held.shape):
                not_yet(part.path, f"{key} is there twice, or has no elements")
            held.tensors[key] = value.held
            held.of[key] = Expert(name, key, match["module"], number, len(numbers[layer]), match["inner"])
    return held


def _expert_degree(part: TorchFile, ours: frozenset[int], dp: int) -> int:
    """How many ranks share an expert's optimizer state: the same for all groups, and a divisor of dp."""
    stated = Value.of(part).at("optimizer_state_dict", "partition_count")
    counts = [count.whole() for count in stated.items()] if isinstance(stated.held, list | tuple) else []
    degrees = {counts[g] for g in ours} if len(counts) > max(ours) else set()
    if len(degrees) != 1:
        not_yet(part.path, f"its experts are parallel to several degrees: partition_count {counts}")
    degree = degrees.pop()
    if degree < 1 or dp % degree:
        fail(
            "E454",
            f"{degree} ranks share an expert, of {dp} data-parallel ranks",
            Label(str(part.path), where="optimizer_state_dict/partition_count"),
        )
    return degree


def _check_counts(file: TorchFile, experts: Experts, groups: list[dict[str, tuple[int, ...]]]) -> None:
    """num_experts, the files and the local numbers of param_shapes (of `groups`) must agree."""
    counts = {one.module: one.count for one in experts.of.values()}
    stated = Value.of(file).find("num_experts")
    if stated is not None and isinstance(stated.held, list):
        numbers = [count.whole() for count in stated.items()]
        if sorted(numbers) != sorted(counts.values()):
            fail(
                "E456",
                f"num_experts is {numbers}, and there are files of {list(counts.values())} experts",
                Label(str(file.path), where="num_experts"),
                Label(str(file.path.parent), "layer_L_expert_E_mp_rank_00_model_states.pt"),
            )
    local: dict[str, int] = {}
    for group in groups:
        for name in group:
            if (match := _NAME.match(name)) is not None:
                local[match["module"]] = max(local.get(match["module"], 0), int(match["number"]))
    for module, last in local.items():
        if counts.get(module, 0) != experts.ep * (last + 1):
            fail(
                "E456",
                f"{module}: {counts.get(module, 0)} experts have files, and each of {experts.ep} ranks holds {last + 1}",
                Label(str(file.path), where="param_shapes"),
                Label(str(file.path.parent), f"{counts.get(module, 0)} files a layer"),
            )


def _renamed(name: str, experts: Experts, e: int) -> str:
    """A name of param_shapes on expert-parallel rank `e`, with the global number."""
    match = _NAME.match(name)
    if match is None:
        return name
    count = next(one.count for one in experts.of.values() if one.module == match["module"])
    return f"{match['module']}{e * (count // experts.ep) + int(match['number'])}.{match['inner']}"


def _local(whole: Module, groups: Groups, experts: Experts, e: int) -> Module:
    """What a rank with the experts of `e` would state in its param_shapes, by global names."""
    file = whole.file
    named = tuple({_renamed(name, experts, e): shape for name, shape in group.items()} for group in groups)
    for group in named:
        for name, shape in group.items():
            if name not in (whole.tensors if _NAME.match(name) is None else experts.of):
                fail(
                    "E459",
                    f"{name} is in param_shapes and in no expert's file",
                    Label(str(file.path), where="param_shapes"),
                    Label(str(file.path.parent)),
                )
            if name in experts.of and whole.tensors[name].shape != shape:
                fail(
                    "E458",
                    f"{name} has the shape {list(whole.tensors[name].shape)} in its file and {list(shape)} in param_shapes",
                    Label(str(file.path.parent / experts.of[name].file), where=name),
                    Label(str(file.path), where="param_shapes"),
                )
    return evolve(whole, groups=named)


def _members(file: TorchFile, g: int, by_rank: list[tuple[str, ...]], of: dict[str, Expert]) -> tuple[str, ...]:
    """A group over all experts, in the order of the module: layer by layer, expert by expert."""
    held = {name for members in by_rank for name in members}
    modules = list(dict.fromkeys(of[name].module for name in by_rank[0]))
    inners: dict[str, list[str]] = {}
    for name in by_rank[0]:
        if of[name].inner not in inners.setdefault(of[name].module, []):
            inners[of[name].module].append(of[name].inner)

    def place(name: str) -> tuple[int, int, int]:
        one = of[name]
        return modules.index(one.module), one.number, inners[one.module].index(one.inner)

    members = tuple(sorted(held, key=place))
    for mine in by_rank:
        if list(mine) != [name for name in members if name in set(mine)]:
            not_yet(file.path, f"the experts of parameter group {g} are not in the order of the module")
    return members
