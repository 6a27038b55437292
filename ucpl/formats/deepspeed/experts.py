"""Experts of deepspeed.moe layers: one file each, with states in flat buffers.

Experts have global numbers in their files and local ones (0 to experts / ep - 1) in param_shapes and in the live
module. A tensor's name here has the global number. Of a stage's ranks `ep` hold different experts; the others hold the
same ones and share their optimizer state. With tensor parallelism, experts are complete and are dealt to all dp x tp
ranks, or they are cut, too (enable_expert_tensor_parallelism), and are dealt to the dp ranks of each tp coordinate.
Source: deepspeed 0.19.8: runtime/engine.py (`_save_moe_checkpoint`, `load_moe_state_dict`), utils/groups.py
(`_create_expert_and_data_parallel`, `_get_expert_parallel_ranks`), moe/utils.py.

AutoEP's experts are fused in the module, but have separate files: auto_ep. `older_experts` handles fields that releases
before 0.19.4 lack. Experts without ZeRO have their optimizer in expp_rank files; only their weights are read (E457).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from math import prod

from attrs import evolve, field

from ucpl.errors import Label, fail
from ucpl.extents import NamedTensor, ParameterGroup, TensorRef
from ucpl.extents.parallel_facts import Expert, Experts, expert_file
from ucpl.files.torch_files import TorchFile
from ucpl.files.values import Value
from ucpl.formats.deepspeed import auto_ep
from ucpl.formats.deepspeed.flat_shards import Sharers, read_flat_shards
from ucpl.formats.deepspeed.gathered import Gathered
from ucpl.formats.deepspeed.module import Groups, RankModule, groups_of
from ucpl.formats.deepspeed.names import StepFiles, expert_place, read_shard
from ucpl.formats.deepspeed.order import Shape
from ucpl.formats.deepspeed.settings import is_data_first
from ucpl.formats.deepspeed.topology import ModelRankFiles, Topology, not_yet
from ucpl.records import frozen

_MARK = ".deepspeed_moe.experts.deepspeed_experts."
_DEGREE = re.compile(r"ep_size_(?P<ep>[0-9]{1,9})\Z")
_NAME = re.compile(rf"(?P<module>.*{re.escape(_MARK)})(?P<number>\d{{1,18}})\.(?P<inner>.+)\Z", re.DOTALL)


@frozen(eq=False)
class _Files:
    """All tensors of experts by global name, per stage, layer and expert."""

    tensors: list[dict[str, TensorRef]]  # by tensor-parallel rank, where its files have them
    of: dict[str, Expert] = field(factory=dict)
    parts: dict[str, TorchFile] = field(factory=dict)  # by name of the file
    stages: dict[str, int] = field(factory=dict)  # of each tensor
    counts: dict[str, int] = field(factory=dict)  # experts of each layer, by the prefix of their names


@frozen(eq=False)
class HeldExperts:
    """A step's experts, and the numbers of their groups in the optimizer."""

    experts: Experts
    groups: frozenset[int]
    edp: int  # ranks that share each
    files: _Files

    @property
    def parts(self) -> tuple[TorchFile, ...]:
        return tuple(self.files.parts.values())

    def groups_of(self, file: TorchFile) -> Groups:
        """param_shapes of a rank, a name for each expert, by local numbers."""
        return auto_ep.each_apart(groups_of(file), self.files.of.values())

    def tensors(self, tp: int) -> dict[str, TensorRef]:
        """Tensors of a tensor-parallel rank.

        Its own parts, and complete ones of any rank.
        """
        out = dict(self.files.tensors[tp])
        for mine in self.files.tensors:
            for name, ref in mine.items():
                out.setdefault(name, ref)
        return {name: out[name] for name in self.files.of}

    def shapes(self) -> dict[str, tuple[Shape, ...]]:
        """Of each tensor, on each tensor-parallel rank."""
        ranks = [self.tensors(tp) for tp in range(len(self.files.tensors))]
        return {name: tuple(rank[name].shape for rank in ranks) for name in self.files.of}


