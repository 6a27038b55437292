"""Sub-groups of ZeRO-3: slices of parameters, and parameters per sub-group."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

__all__ = ["pack", "slice_numel"]

Shape = tuple[int, ...]


def slice_numel(shape: Shape, dp: int) -> int:
    """Elements of a parameter that each rank holds at stage 3."""
    return -(-prod(shape) // dp)


def pack(shapes: Sequence[Shape], dp: int, sub_group_size: int) -> list[int]:
    """The number of parameters in each sub-group of one parameter group.

    A sub-group is closed when its slices reach the size.
    """
    counts, held, total = [], 0, 0
    for shape in shapes:
        held += 1
        total += slice_numel(shape, dp)
        if total >= sub_group_size:
            counts.append(held)
            held = total = 0
    if held:
        counts.append(held)
    return counts
