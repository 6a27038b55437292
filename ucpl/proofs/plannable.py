"""A layout that `check` accepts is one that `plan` takes: no element has two places that are no declared copies."""

from __future__ import annotations

import numpy as np

from ucpl.columns import numbered
from ucpl.errors import UcplError
from ucpl.layout.layout import Policy
from ucpl.regions import Pieces, Placement
from ucpl.regions.boxes import overlaps

__all__ = ["demand_plannable"]

# Faults of one side alone, whatever the other side is.
_OF_ONE_SIDE = ("E304", "E314")
_JOINED = (Policy.MEAN, Policy.SUM, Policy.MAX)


def demand_plannable(placement: Placement) -> None:
    """Refuse a layout that is no side of any plan. Raises: UcplError E304, E314.

    Only a layout whose boxes may have such a fault is drawn, as a graph to itself.
    """
    if not _may_clash(placement):
        return
    from ucpl.graph import drawn  # most layouts need none

    try:
        drawn(placement, placement)
    except UcplError as error:
        if error.diagnostics[0].code in _OF_ONE_SIDE:
            raise


def _may_clash(placement: Placement) -> bool:
    """Whether values are put together, or boxes of one part that are no declared copies share an element."""
    parts = [part for part in placement.parts if len(part.folded)]
    boxes = Pieces.concat(part.folded for part in parts)
    if np.isin(boxes.policy, _JOINED).any():
        return True
    part = np.repeat(np.arange(len(parts)), [len(part.folded) for part in parts])
    replica = np.concatenate([np.zeros(0, np.int64), *(part.homes.replica(part.folded.home) for part in parts)])
    group = np.unique(numbered([part, boxes.tensor, replica]), return_inverse=True)[1]
    one, other = overlaps(group, boxes.low, boxes.high, group, boxes.low, boxes.high)
    return bool((one != other).any())
