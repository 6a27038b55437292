"""Before a run: files of two steps in one folder are found by weights that are not their masters."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ucpl.conversion.keywords import DataPlane
    from ucpl.regions import Placement
    from ucpl.schedule.plan import Plan
    from ucpl.stores.checkpoint import Checkpoint

__all__ = ["demand_no_drift"]


def demand_no_drift(plan: Plan, source: Checkpoint, bounds: DataPlane, placement: Placement | None = None) -> None:
    """A sample of the source's weights against their masters. Raises: UcplError E612, E615.

    placement: the source's, by which an element is named; without it, its tensor is.
    """
    from ucpl.conversion.keywords import options_from
    from ucpl.proofs.one_step import demand_one_step

    element = None
    if placement is not None:
        from ucpl.proofs.masters import elements_of

        element = elements_of(placement)
    bound = options_from(bounds)
    demand_one_step(plan.masters, source, bound.memory, bound.workers, element)
