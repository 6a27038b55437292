"""Roles of a torch_dist folder's entries, by Megatron-Core's names.

They are weights, the optimizer's states, and other objects. `.metadata` has only names, and no paths. States are
`optimizer.state.exp_avg.NAME` for any optimizer. Its buckets, which belong to no single parameter, are
`optimizer.distributed. ...` (buckets).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from attrs import evolve, field

from ucpl.errors import Label, fail
from ucpl.extents.account import NotRead
from ucpl.formats.dcp.metadata import METADATA, Metadata
from ucpl.formats.megatron.common_state import SCALER, SCALING
from ucpl.records import frozen

__all__ = [
    "COMPLETE",
    "DESCRIBES",
    "BUFFERS",
    "MASTER",
    "MASTERS",
    "MOMENTUM",
    "SPLIT",
    "STATES",
    "Entries",
    "entries_of",
    "is_of_optimizer",
    "not_read_in",
    "unchained",
]

STATES = "optimizer.state."
MASTER = "fp32"
MASTERS = ("param", "fp32_param")  # names of masters: the distributed optimizer's, and all others'
# Their name here if a run has both: Muon's parameters, of layers, and those of a distributed optimizer.
SPLIT = "split"
MOMENTUM = "momentum_buffer"  # which Muon alone keeps
# Tensors of a router that no optimizer trains.
BUFFERS = re.compile(r"(.*\.)?(expert_bias|local_tokens_per_expert)", re.DOTALL)
_STATE = re.compile(r"optimizer\.state\.(?P<state>[A-Za-z0-9_]+)\.(?P<name>.+)", re.DOTALL)
_GROUPS = re.compile(r"(?P<chain>chained_\d+\.)?optimizer\.distributed\.dp_group_idx_\d+\.optimizer/shard_0_1")
_CHAINED = re.compile(r"chained_\d+\.(?P<state>optimizer\.state\..+)", re.DOTALL)
# Complete buffers of a model-parallel rank (`dp_zero_gather_scatter`).
COMPLETE = re.compile(
    r"(?:chained_(?P<chain>\d{1,9})\.)?optimizer\.distributed\.dp_group_idx_(?P<group>\d{1,9})\.param_state/shard_.*"
)
DESCRIBES = re.compile(r".*\.(optimizer|per_bucket_numel(_unpadded)?|param_state_sharding_type)/shard_.*", re.DOTALL)
_MASTER_OF = re.compile(rf"\A{re.escape(STATES)}({'|'.join(MASTERS)})\.")
_UNKNOWN = "Megatron-Core saves no optimizer state under such a name: save it with --dist-ckpt-optim-fully-reshardable"
_OPTIMIZER = re.compile(r"(chained_\d+\.)?optimizer\.", re.DOTALL)


@frozen
class Entries:
    """Names of `.metadata` by role."""

    weights: dict[str, str] = field(factory=dict)  # tensor -> its name, which is the same
    states: dict[str, dict[str, str]] = field(factory=dict)  # parameter -> state -> name
    buckets: tuple[str, ...] = ()  # tensors of the optimizer that are of no one parameter
    complete: tuple[str, ...] = ()  # objects with complete buffers of ranks
    objects: tuple[str, ...] = ()
    of_groups: tuple[str, ...] = ()  # objects with the groups of the optimizers that have buckets
    master: str = ""  # the name of masters here


def unchained(metadata: Metadata) -> Metadata:
    """States of a chain of optimizers under the usual names.

    `chained_0.optimizer.state. ...` is Megatron-Core's form before 0.12, and its default since. A parameter is in one
    optimizer. Masters have one name. Raises: UcplError E530 if two optimizers have one parameter.
    """

    def plain(name: str) -> str:
        match = _CHAINED.fullmatch(name)
        return name if match is None else match["state"]

    names = {name: plain(name) for name in metadata.tensors}
    if _is_split(names.values()):
        names = {name: _MASTER_OF.sub(f"{STATES}{SPLIT}.", made) for name, made in names.items()}
    if all(name == made for name, made in names.items()):
        return metadata
    seen: dict[str, str] = {}
    for name, made in names.items():
        if seen.setdefault(made, name) != name:
            fail(
                "E530",
                f"`{made}` is of two optimizers",
                Label(METADATA, where=seen[made]),
                Label(METADATA, where=name),
            )
    return evolve(
        metadata,
        tensors={names[name]: one for name, one in metadata.tensors.items()},
        runs_of={names.get(name, name): shape for name, shape in metadata.runs_of.items()},
        described={names.get(name, name): file for name, file in metadata.described.items()},
    )


def _is_split(names: Iterable[str]) -> bool:
    """Test whether masters have both names; those in buckets have the first."""
    called = {
        m["state"] if (m := _STATE.fullmatch(name)) is not None else "" for name in names if _OPTIMIZER.match(name)
    }
    return MASTERS[1] in called and bool(called & {MASTERS[0], ""})


def entries_of(metadata: Metadata, root: Path) -> Entries:
    """Entries by role.

    Raises: UcplError E530 if the optimizer has a state of no tensor of the model.
    """
    weights = {name: name for name in metadata.tensors if _OPTIMIZER.match(name) is None}
    states: dict[str, dict[str, str]] = {}
    buckets: list[str] = []
    master = ""
    for entry in metadata.tensors:
        if entry in weights:
            continue
        match = _STATE.fullmatch(entry)
        if match is None:
            buckets.append(entry)
            continue
        name, state = match["name"], match["state"]
        if name not in weights:
            fail(
                "E530",
                f"the optimizer has `{state}` of `{name}`, and no tensor of the model is called so",
                Label(str(root / METADATA), where=entry),
            )
        if state in (*MASTERS, SPLIT):
            master, state = state, MASTER
        states.setdefault(name, {})[state] = entry
    of_groups: dict[str, str] = {}  # of each optimizer in a chain, the first rank's
    for entry in sorted(metadata.objects, key=lambda name: (len(name), name)):
        if (said := _GROUPS.fullmatch(entry)) is not None:
            of_groups.setdefault(said["chain"] or "", entry)
    groups = tuple(of_groups[chain] for chain in sorted(of_groups))
    complete = tuple(sorted(filter(COMPLETE.fullmatch, metadata.objects)))
    return Entries(weights, states, tuple(buckets), complete, tuple(metadata.objects), groups, master)


def not_read_in(entries: Entries) -> tuple[NotRead, ...]:
    """The optimizer's objects other than groups, buckets and their descriptions."""
    others = (
        name
        for name in entries.objects
        if is_of_optimizer(name) and name not in entries.complete and DESCRIBES.fullmatch(name) is None
    )
    return tuple(
        NotRead(name, SCALING, kind="value")
        if f".{SCALER}/" in name
        else NotRead(name, _UNKNOWN, is_optimizer=True, kind="value")
        for name in others
    )


def is_of_optimizer(name: str) -> bool:
    return _OPTIMIZER.match(name) is not None
