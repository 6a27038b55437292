"""Model states in files of model-parallel ranks.

A tensor-parallel rank has a part of each tensor. universal_checkpoint_info has the cuts (cuts). If it lacks a tensor,
its shape here is rank 0's, and a layout of the user has to give the cut: `infer` stops. A pipeline with experts is
saved in this form, too, with complete names for each stage's tensors; the experts are in files of their own (experts).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import evolve, field

from ucpl.errors import Label, fail
from ucpl.extents import NamedTensor, Sharding
from ucpl.extents.pipeline import Pipeline
from ucpl.files.checkpoint import Order
from ucpl.files.torch_files import TorchFile
from ucpl.files.values import Value
from ucpl.formats.deepspeed import auto_ep
from ucpl.formats.deepspeed.across_tp import cuts_over_tp, local_shapes, same_tensors
from ucpl.formats.deepspeed.blobs import keep_left_out, keep_module_facts, keep_run, keep_scaling, keep_whole_scaling
from ucpl.formats.deepspeed.flat_shards import Sharers, read_flat_shards
from ucpl.formats.deepspeed.gathered import Gathered, StepFacts, callers_of
from ucpl.formats.deepspeed.module import RankModule, groups_of, keep_module, module_of, named_tensors
from ucpl.formats.deepspeed.names import EXPERTS_OPTIMIZERS, read_shard
from ucpl.formats.deepspeed.order import Shape
from ucpl.formats.deepspeed.settings import set_alignment
from ucpl.formats.deepspeed.topology import ModelRank, ModelRankFiles, Topology
from ucpl.records import mutable

if TYPE_CHECKING:
    from ucpl.formats.deepspeed.experts import HeldExperts


@mutable(eq=False)
class _Grid:
    """The modules of all model-parallel ranks, by (pp, tp)."""

    topology: Topology
    held: HeldExperts | None = None
    order: Order | None = None  # as the caller says, of ZeRO-0
    modules: dict[tuple[int, int], RankModule] = field(factory=dict)
    ranks: list[Gathered] = field(factory=list)

    def of_tp(self, tp: int) -> RankModule:
        """All stages' modules of a tensor-parallel rank as one."""
        return _joined([self.modules[pp, tp] for pp in range(self.topology.pp)])


def read_dense(gathered: Gathered, topology: Topology, order: Order | None) -> tuple[tuple[TorchFile, ...], StepFacts]:
    """Read modules and shards of all ranks, and return files and facts."""
    if topology.stage == 3 and auto_ep.layers_of(topology.first) is not None:
        from ucpl.formats.deepspeed.sliced_experts import read_sliced_experts

        return read_sliced_experts(gathered, topology)
    grid = _Grid(topology, _held_experts(gathered, topology), order)
    for shard in topology.shards:
        _read_rank(gathered, grid, shard)
    by_tp = [grid.of_tp(tp) for tp in range(topology.tp)]
    first = by_tp[0]
    pipeline = _pipeline(grid) if topology.pp > 1 else None
    if pipeline is None:
        _same_groups(grid.ranks, [grid.modules[0, tp] for tp in range(topology.tp)])
        gathered.groups += grid.ranks[0].groups
    else:
        from ucpl.formats.deepspeed.stages import canonical

        first = _in_order(first, canonical(pipeline))
        from ucpl.formats.deepspeed.pipeline import common_groups

        gathered.groups += common_groups(topology, [mine.groups for mine in grid.ranks], [*first.tensors])
    for mine in grid.ranks:
        gathered.stated += mine.stated
        gathered.remark(*mine.remarks)
    if grid.held is not None:
        _read_expert_groups(gathered, grid, grid.held, first)
    if pipeline is not None:
        from ucpl.formats.deepspeed.copies import trusted

        pipeline = evolve(pipeline, trusted=trusted(topology.listing.root, pipeline, gathered, topology.tp))
    keep_run(gathered, topology.first, "num_experts")
    keep_left_out(gathered, first, topology.tp)
    keep_module_facts(gathered, first, *(grid.modules[pp, 0] for pp in range(topology.pp)))
    if topology.optim is not None:
        keep_scaling(gathered, topology.optim)
    else:
        keep_whole_scaling(gathered, first)
    if topology.listing.experts_optims:
        gathered.blobs[EXPERTS_OPTIMIZERS] = True
    experts = grid.held.parts if grid.held is not None else ()
    experts += tuple(read_shard(topology.listing.root, name) for name in topology.listing.experts_optims)
    return (*topology.metas, *experts, *topology.optims), _facts(gathered, grid, by_tp, first, pipeline)