def experts_of(gathered: Gathered, topology: Topology) -> HeldExperts:
    """The experts' files, and degrees from these, param_shapes and the shards.

    Raises: UcplError E452-E459.
    """
    file = topology.first
    files = _expert_files(topology)
    ours = _groups_of_experts(file, files) if groups_of(file) or topology.optims else frozenset()
    for shard in topology.shards if ours else ():
        if _groups_of_experts(shard.first, files) != ours:
            not_yet(shard.first.path, "its groups of experts are not those of the first rank")
    ranks = topology.dp * topology.tp
    edp, ep, is_within_tp = _degrees(topology, files, ours)
    if edp * ep != (topology.dp if is_within_tp else ranks):
        fail(
            "E454",
            f"{edp} ranks share an expert and {ep} hold different ones, and a stage has {ranks} ranks",
            Label(str((topology.optim or file).path), where="optimizer_state_dict/partition_count"),
            Label(str(file.path), where="param_shapes"),
        )
    experts = Experts(ep, is_data_first(topology), files.of, is_within_tp)
    stated = auto_ep.layers_of(file)
    orders = "param_slice_mappings" if topology.shards[0].is_restated else "param_shapes"
    text = f"{orders} of {topology.config.file}, and the files of experts"
    gathered.set("ep", ep, text if stated is None else auto_ep.check_placement(file, stated, experts))
    if experts.is_fused and edp > 1 and gathered.settings["round_robin"].value:
        not_yet(file.path, "its experts are AutoEP's, and round_robin_gradients deals them")
    origin = f"use_data_before_expert_parallelism in ds_config of {topology.config.file}"
    gathered.set("data_first", int(experts.is_data_first), origin)
    for name, one in files.parts.items():
        for key, value in Value.of(one).named():
            gathered.keep(files.parts[name], (key,), value.tensor())
    return HeldExperts(experts, ours, edp, files)


def _degrees(topology: Topology, files: _Files, ours: frozenset[int]) -> tuple[int, int, bool]:
    """(ranks that share an expert, ranks with different ones, dealt over dp?).

    Without shards of the optimizer, the names of param_shapes have the degrees; without these, one rank has all
    experts.
    """
    if topology.optims:
        edp = _expert_degree(topology, ours)
        ep = _expert_parallel_degree(topology, files, ours, edp)
        return edp, ep, topology.tp == 1 or edp * ep == topology.dp
    is_within_tp = all(len(one.tps) == topology.tp for one in files.of.values())
    ranks = topology.dp * (1 if is_within_tp else topology.tp)
    ep = _expert_parallel_degree(topology, files, ours, ranks) if ours else 1
    return ranks // ep, ep, is_within_tp


def read_dense_groups(
    gathered: Gathered, held: HeldExperts, module: RankModule, shard: ModelRankFiles, here: dict[str, int]
) -> None:
    """The flat buffers of one rank's groups that have no experts."""
    groups = held.groups_of(shard.first)
    rest = frozenset(range(len(groups))) - held.groups
    # The numbers of experts on a rank do not matter here: their groups are skipped.
    local = _local(_every(held, module, shard.tp), groups, held, (shard.pp, 0))
    read_flat_shards(gathered, local, Sharers(shard.optims, here, rest))


def read_expert_groups(
    gathered: Gathered, held: HeldExperts, modules: dict[tuple[int, int], RankModule], topology: Topology
) -> None:
    """Read the flat buffers of all groups of experts.

    modules: of each (pp, tp).
    """
    by_rank: list[list[ParameterGroup]] = []
    for shard, e, sharers in _sharers(held, topology):
        mine = gathered.apart()
        whole = _every(held, modules[shard.pp, shard.tp], shard.tp)
        read_flat_shards(mine, _local(whole, held.groups_of(shard.first), held, (shard.pp, e)), sharers)
        by_rank.append(mine.groups)
        gathered.stated += mine.stated
    for i, g in enumerate(sorted(held.groups)):
        members = members_of(topology.first, g, [mine[i].members for mine in by_rank], held.files.of)
        # Its name is that of the ranks that share it, ep_size_2: the target's is made anew.
        hyper = {key: value for key, value in by_rank[0][i].hyper.items() if key != "name"}
        gathered.groups.append(ParameterGroup(str(g), members, hyper))


