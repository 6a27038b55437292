"""Compare a plan with an existing checkpoint.

Copies of the checkpoint are left out of the plan.
"""

from __future__ import annotations

from attrs import evolve

from ucpl.extents import Shelf
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
    shelves = plan.target_shelves
    return evolve(plan, target_shelves=shelves.with_dtypes([_dtypes(shelf, target) for shelf in shelves.shelves]))


def _dtypes(shelf: Shelf, target: Checkpoint) -> tuple[str, ...]:
    if all(shelf.dtypes):
        return shelf.dtypes
    said = shelf.dtypes if len(shelf.dtypes) > 1 else shelf.dtypes * len(shelf)
    places = (place for n in range(len(shelf.block.rank)) for place in shelf.block.texts(n))
    found = tuple(dtype or target.dtype_of(*place) or "" for dtype, place in zip(said, places, strict=True))
    return found[:1] if len({*found}) == 1 else found
