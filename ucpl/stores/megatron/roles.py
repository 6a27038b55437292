"""What the entries of a torch_dist folder are, by Megatron-Core's names: weights, the optimizer's states, and other objects.

`.metadata` says no paths: a name is all there is. States are `optimizer.state.exp_avg.NAME`, whatever the optimizer; its
buckets, which are of no one parameter, are `optimizer.distributed. ...` (buckets).
"""

from __future__ import annotations

import re
from pathlib import Path

from attrs import field

from ucpl.errors import Label, fail
from ucpl.records import frozen
from ucpl.stores.dcp.metadata import METADATA, Metadata

__all__ = ["BUFFERS", "MASTER", "MASTERS", "STATES", "Entries", "entries_of", "is_of_optimizer"]

STATES = "optimizer.state."
MASTER = "fp32"
MASTERS = ("param", "fp32_param")  # what a master is called: by the distributed optimizer, and by all others
# Tensors of a router that no optimizer trains.
BUFFERS = re.compile(r"(.*\.)?(expert_bias|local_tokens_per_expert)", re.DOTALL)
_STATE = re.compile(r"optimizer\.state\.(?P<state>[A-Za-z0-9_]+)\.(?P<name>.+)", re.DOTALL)
_GROUPS = re.compile(r"(?P<chain>chained_\d+\.)?optimizer\.distributed\.dp_group_idx_\d+\.optimizer/shard_0_1")
_OPTIMIZER = re.compile(r"(chained_\d+\.)?optimizer\.", re.DOTALL)


@frozen
class Entries:
    """Names of `.metadata` by what they are."""

    weights: dict[str, str] = field(factory=dict)  # tensor -> its name, which is the same
    states: dict[str, dict[str, str]] = field(factory=dict)  # parameter -> state -> name
    buckets: tuple[str, ...] = ()  # tensors of the optimizer that are of no one parameter
    objects: tuple[str, ...] = ()
    of_groups: tuple[str, ...] = ()  # objects with the groups of the optimizers that have buckets
    master: str = ""  # what masters are called here


def entries_of(metadata: Metadata, root: Path) -> Entries:
    """Raises: UcplError E530 where the optimizer has a state of what is no tensor of the model."""
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
        if state in MASTERS:
            master, state = state, MASTER
        states.setdefault(name, {})[state] = entry
    of_groups: dict[str, str] = {}  # of each optimizer in a chain, the first rank's
    for entry in sorted(metadata.objects, key=lambda name: (len(name), name)):
        if (said := _GROUPS.fullmatch(entry)) is not None:
            of_groups.setdefault(said["chain"] or "", entry)
    groups = tuple(of_groups[chain] for chain in sorted(of_groups))
    return Entries(weights, states, tuple(buckets), tuple(metadata.objects), groups, master)


def is_of_optimizer(name: str) -> bool:
    return _OPTIMIZER.match(name) is not None