def _sharers(held: HeldExperts, topology: Topology) -> Iterator[tuple[ModelRankFiles, int, Sharers]]:
    """The ranks that share experts, stage by stage.

    Each: the first one's shard, the experts' number, and the files of all ranks in order.
    """
    experts, tp, dp = held.experts, topology.tp, topology.dp
    for pp in range(topology.pp):
        shards = topology.shards[pp * tp : pp * tp + tp]
        rows = [[shard] for shard in shards] if experts.is_within_tp else [list(shards)]
        for row in rows:
            ranks = [(row[r % len(row)], r // len(row)) for r in range(dp * len(row))]
            for e in range(experts.ep):
                mine = [
                    (shard, d)
                    for r, (shard, d) in enumerate(ranks)
                    if (r // held.edp if experts.is_data_first else r % experts.ep) == e
                ]
                here = {"ep": e} | ({"pp": pp} if topology.pp > 1 else {})
                here |= {"tp": row[0].tp} if tp > 1 and experts.is_within_tp else {}
                optims = tuple(shard.optims[d] for shard, d in mine)
                yield mine[0][0], e, Sharers(optims, here, held.groups, "edp")


def _every(held: HeldExperts, module: RankModule, tp: int) -> RankModule:
    return RankModule(module.file, tensors={**module.tensors, **held.tensors(tp)})


def groups_without_optimizer(held: HeldExperts, module: RankModule, topology: Topology) -> tuple[ParameterGroup, ...]:
    """Groups of weights alone, without hyper-parameters.

    They are those of param_shapes, or one of experts and one of others.
    """
    of = held.files.of
    stated: list[set[object]] = []
    for shard in topology.shards:
        for g, group in enumerate(held.groups_of(shard.first)):
            stated += [set() for _ in range(g + 1 - len(stated))]
            places = {name: _of_expert(held.files, name) for name in group}
            stated[g] |= {name if place is None else (place[0], place[2]) for name, place in places.items()}
    dense = tuple(module.parameters())
    if not stated:
        found = [dense, _by_kind(tuple(of), of)]
    else:
        ours = [tuple(name for name, one in of.items() if (one.module, one.inner) in group) for group in stated]
        found = [
            tuple(n for n in dense if n in group) + _by_kind(mine, of) for group, mine in zip(stated, ours, strict=True)
        ]
    return tuple(ParameterGroup(str(g), members, {}) for g, members in enumerate(m for m in found if m))


def _by_kind(names: tuple[str, ...], of: dict[str, Expert]) -> tuple[str, ...]:
    """Experts in the order of the module; fused ones tensor by tensor."""
    if not any(of[name].is_fused for name in names):
        return names
    modules = list(dict.fromkeys(of[name].module for name in names))
    inners = list(dict.fromkeys(of[name].inner for name in names))
    return tuple(sorted(names, key=lambda n: (modules.index(of[n].module), inners.index(of[n].inner), of[n].number)))


def named_experts(gathered: Gathered, held: HeldExperts, shapes: dict[str, Shape]) -> tuple[NamedTensor, ...]:
    """All tensors of experts. shapes: over all ranks."""
    trained = {name for group in gathered.groups for name in group.members} or {*held.files.of}
    return tuple(
        NamedTensor(
            name,
            shapes[name],
            tensor.storage.dtype,
            "parameter" if name in trained else "frozen",
            tuple(gathered.states.get(name, ())),
        )
        for name, tensor in held.tensors(0).items()
    )


def _place(key: str) -> tuple[str, int, str] | None:
    """(module, number, inner) of an expert's tensor.

    The number is that of its file, or a rank's local one.
    """
    match = _NAME.match(key)
    return (match["module"], int(match["number"]), match["inner"]) if match is not None else auto_ep.place_of(key)


def _of_expert(files: _Files, name: str) -> tuple[str, int, str] | None:
    """The same of a name in param_shapes, if experts have files."""
    place = _place(name)
    return place if place is not None and (place[0] in files.counts or _NAME.match(name)) else None


def _groups_of_experts(file: TorchFile, files: _Files) -> frozenset[int]:
    """The numbers of the experts' parameter groups, which follow the others."""
    groups = auto_ep.each_apart(groups_of(file), files.of.values())
    kinds = [{_of_expert(files, name) is not None for name in group} for group in groups]
    for g, kind in enumerate(kinds):
        if len(kind) > 1:
            not_yet(file.path, f"parameter group {g} has experts and others")
    ours = frozenset(g for g, kind in enumerate(kinds) if True in kind)
    if not ours:
        not_yet(file.path, "no group of the optimizer has experts")
    if min(ours) < max(frozenset(range(len(groups))) - ours, default=-1):
        not_yet(file.path, "a parameter group of experts precedes another")
    return ours


def _expert_files(topology: Topology) -> _Files:
    places = _places(topology.listing)
    tp, root = topology.tp, topology.listing.root
    numbers: dict[tuple[int, int], set[int]] = {}
    for (layer, number, mp), name in places.items():
        if mp >= tp * topology.pp:
            fail("E454", f"model-parallel rank {mp} has a file, of {tp * topology.pp}", Label(str(root / name)))
        numbers.setdefault((mp // tp, layer), set()).add(number)
    for (stage, layer), present in numbers.items():
        lacking = next((n for n in range(max(present)) if n not in present), None)
        if lacking is not None:
            missing = expert_file(layer, lacking, stage * tp)
            fail("E452", f"{missing} is missing", Label(str(root / missing), "not there"), Label(str(root)))
    held = _Files([{} for _ in range(tp)])
    for (layer, number, mp), name in sorted(places.items(), key=lambda x: (x[0][2] // tp, x[0])):
        _read_expert(held, read_shard(root, name), (layer, number, mp), (tp, len(numbers[mp // tp, layer])))
    return held


def _places(listing: StepFiles) -> dict[tuple[int, int, int], str]:
    """Files of experts by layer, expert and model-parallel rank."""
    out: dict[tuple[int, int, int], str] = {}
    for name in listing.experts:
        place = expert_place(name)
        if place is None:
            not_yet(listing.root / name, "its experts were written before layers had numbers")
        out[place] = name
    return out


def _read_expert(held: _Files, part: TorchFile, place: tuple[int, int, int], counts: tuple[int, int]) -> None:
    """Read one expert's file.

    place: (layer, expert, mp rank). counts: (tp, experts of the layer).
    """
    (layer, number, mp), (tp, count) = place, counts
    held.parts[part.file] = part
    for key, value in Value.of(part).named():
        place_here = _place(key)
        if place_here is None or place_here[1] != number or not isinstance(value.held, TensorRef):
            fail(
                "E455",
                f"{part.file}: {key[:200]} is no tensor of expert {number}, which DeepSpeed would have written",
                Label(str(part.path), where=key[:200]),
            )
        if key in held.tensors[mp % tp] or not prod(value.held.shape):
            not_yet(part.path, f"{key} is there twice, or has no elements")
        held.tensors[mp % tp][key] = value.held
        held.stages.setdefault(key, mp // tp)
        module, _, inner = place_here
        held.counts.setdefault(module, count)
        known = held.of.get(key)
        tps = (*known.tps, mp % tp) if known is not None else (mp % tp,)
        is_fused = _NAME.match(key) is None
        held.of[key] = Expert(key, module, number, count, inner, layer, tps, is_fused)


def _expert_degree(topology: Topology, ours: frozenset[int]) -> int:
    """The number of ranks that share an expert's optimizer state."""
    part = topology.shards[0].optims[0]
    stated = Value.of(part).at("optimizer_state_dict", "partition_count")
    counts = [count.whole() for count in stated.items()] if isinstance(stated.held, list | tuple) else []
    degrees = {counts[g] for g in ours} if len(counts) > max(ours) else set()
    if len(degrees) != 1:
        not_yet(part.path, f"its experts are parallel to several degrees: partition_count {counts}")
    degree, ranks = degrees.pop(), topology.dp * topology.tp
    if degree < 1 or ranks % degree:
        fail(
            "E454",
            f"{degree} ranks share an expert, of {ranks} ranks",
            Label(str(part.path), where="optimizer_state_dict/partition_count"),
        )
    return degree


def _expert_parallel_degree(topology: Topology, files: _Files, ours: frozenset[int], edp: int) -> int:
    """The number of ranks over which experts are dealt.

    num_experts, the files and the local numbers of param_shapes must agree.
    """
    named = _named_degree(topology, ours)
    if named is None and topology.optims and topology.tp == 1 and _is_elastic(topology) and topology.dp % edp == 0:
        named = topology.dp // edp  # an elastic checkpoint keeps no names of groups, and ranks are dealt in one way
    degrees: dict[int, str] = {} if named is None else {named: "the groups' name"}
    for shard in topology.shards:
        file = shard.first
        counts = {one.module: one.count for name, one in files.of.items() if files.stages[name] == shard.pp}
        stated = Value.of(file).find("num_experts")
        numbers = [n.whole() for n in stated.items()] if stated is not None and isinstance(stated.held, list) else None
        # A pipeline's stage has layers of its own, and states the numbers of each, or of them all.
        if (
            numbers is not None
            and sorted(numbers) != sorted(counts.values())
            and (topology.pp == 1 or set(numbers) != set(counts.values()))
        ):
            fail(
                "E456",
                f"num_experts is {numbers}, and there are files of {list(counts.values())} experts",
                Label(str(file.path), where="num_experts"),
                Label(str(file.path.parent), "layer_L_expert_E_mp_rank_00_model_states.pt"),
            )
        local: dict[str, int] = {}
        for g in sorted(ours):
            for name in auto_ep.each_apart(groups_of(file), files.of.values())[g]:
                if (place := _of_expert(files, name)) is not None:
                    local[place[0]] = max(local.get(place[0], 0), place[1])
        for module, last in local.items():
            count = counts.get(module, 0)
            # These are the trained ones: of a rank's last experts, frozen on all ranks, there is none.
            mine = last + 1 if named is None or not count or count % named else max(last + 1, count // named)
            if not count or count % mine:
                _disagree(file, module, count, last + 1)
            degrees.setdefault(count // mine, module)
    if len(degrees) > 1:
        (one, a), (other, b) = list(degrees.items())[:2]
        not_yet(topology.first.path, f"its experts are parallel to several degrees: {one} of {a}, {other} of {b}")
    return next(iter(degrees))


def _named_degree(topology: Topology, ours: frozenset[int]) -> int | None:
    """The degree in DeepSpeed's names of experts' groups: `ep_size_2`.

    They are stored with hyper-parameters.
    """
    names: set[str | None] = set()
    for shard in topology.shards if topology.optims else ():
        state = Value.of(shard.optims[0]).at("optimizer_state_dict").find("base_optimizer_state")
        groups = state.find("param_groups") if state is not None and isinstance(state.held, dict) else None
        for g in ours:
            group = groups.find(g) if groups is not None else None
            name = group.find("name") if group is not None else None
            names.add(name.held if name is not None and isinstance(name.held, str) else None)
    only = _DEGREE.match(names.pop() or "") if len(names) == 1 else None
    return int(only["ep"]) or None if only is not None else None


def _is_elastic(topology: Topology) -> bool:
    base = Value.of(topology.shards[0].optims[0]).at("optimizer_state_dict").find("base_optimizer_state")
    return base is not None and isinstance(base.held, list)


def _disagree(file: TorchFile, module: str, count: int, local: int) -> None:
    fail(
        "E456",
        f"{module}: {count} experts have files, and each rank holds {local}",
        Label(str(file.path), where="param_shapes"),
        Label(str(file.path.parent), f"{count} files a layer"),
    )


def _renamed(name: str, held: HeldExperts, at: tuple[int, int]) -> str:
    """A name of param_shapes with the expert's global number.

    at: (stage, expert-parallel rank).
    """
    place = _of_expert(held.files, name)
    if place is None:
        return name
    module, local, inner = place
    count = held.files.counts.get(module, held.experts.ep)
    number = at[1] * (count // held.experts.ep) + local
    return f"{module}{inner}.{number}" if _NAME.match(name) is None else f"{module}{number}.{inner}"


def _local(whole: RankModule, groups: Groups, held: HeldExperts, at: tuple[int, int]) -> RankModule:
    """A rank's module with its own param_shapes, by global names.

    at: (stage, expert-parallel rank).
    """
    file, of = whole.file, held.files.of
    named = tuple({_renamed(name, held, at): shape for name, shape in group.items()} for group in groups)
    for group in named:
        for name, shape in group.items():
            if name not in (whole.tensors if _of_expert(held.files, name) is None else of):
                fail(
                    "E459",
                    f"{name} is in param_shapes and in no expert's file",
                    Label(str(file.path), where="param_shapes"),
                    Label(str(file.path.parent)),
                )
            if name in of and whole.tensors[name].shape != shape:
                one = of[name]
                fail(
                    "E458",
                    f"{name} has the shape {list(whole.tensors[name].shape)} in its file and {list(shape)} in param_shapes",
                    Label(str(file.path.parent / expert_file(one.layer, one.number, at[0])), where=name),
                    Label(str(file.path), where="param_shapes"),
                )
    return evolve(whole, groups=named, stated_groups=groups_of(file) if held.experts.is_fused else ())


def members_of(file: TorchFile, g: int, by_rank: list[tuple[str, ...]], of: dict[str, Expert]) -> tuple[str, ...]:
    """A group over all experts, in the order of the module.

    That is layer by layer, expert by expert, or tensor by tensor.
    """
    held = {name for members in by_rank for name in members}
    modules: list[str] = []
    inners: dict[str, list[str]] = {}
    for name in (name for members in by_rank for name in members):
        if of[name].module not in inners:
            modules.append(of[name].module)
        if of[name].inner not in inners.setdefault(of[name].module, []):
            inners[of[name].module].append(of[name].inner)

    def place(name: str) -> tuple[int, int, int]:
        one = of[name]
        inner = inners[one.module].index(one.inner)
        return (modules.index(one.module), *((inner, one.number) if one.is_fused else (one.number, inner)))

    members = tuple(sorted(held, key=place))
    for mine in by_rank:
        if list(mine) != [name for name in members if name in set(mine)]:
            not_yet(file.path, f"the experts of parameter group {g} are not in the order of the module")
    return members