def _held_experts(gathered: Gathered, topology: Topology) -> HeldExperts | None:
    if not topology.listing.experts:
        return None
    from ucpl.formats.deepspeed.experts import experts_of

    return experts_of(gathered, topology)


def _read_expert_groups(gathered: Gathered, grid: _Grid, held: HeldExperts, first: RankModule) -> None:
    from ucpl.formats.deepspeed.experts import groups_without_optimizer, read_expert_groups

    if grid.topology.optims:
        read_expert_groups(gathered, held, grid.modules, grid.topology)
    else:
        gathered.groups[:] = groups_without_optimizer(held, first, grid.topology)


def _facts(
    gathered: Gathered, grid: _Grid, by_tp: list[RankModule], first: RankModule, pipeline: Pipeline | None
) -> StepFacts:
    topology, held = grid.topology, grid.held
    local = local_shapes(by_tp)
    of_experts = held.shapes() if held is not None else {}
    shardings = cuts_over_tp(gathered, topology.first, first, local)
    if topology.tp > 1:
        if held is not None and not held.experts.is_within_tp:
            text = f"partition_count of {topology.optim.file}" if topology.optim is not None else "files of experts"
            origin = f"{text}: all dp x tp ranks share experts, so they are not cut"
            shardings |= {name: Sharding(shapes[0], origin=origin) for name, shapes in of_experts.items()}
        elif held is not None:
            whole = evolve(first, shapes={n: s[0] for n, s in of_experts.items()}, buffers=frozenset())
            shardings |= cuts_over_tp(gathered, topology.first, whole, of_experts)
    tensors = named_tensors(gathered, first, _whole({name: local[name] for name in first.shapes}, shardings))
    more: tuple[NamedTensor, ...] = ()
    if held is not None:
        from ucpl.formats.deepspeed.experts import named_experts

        more = named_experts(gathered, held, _whole(of_experts, shardings))
    return StepFacts(
        tensors=(*tensors, *more),
        aliases=first.aliases,
        callers=callers_of(topology.metas, pp=topology.pp, tp=topology.tp),
        shardings=shardings,
        local_shapes={**local, **of_experts} if topology.tp > 1 else {},
        pipeline=pipeline,
        experts=held.experts if held is not None else None,
    )


def _whole(local: dict[str, tuple[Shape, ...]], shardings: dict[str, Sharding]) -> dict[str, Shape]:
    """Shapes over all ranks; the first rank's if the cut is unknown."""
    return {name: shardings[name].shape if name in shardings else shapes[0] for name, shapes in local.items()}


def _read_rank(gathered: Gathered, grid: _Grid, shard: ModelRankFiles) -> None:
    """One model-parallel rank's module and optimizer."""
    topology, held = grid.topology, grid.held
    groups = groups_of(shard.first)
    if held is not None:
        groups = tuple(group for g, group in enumerate(groups) if g not in held.groups)
    module = module_of(shard.first, groups, topology.stage, _shared(topology, shard))
    same_tensors(grid.modules.get((shard.pp, 0), module), module)
    mine = gathered.apart()
    keep_module(mine, module, shard, topology.stage)
    if not grid.modules:
        every = {**module.tensors, **(held.tensors(shard.tp) if held is not None else {})}
        aligned = (*module.trained, *held.files.of) if held is not None else module.parameters()
        set_alignment(gathered, (every[name] for name in aligned))
    here = {"tp": shard.tp} if topology.tp > 1 else {}
    here |= {"pp": shard.pp} if topology.pp > 1 else {}
    if held is None or not shard.optims:
        _read_optimizer(mine, module, shard, ModelRank(here, grid.order))
    else:
        from ucpl.formats.deepspeed.experts import read_dense_groups

        read_dense_groups(mine, held, module, shard, here)
    grid.modules[shard.pp, shard.tp] = module
    grid.ranks.append(mine)


