"""Optimizer shards of stage 3: a slice of every parameter, in sub-groups.

Read in deepspeed 0.19.8: stage3.py (`_rigid_state_dict`, `_create_fp16_sub_groups`).
"""

from __future__ import annotations

from math import prod

from ucpl.errors import Label, fail
from ucpl.extents import FlatBuffer, ParameterGroup
from ucpl.extents.parallel_facts import pack, slice_numel
from ucpl.files.torch_files import TorchFile
from ucpl.files.values import Value
from ucpl.formats.deepspeed.flat_shards import Sharers, check_flat, check_partition_count, hyper_of
from ucpl.formats.deepspeed.gathered import Gathered
from ucpl.formats.deepspeed.module import RankModule
from ucpl.formats.deepspeed.topology import not_yet

_STATE = "optimizer_state_dict"
_MASTERS = "fp32_flat_groups"


def read_sliced_shards(gathered: Gathered, module: RankModule, sharers: Sharers) -> None:
    """Read masters and states of the sub-groups, and the group of each.

    module: its groups are the sub-groups, of all ranks.
    """
    for part in sharers.optims:
        _shard(gathered, module, part, sharers)
    groups = Value.of(sharers.optims[0]).at(_STATE, _STATE, "param_groups").items()
    owner = _owners(module, sharers.optims[0], groups)
    for g, group in enumerate(groups):
        mine = [s for s in range(len(module.groups)) if owner[s] == g and sharers.has(s)]
        if not mine and sharers.only is not None and (sharers.parts or group.at("params").items()):
            continue  # the other sharers' group; one without parameters is of those of no expert
        shapes = {name: shape for s in mine for name, shape in module.groups[s].items()}
        gathered.groups.append(ParameterGroup(str(g), sharers.tensors(shapes), hyper_of(group)))
        packed = pack([*shapes.values()], sharers.degree, gathered.number("sub_group_size"))
        if packed != [len(module.groups[s]) for s in mine]:
            size = gathered.number("sub_group_size")
            fail(
                "E456",
                f"sub-groups of {[len(module.groups[s]) for s in mine]} parameters contradict sub_group_size {size}",
                Label(str(module.file.path), "a list for each sub-group", where="param_shapes"),
                Label(
                    str(module.file.path), f"{packed} parameters", where="ds_config/zero_optimization/sub_group_size"
                ),
            )
    for s, held in enumerate(module.groups):
        if not sharers.has(s):
            continue
        # Each parameter is padded and cut separately: `starts` count complete parameters with their padding.
        starts, begin, end = [], 0, 0
        for shape in held.values():
            starts.append(begin)
            end = begin + prod(shape)
            begin += slice_numel(shape, sharers.degree) * sharers.degree
        gathered.stated.append(
            FlatBuffer(s, str(owner[s]), sharers.coordinates, tuple(held.items()), tuple(starts), end, sharers.cut)
        )


def _shard(gathered: Gathered, module: RankModule, part: TorchFile, sharers: Sharers) -> None:
    state = Value.of(part).at(_STATE)
    if sharers.only is None:
        if "ds_zero_partition_groups" in state.mapping():
            not_yet(part.path, "its experts are partitioned by groups of their own (AutoEP)")
        check_partition_count(part, sharers.degree)
    masters = state.at(_MASTERS).items()
    states = state.at(_STATE, "state")
    if len(masters) != len(module.groups):
        fail(
            "E456",
            f"{part.file} holds {len(masters)} sub-groups, param_shapes states {len(module.groups)}",
            Label(str(part.path), where=f"{_STATE}/{_MASTERS}"),
            Label(str(module.file.path), where="param_shapes"),
        )
    for s, group in enumerate(module.groups):
        if not sharers.has(s):
            continue
        numel = sum(slice_numel(shape, sharers.degree) for shape in group.values())
        check_flat(masters[s], numel, module)
        gathered.keep(part, masters[s].key, masters[s].tensor())
        members = sharers.tensors(group)
        gathered.has(members, "fp32")
        if (held := states.find(s)) is not None:
            gathered.state(part, held, ((numel,),), members)


def _owners(module: RankModule, part: TorchFile, groups: list[Value]) -> dict[int, int]:
    """The optimizer's group of each sub-group."""
    owner = {s.whole(): g for g, group in enumerate(groups) for s in group.at("params").items()}
    if sorted(owner) != list(range(len(module.groups))):
        fail(
            "E456",
            f"the optimizer's groups name the sub-groups {sorted(owner)}, param_shapes states {len(module.groups)}",
            Label(str(part.path), where=f"{_STATE}/{_STATE}/param_groups"),
            Label(str(module.file.path), where="param_shapes"),
        )
    return owner
