"""Weights against the fp32 masters that they are rounded from: all of them, or a sample of every stored tensor.

Files of two steps that lie in one folder have equal keys and shapes. What an optimizer counts tells most of them apart; of one
that counts nothing, and of files of weights, only values do. They change everywhere with a step, so that a sample shows it.
"""

from __future__ import annotations

import numpy as np
from attrs import evolve

from ucpl.columns import I64
from ucpl.errors import Diagnostic, Label, UcplError, catalogue
from ucpl.graph import build
from ucpl.graph.side import DtypeOf
from ucpl.layout import Derivation
from ucpl.proofs.against import hold_against
from ucpl.proofs.where import counted, finding, only, pairs_of
from ucpl.regions import Placement
from ucpl.runtime.compare import Unequal
from ucpl.runtime.evidence import damage_in
from ucpl.schedule import Plan, Runs, order
from ucpl.stores.checkpoint import Checkpoint

__all__ = ["demand_one_step", "dtype_of", "weights_against_masters"]

SAMPLE = 1024  # elements of a run that are looked at


def weights_against_masters(
    checkpoint: Checkpoint, placement: Placement, memory: int, workers: int
) -> tuple[int, list[Diagnostic]]:
    """Every stored weight against its stored master: how many there are, and findings E701."""
    plan, weights = _plan(checkpoint, placement)
    if plan is None:
        return 0, []
    compared = hold_against(plan, checkpoint, checkpoint, memory=memory, workers=workers)
    return compared.elements, [finding("E701", u, weights, "the weight is not its master, rounded") for u in compared]


def demand_one_step(checkpoint: Checkpoint, placement: Placement, memory: int, workers: int) -> int:
    """A sample of every tensor that has a weight and a master in different files: all are of one step.

    Returns how many elements were looked at. Raises: UcplError E615 where a weight is not its master, rounded; E612 where
    one of the two is damaged.
    """
    if len(checkpoint.files) < 2:  # one file is of one step
        return 0
    plan, weights = _plan(checkpoint, placement)
    if plan is None:
        return 0
    sampled = plan.of(
        sources=plan.sources, targets=plan.targets, moves=tuple(_sample(m) for m in plan.moves if m.kind == "copy")
    )
    compared = hold_against(sampled, checkpoint, checkpoint, memory=memory, workers=workers)
    for unequal in compared:
        _refuse(unequal, checkpoint, weights, memory)
    return compared.elements


def _plan(checkpoint: Checkpoint, placement: Placement) -> tuple[Plan | None, Placement]:
    """From stored masters to stored weights, where both are kept; and where the weights are."""
    pairs = pairs_of(placement)
    both = {path for path, state in pairs if state == "weight" and (path, "fp32") in pairs}
    if not both:
        return None, placement
    masters = only(placement, {(path, "fp32") for path in both})
    masters = evolve(masters, layout=evolve(masters.layout, derived=(Derivation("weight", "fp32"),)))
    weights = counted(only(placement, {(path, "weight") for path in both}))
    return order(build(masters, weights, dtype_of=dtype_of(checkpoint)), name="masters"), weights


def _sample(m: Runs) -> Runs:
    """The beginning of the first and of the last run of every stored tensor, on either side."""
    rows = np.unique(np.concatenate([_ends(m.source), _ends(m.target)]))
    some = m.take(rows)
    shape = some.shape.copy()
    left = np.full(len(rows), SAMPLE, dtype=np.int64)
    for d in reversed(range(shape.shape[1])):  # the last dim is the densest
        shape[:, d] = np.minimum(shape[:, d], left)
        left //= shape[:, d]
        left = np.maximum(left, 1)
    return some.replace(shape=shape)


def _ends(numbers: np.ndarray) -> I64:
    """Where each number stands first, and where last."""
    first = np.unique(numbers, return_index=True)[1]
    last = len(numbers) - 1 - np.unique(numbers[::-1], return_index=True)[1]
    return np.concatenate([first, last]).astype(np.int64)


def _refuse(unequal: Unequal, checkpoint: Checkpoint, weights: Placement, memory: int) -> None:
    found = finding("E701", unequal, weights, "the weight is not its master, rounded")
    named = {(unequal.file, unequal.key), (unequal.source_file, unequal.source_key)}
    if damaged := damage_in(checkpoint, named, memory=memory):
        raise UcplError(*damaged)
    labels = tuple(Label(label.file, label.text, where=label.where) for label in found.labels)
    raise UcplError(Diagnostic("E615", found.message, labels, remedy=catalogue()["E615"].remedy))


def dtype_of(checkpoint: Checkpoint) -> DtypeOf:
    """The dtype that a checkpoint has at a place."""
    known = {(f, tuple(map(str, k))): e.dtype for (f, k), e in checkpoint.extents.items()}
    return lambda file, key: known.get((file, tuple(map(str, key))))
