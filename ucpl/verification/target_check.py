"""Compare a plan with an existing checkpoint.

Copies of the checkpoint are left out of the plan.
"""

from __future__ import annotations

from attrs import evolve

from ucpl.files.checkpoint import Checkpoint
from ucpl.planning import Plan
from ucpl.runtime.compare import Comparison, Measured, compare, measure

__all__ = ["compare_target", "measure_target"]


def compare_target(plan: Plan, source: Checkpoint, target: Checkpoint, *, memory: int, workers: int) -> Comparison:
    """Compare `target` with the plan's result for `source`.

    Tensors without moves are not compared, in any dtype.
    """
    return compare(_typed(plan, target), source, target, memory=memory, workers=workers)


def measure_target(
    plan: Plan, source: Checkpoint, target: Checkpoint, *, memory: int, workers: int
) -> tuple[dict[str, Measured], int]:
    """The distance of `target` from the plan's result, by tensor.

    And the bytes read.
    """
    found, report = measure(_typed(plan, target), source, target, memory=memory, workers=workers)
    return found, report.bytes_read


def _typed(plan: Plan, target: Checkpoint) -> Plan:
    return plan.of(
        targets=tuple(t if t.dtype else evolve(t, dtype=target.dtype_of(t.file, t.key) or "") for t in plan.targets)
    )
