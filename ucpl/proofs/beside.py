"""Weights that stand beside the shards, as a model's files, held against what the shards say they are.

Not here: opening those files, and under which names they have the model's tensors (conversion.beside).
"""

from __future__ import annotations

from attrs import frozen

from ucpl.graph import build
from ucpl.graph.side import DtypeOf
from ucpl.proofs.against import hold_against
from ucpl.proofs.compare import reachable, stored_dtypes
from ucpl.proofs.where import counted, element_at, only
from ucpl.regions import Placement
from ucpl.schedule import order
from ucpl.stores.checkpoint import Checkpoint

__all__ = ["Agreement", "agreement"]


@frozen
class Agreement:
    """How far the weights of some files are those of the shards. `differs`: the first element of each that is not."""

    tensors: int = 0  # that were compared
    elements: int = 0
    differs: tuple[str, ...] = ()
    unheld: tuple[str, ...] = ()  # what could not be compared, and why


def agreement(
    shards: Checkpoint, here: Placement, model: Checkpoint, there: Placement, *, memory: int, workers: int
) -> Agreement:
    """Hold each weight of `model` against that of the shards, stored or derived. Raises: UcplError E610, E611."""
    ours, theirs = stored_dtypes(shards, here), stored_dtypes(model, there)
    wanted, differs, unheld = set(), [], []
    for path, state in theirs:
        if path not in here.layout.tensors:
            unheld.append(f"{path} is no tensor of the shards")
        elif here.layout.tensors[path].counts != there.layout.tensors[path].counts:
            shapes = (list(x.layout.tensors[path].counts) for x in (here, there))
            differs.append("{} is {} in the shards, {} beside them".format(path, *shapes))
        elif ours.get((path, state), theirs[path, state]) != theirs[path, state]:
            unheld.append(f"{path} is {ours[path, state]} in the shards, {theirs[path, state]} beside them")
        else:
            wanted.add((path, state))
    reach, origins, lost = reachable(here, wanted)
    unheld += [f"the shards store no weight of {path}" for path, _ in sorted(lost)]
    if not reach:
        return Agreement(differs=tuple(differs), unheld=tuple(unheld))
    source = only(here, {p for p in reach if p in ours} | origins, {path for path, _ in reach})
    target = counted(only(there, reach))
    plan = order(build(source, target, dtype_of=_dtype_of(shards)), name="beside")
    compared = hold_against(plan, shards, model, memory=memory, workers=workers)
    homes = [h for p in target.parts for h in p.homes]
    for u in compared:
        _, element = element_at(target, u.target, u.position(homes[u.target].shape))
        differs.append(f"{element} is {u.wanted} in the shards, {u.value} in {u.file}")
    return Agreement(len(reach), compared.elements, tuple(differs), tuple(unheld))


def _dtype_of(checkpoint: Checkpoint) -> DtypeOf:
    known = {(f, tuple(map(str, k))): e.dtype for (f, k), e in checkpoint.extents.items()}
    return lambda file, key: known.get((file, tuple(map(str, key))))
