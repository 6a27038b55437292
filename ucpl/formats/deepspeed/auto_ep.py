"""AutoEP: one tensor per rank for experts, one file per expert.

A layer's `experts.w1` has [experts of a rank, ...] in the live module, in `param_shapes` and in the optimizer's flat
buffers. Its files have `experts.w1.3`, with the number among all experts. Here each of these is a tensor; end to end,
in the order of their numbers, they are the rank's. `expert_placement` in `ds_autoep_layers` assigns experts to ranks.
Source: deepspeed 0.19.8: runtime/engine.py (`_save_moe_checkpoint`, `load_moe_state_dict`),
checkpoint/autoep_affine.py, module_inject/auto_ep_layer.py.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Iterator, Mapping
from math import prod

from attrs import evolve

from ucpl.errors import Label, fail
from ucpl.extents import FlatBuffer, Plain
from ucpl.extents.account import NotRead
from ucpl.extents.parallel_facts import Expert, Experts
from ucpl.files.torch_files import TorchFile
from ucpl.files.values import Value
from ucpl.formats.deepspeed.order import Shape

LAYERS = "ds_autoep_layers"
Groups = tuple[dict[str, Shape], ...]
KEYS = (LAYERS, "autoep_layers")  # today's, and that of the releases before
GROUPS = "ds_zero_partition_groups"  # of a shard of stage 3: over which ranks each sub-group is cut
FOLDING = "ds_autoep_folding"  # with AutoTP
SLICED = ("zero3_partitioned", 1)  # the form at stage 3, and its version
_ROUTER = "router"
_NAME = re.compile(r"(?P<module>(?:.*\.)?experts\.)(?P<inner>w[123])\.(?P<number>\d{1,18})\Z", re.DOTALL)


def layers_of(part: TorchFile) -> Value | None:
    """The description of AutoEP's layers in model states, or None."""
    return next((found for key in KEYS if (found := Value.of(part).find(key)) is not None and found.held), None)


def second_names(part: TorchFile, shapes: Mapping[str, Shape], trained: Container[str]) -> dict[str, str]:
    """transformers' names of AutoEP's routers, which `shared_params` lacks."""
    stated = layers_of(part)
    out: dict[str, str] = {}
    for layer in stated.items() if stated is not None else ():
        path = layer.at("module_path").text()
        inside = f"{path}." if path else ""
        for name in shapes:
            child, _, rest = name.removeprefix(inside).partition(".")
            owner = f"{inside}{_ROUTER}.{rest}"
            if name.startswith(inside) and child != _ROUTER and name not in trained:
                if shapes.get(owner) == shapes[name]:
                    out[name] = owner
    return out


def without_routers(aliases: Mapping[str, str], experts: Experts | None) -> dict[str, str]:
    """The second names in `shared_params`: all except those of routers."""
    modules = experts.modules if experts is not None and experts.is_fused else ()
    routers = tuple(module.removesuffix("experts.") + f"{_ROUTER}." for module in modules)
    return {alias: owner for alias, owner in aliases.items() if not (routers and owner.startswith(routers))}


def place_of(key: str) -> tuple[str, int, str] | None:
    """(module, number, inner) of a tensor in an expert's file of AutoEP."""
    match = _NAME.match(key)
    return (match["module"], int(match["number"]), match["inner"]) if match is not None else None


def each_apart(groups: Groups, of: Iterable[Expert]) -> Groups:
    """param_shapes with one entry per expert of a rank, by local number."""
    fused = {one.fused for one in of if one.is_fused}
    return tuple(
        {
            local: mine
            for name, shape in group.items()
            for local, mine in (_parts(name, shape) if name in fused and shape else ((name, shape),))
        }
        for group in groups
    )


def _parts(name: str, shape: Shape) -> tuple[tuple[str, Shape], ...]:
    return tuple((f"{name}.{i}", shape[1:]) for i in range(shape[0]))


