"""Model states in files of model-parallel ranks: whole, or a part of each tensor on every tensor-parallel rank.

How the parts make up whole tensors is in universal_checkpoint_info (cuts). Where that says nothing of a tensor, its shape
here is rank 0's, and a layout of the user's has to say it: `infer` refuses.
"""

from __future__ import annotations

from ucpl.errors import Label, fail
from ucpl.extents import Sharding
from ucpl.stores.deepspeed.affine import INFO
from ucpl.stores.deepspeed.blobs import keep_module_facts, keep_run, keep_scaling, keep_whole_scaling
from ucpl.stores.deepspeed.cuts import shardings_of
from ucpl.stores.deepspeed.flat_shards import Sharers, read_flat_shards
from ucpl.stores.deepspeed.gathered import Facts, Gathered, callers_of
from ucpl.stores.deepspeed.module import Module, groups_of, keep_module, module_of, named_tensors
from ucpl.stores.deepspeed.order import Shape
from ucpl.stores.deepspeed.settings import set_alignment
from ucpl.stores.deepspeed.sliced_shards import read_sliced_shards
from ucpl.stores.deepspeed.topology import Shard, Topology
from ucpl.stores.deepspeed.whole_states import read_whole_states
from ucpl.stores.torch_files import TorchFile
from ucpl.stores.values import Value

Shapes = dict[str, tuple[Shape, ...]]  # of each tensor, on each tensor-parallel rank


def read_dense(gathered: Gathered, topology: Topology) -> tuple[tuple[TorchFile, ...], Facts]:
    """Modules and shards of all tensor-parallel ranks. Gives the files, and what they say together."""
    modules: list[Module] = []
    ranks: list[Gathered] = []
    for shard in topology.shards:
        module = module_of(shard.first, groups_of(shard.first), topology.stage, _shared(topology, shard))
        _same_names(modules[0] if modules else module, module)
        mine = gathered.apart()
        keep_module(mine, module, shard, topology.stage)
        if not modules:
            set_alignment(gathered, (module.tensors[name] for name in module.parameters()))
        coordinates = {"tp": shard.tp} if topology.tp > 1 else {}
        read_optimizer(mine, module, shard, coordinates)
        modules.append(module)
        ranks.append(mine)
    _same_groups(ranks, modules)
    gathered.groups += ranks[0].groups
    for mine in ranks:
        gathered.stated += mine.stated
        gathered.remark(*mine.remarks)
    first = modules[0]
    local = {name: tuple(module.shapes[name] for module in modules) for name in first.shapes}
    shardings: dict[str, Sharding] = {}
    if topology.tp > 1:
        shardings = _shardings(gathered, topology.first, first, local)
    whole = {name: shardings[name].shape if name in shardings else shapes[0] for name, shapes in local.items()}
    keep_run(gathered, topology.first, "num_experts")
    keep_module_facts(gathered, first)
    if topology.optim is not None:
        keep_scaling(gathered, topology.optim)
    else:
        keep_whole_scaling(gathered, first)
    facts = Facts(
        tensors=named_tensors(gathered, first, whole),
        aliases=first.aliases,
        callers=callers_of(topology.metas, tp=topology.tp),
        shardings=shardings,
        local_shapes=local if topology.tp > 1 else {},
    )
    return (*topology.metas, *topology.optims), facts


def read_optimizer(gathered: Gathered, module: Module, shard: Shard, coordinates: dict[str, int]) -> None:
    """One rank's optimizer, by the stage that its files are of."""
    if not shard.optims:
        read_whole_states(gathered, module)
    elif gathered.number("stage") == 3:
        read_sliced_shards(gathered, module, Sharers(shard.optims, coordinates))
    else:
        read_flat_shards(gathered, module, Sharers(shard.optims, coordinates))


def _shared(topology: Topology, shard: Shard) -> Value | None:
    """`shared_params` stand in the first rank's file alone."""
    mine = Value.of(shard.first).find("shared_params")
    return mine if mine is not None and mine.held else Value.of(topology.first).find("shared_params")


def _shardings(gathered: Gathered, first: TorchFile, module: Module, local: Shapes) -> dict[str, Sharding]:
    """How each tensor is cut, where that is stated. A buffer of one shape is a copy."""
    of_parameters = {name: local[name] for name in module.parameters()}
    info = Value.of(first).find(INFO)
    shardings = shardings_of(first, info, of_parameters)
    origin = f"buffer_names of {first.file}: buffers of one shape are copies"
    for name, shapes in local.items():
        if name in module.buffers and len(set(shapes)) == 1:
            shardings[name] = Sharding(shapes[0], origin=origin)
    unknown = [name for name in local if name not in shardings]
    if unknown:
        more = f", nor {len(unknown) - 1} more" if len(unknown) > 1 else ""
        gathered.remark(f"nothing says how {unknown[0]} is cut over tp{more}: a layout has to")
    return shardings


def _same_names(one: Module, other: Module) -> None:
    """All ranks have the same tensors, in one order, of the same kinds, and each has some of each."""
    for what, mine, theirs in (
        ("tensors", list(one.tensors), list(other.tensors)),
        ("trained parameters", list(one.trained), list(other.trained)),
        ("frozen parameters", list(one.frozen), list(other.frozen)),
        ("buffers", sorted(one.buffers), sorted(other.buffers)),
        ("aliases", sorted(one.aliases), sorted(other.aliases)),
        ("tensors without elements", sorted(one.empty), sorted(other.empty)),
    ):
        if mine != theirs:
            differ = sorted(set(mine) ^ set(theirs)) or [a for a, b in zip(mine, theirs, strict=False) if a != b]
            fail(
                "E463",
                f"tensor-parallel ranks do not have the same {what}: {differ[0]}",
                Label(str(one.file.path), where="module"),
                Label(str(other.file.path), where="module"),
            )
    for name in one.shapes:
        if len(one.shapes[name]) != len(other.shapes[name]):
            fail(
                "E463",
                f"{name} is {list(one.shapes[name])} on one tensor-parallel rank and {list(other.shapes[name])} on another",
                Label(str(one.file.path), where=f"module/{name}"),
                Label(str(other.file.path), where=f"module/{name}"),
            )


def _same_groups(ranks: list[Gathered], modules: list[Module]) -> None:
    """The optimizer's groups are one model's: the same members in the same order on every rank."""
    for mine, module in zip(ranks[1:], modules[1:], strict=True):
        if [g.members for g in mine.groups] != [g.members for g in ranks[0].groups]:
            fail(
                "E463",
                "tensor-parallel ranks do not have the same parameter groups",
                Label(str(modules[0].file.path), where="param_shapes"),
                Label(str(module.file.path), where="param_shapes"),
            )
