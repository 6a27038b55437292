"""A plan held against a checkpoint that exists, with copies of it left out of the plan."""

from __future__ import annotations

from attrs import evolve

from ucpl.runtime.compare import Comparison, compare
from ucpl.schedule import Plan
from ucpl.stores.checkpoint import Checkpoint

__all__ = ["hold_against"]


def hold_against(plan: Plan, source: Checkpoint, target: Checkpoint, *, memory: int, workers: int) -> Comparison:
    """Whether `target` holds what the plan makes of `source`. What nothing moves to is as it is, of whatever dtype."""
    known = {(file, tuple(map(str, key))): e.dtype for (file, key), e in target.extents.items()}
    targets = tuple(
        t if t.dtype else evolve(t, dtype=known.get((t.file, tuple(map(str, t.key))), "")) for t in plan.targets
    )
    return compare(plan.of(targets=targets), source, target, memory=memory, workers=workers)
