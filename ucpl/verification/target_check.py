"""A plan held against a checkpoint that exists, with copies of it left out of the plan."""

from __future__ import annotations

from attrs import evolve

from ucpl.files.checkpoint import Checkpoint
from ucpl.planning import Plan
from ucpl.runtime.compare import Comparison, Measured, compare, measure

__all__ = ["hold_against", "measure_against"]


def hold_against(plan: Plan, source: Checkpoint, target: Checkpoint, *, memory: int, workers: int) -> Comparison:
    """Whether `target` holds what the plan makes of `source`. What nothing moves to is as it is, of whatever dtype."""
    return compare(_typed(plan, target), source, target, memory=memory, workers=workers)


def measure_against(
    plan: Plan, source: Checkpoint, target: Checkpoint, *, memory: int, workers: int
) -> tuple[dict[str, Measured], int]:
    """How far `target` is from what the plan makes of `source`, by tensor; and the bytes read."""
    found, report = measure(_typed(plan, target), source, target, memory=memory, workers=workers)
    return found, report.bytes_read


def _typed(plan: Plan, target: Checkpoint) -> Plan:
    known = {(file, tuple(map(str, key))): e.dtype for (file, key), e in target.extents.items()}
    return plan.of(
        targets=tuple(
            t if t.dtype else evolve(t, dtype=known.get((t.file, tuple(map(str, t.key))), "")) for t in plan.targets
        )
    )