def _pipeline(grid: _Grid) -> Pipeline:
    """The layers of stages, from the names of their tensors."""
    from ucpl.formats.deepspeed.stages import StageFacts, layers_of, pipeline_of

    layers, tied = layers_of([grid.modules[pp, 0] for pp in range(grid.topology.pp)])
    held = grid.held
    beside = StageFacts(tied=tied) if held is None else StageFacts(False, tied, held.files.of, held.experts.ep)
    return pipeline_of(layers, grid.topology, beside)


def _joined(modules: list[RankModule]) -> RankModule:
    """Join the modules of several stages.

    A tensor on two stages is a tied module's, with equal copies. Raises: UcplError E458.
    """
    if len(modules) == 1:
        return modules[0]
    out = evolve(modules[0])
    for module in modules[1:]:
        for name, shape in module.shapes.items():
            if out.shapes.get(name, shape) != shape:
                fail(
                    "E458",
                    f"{name} has the shape {list(out.shapes[name])} on one stage and {list(shape)} on another",
                    Label(str(out.file.path), where=f"module/{name}"),
                    Label(str(module.file.path), where=f"module/{name}"),
                )
        out = evolve(
            out,
            tensors={**module.tensors, **out.tensors},
            buffers=out.buffers | module.buffers,
            shapes={**out.shapes, **module.shapes},
            frozen=tuple(dict.fromkeys((*out.frozen, *module.frozen))),
            aliases={**out.aliases, **module.aliases},
            empty={**out.empty, **module.empty},
            left_out=out.left_out.and_of(module.left_out),
        )
    return out


def _in_order(module: RankModule, names: list[str]) -> RankModule:
    """The same module with its tensors in the order of `names`."""
    place = {name: i for i, name in enumerate(names)}

    def sorted_by(one: str) -> int:
        return place.get(one, len(place))

    return evolve(
        module,
        tensors={name: module.tensors[name] for name in sorted(module.tensors, key=sorted_by)},
        shapes={name: module.shapes[name] for name in sorted(module.shapes, key=sorted_by)},
    )


def _read_optimizer(gathered: Gathered, module: RankModule, shard: ModelRankFiles, rank: ModelRank) -> None:
    """One rank's optimizer, by the stage that its files are of."""
    if not shard.optims:
        from ucpl.formats.deepspeed.whole_states import read_whole_states

        read_whole_states(gathered, module, rank)
    elif gathered.number("stage") == 3:
        from ucpl.formats.deepspeed.flat_shards import read_sliced_shards

        read_sliced_shards(gathered, module, Sharers(shard.optims, rank.coordinates))
    else:
        read_flat_shards(gathered, module, Sharers(shard.optims, rank.coordinates))


def _shared(topology: Topology, shard: ModelRankFiles) -> Value | None:
    """`shared_params` stand in the first rank's file alone."""
    mine = Value.of(shard.first).find("shared_params")
    return mine if mine is not None and mine.held else Value.of(topology.first).find("shared_params")


def _same_groups(ranks: list[Gathered], modules: list[RankModule]) -> None:
    """Check that groups have equal members and order on every rank."""
    for mine, module in zip(ranks[1:], modules[1:], strict=True):
        if [g.members for g in mine.groups] != [g.members for g in ranks[0].groups]:
            fail(
                "E463",
                "tensor-parallel ranks do not have the same parameter groups",
                Label(str(modules[0].file.path), where="param_shapes"),
                Label(str(module.file.path), where="param_shapes"),
            )
