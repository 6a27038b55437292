"""Orders of parameters: round robin, sub-groups, alignment.

Read in deepspeed 0.19.8: stage_1_and_2.py (`__init__`, `_round_robin_reorder`), stage3.py (`_create_fp16_sub_groups`).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd, prod
from typing import TypeVar

from ucpl.records import frozen

T = TypeVar("T")
Shape = tuple[int, ...]

ALIGNMENT_BYTES = 16  # zero_optimization.parameter_alignment
FLAT_MULTIPLE = 2  # elements, times dp: nccl_start_alignment_factor
SUB_GROUP_DEFAULT = 1_000_000_000  # elements: zero_optimization.sub_group_size


def deal(members: Sequence[T], ways: int) -> tuple[T, ...]:
    """Deal item i to hand i % ways, then join the hands.

    Round_robin_gradients.
    """
    return tuple(members[i] for hand in range(ways) for i in range(hand, len(members), ways))


def undeal(members: Sequence[T], ways: int) -> tuple[T, ...]:
    """The order before `deal`."""
    places = deal(range(len(members)), ways)
    found = dict(zip(places, members, strict=True))
    return tuple(found[i] for i in range(len(members)))


def alignment_elements(itemsize: int) -> int:
    """The multiple, in elements, that `parameter_alignment` grows each parameter to."""
    return ALIGNMENT_BYTES // gcd(ALIGNMENT_BYTES, itemsize)


@frozen
class PlacedRun:
    """Tensors end to end.

    Starts, and elements up to the end of the last.
    """

    starts: tuple[int, ...]
    numel: int

    def part(self, dp: int) -> int:
        """Elements of each rank's part, padding at the end included."""
        return -(-self.numel // (FLAT_MULTIPLE * dp)) * FLAT_MULTIPLE

    def lean(self, dp: int, rank: int) -> int:
        """Elements of a rank's part without the padding."""
        part = self.part(dp)
        return max(0, min(part, self.numel - rank * part))

    def trimmed_last(self, dp: int, rank: int) -> int:
        """Elements of a rank's part in files from before DeepSpeed 0.16.4.

        Only the last rank's part lacks padding, cut as Python cuts: the others' may be padding alone.
        """
        part = self.part(dp)
        return part if rank < dp - 1 else len(range(part)[: self.numel - rank * part])


def run(shapes: Sequence[Shape], alignment: int = 1) -> PlacedRun:
    """Place each tensor at the next multiple of `alignment`."""
    starts, end = [], 0
    for shape in shapes:
        start = -(-end // alignment) * alignment
        starts.append(start)
        end = start + prod(shape)
    return PlacedRun(tuple(starts), end)