def together(flat: FlatBuffer, experts: Experts, ep: int) -> FlatBuffer:
    """A flat buffer in a rank's own names.

    Experts of one tensor as one member.
    Raises: UcplError E471.
    """
    stacks = {one.fused: one.count // ep for one in experts.of.values() if one.is_fused}
    if not stacks.keys().isdisjoint(flat.names):  # stage 3 stacks the rows of a rank's experts
        every = ((name, (stacks.get(name, 0), shape)) for name, shape in flat.members)
        return evolve(flat, members=tuple((name, (n, s[0] // n, *s[1:]) if n else s) for name, (n, s) in every))
    members: list[tuple[str, Shape]] = []
    starts: list[int] = []
    end = 0
    for start, (name, shape) in zip(flat.starts, flat.members, strict=True):
        one = experts.of.get(name)
        if one is None or not one.is_fused:
            members.append((name, shape))
            starts.append(start)
        elif members and members[-1][0] == one.fused:
            if start != end:
                fail(
                    "E471",
                    f"{start - end} elements of padding would lie between two experts of {one.fused}, which DeepSpeed aligns as"
                    " one tensor",
                    Label("<target>", where="alignment"),
                    remedy="alignment = 1",
                )
            count, *rest = members[-1][1]
            members[-1] = one.fused, (count + 1, *rest)
        else:
            members.append((one.fused, (1, *shape)))
            starts.append(start)
        end = start + prod(shape)
    return evolve(flat, members=tuple(members), starts=tuple(starts))


# ---- ds_autoep_layers ------------------------------------------------------------------------------------------------


# All keys in its dicts; parameters of an expert are keys, too.
_STATED = frozenset(
    (
        *(
            "moe_layer_id",
            "module_path",
            "num_experts",
            "num_local_experts",
            "ep_size",
            "expert_placement",
            "affine_maps",
        ),
        *("expert_key_prefix", "checkpoint_format", "checkpoint_format_version", "ep_group_name", "ep_rank"),
        *("expert_data_parallel_rank", "expert_data_parallel_world_size", "global_expert_start", "global_expert_end"),
        *("version", "ranks", "rank", "experts", "params", "logical_shape", "shard_shape"),
        *("pieces", "shape", "source", "dest", "locations"),
    )
)


def unknown_of(part: TorchFile) -> Iterator[NotRead]:
    """Keys that no known release writes into these dicts."""
    stated = layers_of(part) if isinstance(part.value, dict) else None
    for layer in stated.items() if stated is not None else ():
        held = layer.held
        prefix = held.get("expert_key_prefix") if isinstance(held, dict) else None
        for path in _unknown(held, f"{prefix}."):
            yield NotRead(f"{part.file}: {LAYERS}/{path}", "no known release of DeepSpeed writes it", kind="value")


def _unknown(value: object, prefix: str) -> Iterator[str]:
    if isinstance(value, list | tuple):
        for one in value:
            yield from _unknown(one, prefix)
    for key, inner in value.items() if isinstance(value, dict) else ():
        if isinstance(key, str) and key not in _STATED and not key.startswith(prefix):
            yield key
        else:
            yield from (f"{key}/{rest}" for rest in _unknown(inner, prefix))


def check_placement(file: TorchFile, stated: Value, experts: Experts) -> str:
    """Check the ranks of experts: i // (n / ep).

    Expert i of n is on that rank. Returns the origin. Raises: UcplError E456, E457.
    """
    counts = {one.module: one.count for one in experts.of.values()}
    for layer in stated.items():
        module = layer.at("expert_key_prefix").text() + "."
        count = counts.get(module)
        told, ep = layer.at("num_experts").whole(1), layer.at("ep_size").whole(1)
        if (told, ep) != (count, experts.ep):
            fail(
                "E456",
                f"{module.rstrip('.')}: {told} experts over {ep} ranks, and its files make {count} over {experts.ep}",
                Label(str(file.path), where=LAYERS),
                Label(str(file.path.parent), "layer_L_expert_E_mp_rank_00_model_states.pt"),
            )
        placement = layer.find("expert_placement")
        if placement is not None:
            _check_runs(file, module, placement, told // ep)
    return f"expert_placement of {file.file}"


def _check_runs(file: TorchFile, module: str, placement: Value, each: int) -> None:
    for entry in placement.at("ranks").items():
        rank = entry.at("rank").whole()
        held = [number.whole() for number in entry.at("experts").items()]
        if held != [*range(rank * each, (rank + 1) * each)]:
            fail(
                "E457",
                "this checkpoint is of a kind that is not read yet: "
                f"rank {rank} of {module.rstrip('.')} has the experts {held}, not a run of {each}",
                Label(str(file.path), where=f"{LAYERS}: expert_placement"),
            )


def layers(
    experts: Experts, shapes: Mapping[str, Shape], settings: Mapping[str, Plain], here: Mapping[str, int]
) -> list[object]:
    """`ds_autoep_layers` of a target.

    The first rank's, or at stage 3 each rank's.
    """
    ep = int(settings.get("ep") or 1)
    edp = int(settings.get("edp") or int(settings.get("dp") or 1) // ep)
    is_sliced = settings.get("stage") == 3
    rank, copy = (here["ep"], here["edp"]) if is_sliced else (0, 0)
    out: list[object] = []
    for number, module in enumerate(experts.modules):
        mine = [one for one in experts.of.values() if one.module == module]
        count = mine[0].count
        each = count // ep
        ranks = [{"rank": r, "experts": [*range(r * each, r * each + each)]} for r in range(ep)]
        maps = {one.fused: _map((count, *shapes[one.name]), ep) for one in mine if one.number == 0}
        prefix = module.removesuffix(".")
        out.append(
            {
                "moe_layer_id": number,
                "module_path": prefix.removesuffix("experts").removesuffix("."),
                "num_experts": count,
                "num_local_experts": each,
                "ep_size": ep,
                "expert_placement": {"version": 1, "num_experts": count, "ep_size": ep, "ranks": ranks},
                "affine_maps": {"version": 1, "params": maps},
                "expert_key_prefix": prefix,
                "checkpoint_format": SLICED[0] if is_sliced else "per_expert_files",
                "checkpoint_format_version": SLICED[1] if is_sliced else None,
                "ep_group_name": f"ep_size_{ep}",
                "ep_rank": rank,
                "expert_data_parallel_rank": copy,
                "expert_data_parallel_world_size": edp,
                "global_expert_start": rank * each,
                "global_expert_end": rank * each + each,
            }
        )
    return out


def _map(logical: Shape, ep: int) -> dict[str, object]:
    """Each rank's part of the complete tensor.

    A run of dim 0, row-major.
    """
    mine = (logical[0] // ep, *logical[1:])
    strides = [prod(logical[i + 1 :]) for i in range(len(logical))]
    ranks: dict[int, object] = {}
    for rank in range(ep):
        piece = {
            "shape": [*mine],
            "source": [rank * prod(mine), [*strides]],
            "dest": [0, [*strides]],
            "locations": [rank],
        }
        ranks[rank] = {"shard_shape": [*mine], "pieces": [piece]}
    return {"logical_shape": [*logical], "ranks": ranks}
