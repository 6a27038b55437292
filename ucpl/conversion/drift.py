"""Before a conversion: files of two steps in one folder are found by weights that are not their masters."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ucpl.conversion.keywords import DataPlane
    from ucpl.conversion.planning import Prepared

__all__ = ["demand_no_drift"]


def demand_no_drift(made: Prepared, bounds: DataPlane) -> None:
    """A sample of the source's weights against their masters. Raises: UcplError E612, E615."""
    from ucpl.conversion.keywords import options_from
    from ucpl.proofs.masters import demand_one_step

    assert made.checkpoint is not None
    bound = options_from(bounds)
    demand_one_step(made.checkpoint, made.source.placement, bound.memory, bound.workers)
