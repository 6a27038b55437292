"""A layout as `check` sees it is one that `plan` takes: a graph is drawn from the layout to itself."""

from __future__ import annotations

from ucpl.errors import UcplError
from ucpl.graph import build
from ucpl.regions import Placement

__all__ = ["demand_plannable"]

# Faults of one side alone, whatever the other side is.
_OF_ONE_SIDE = ("E304", "E314")


def demand_plannable(placement: Placement) -> None:
    """Refuse a layout that is no side of any plan. Raises: UcplError E304, E314."""
    try:
        build(placement, placement, dtype_of=lambda file, key: "f32")
    except UcplError as error:
        if error.diagnostics[0].code in _OF_ONE_SIDE:
            raise
