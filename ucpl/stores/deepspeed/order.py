"""Orders of parameters: dealt round robin, packed into sub-groups, aligned in flat buffers. And ZeRO-0, which states none.

Read in deepspeed 0.19.8: stage_1_and_2.py (`__init__`, `_round_robin_reorder`), stage3.py (`_create_fp16_sub_groups`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import gcd, prod
from typing import TypeVar

from attrs import frozen

T = TypeVar("T")
Shape = tuple[int, ...]

ALIGNMENT_BYTES = 16  # zero_optimization.parameter_alignment
FLAT_MULTIPLE = 2  # elements, times dp: nccl_start_alignment_factor
SUB_GROUP_DEFAULT = 1_000_000_000  # elements: zero_optimization.sub_group_size
STATES_MAX = 200_000  # of the search in `match`


def deal(members: Sequence[T], ways: int) -> tuple[T, ...]:
    """Item i goes to hand i % ways; then the hands end to end: round_robin_gradients."""
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
class Run:
    """Tensors end to end: where each starts, and the elements up to the end of the last."""

    starts: tuple[int, ...]
    numel: int

    def part(self, dp: int) -> int:
        """Elements of each rank's part, padding at the end included."""
        return -(-self.numel // (FLAT_MULTIPLE * dp)) * FLAT_MULTIPLE

    def lean(self, dp: int, rank: int) -> int:
        """Elements of a rank's part without the padding."""
        part = self.part(dp)
        return max(0, min(part, self.numel - rank * part))


def run(shapes: Sequence[Shape], alignment: int = 1) -> Run:
    """Each tensor starts at the next multiple of `alignment`; nothing is added behind the last."""
    starts, end = [], 0
    for shape in shapes:
        start = -(-end // alignment) * alignment
        starts.append(start)
        end = start + prod(shape)
    return Run(tuple(starts), end)


def slice_numel(shape: Shape, dp: int) -> int:
    """Elements of a parameter that each rank holds at stage 3."""
    return -(-prod(shape) // dp)


def pack(shapes: Sequence[Shape], dp: int, sub_group_size: int) -> list[int]:
    """How many parameters each sub-group of one parameter group takes: closed when its slices reach the size."""
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


def match(
    names: Sequence[tuple[str, Shape]],
    groups: Sequence[Sequence[Shape | None]],
    agrees: Callable[[str, int, int], bool] | None = None,
) -> list[list[str]] | int:
    """Names for the numbered parameters of each group, if there is one way that keeps the model's order in each.

    `groups[g][i]` is the shape of member i of group g (None: not known). `agrees(name, g, i)` may exclude more. Names may
    be left over (frozen). Returns the names, or the number of ways: 0, or 2 for several.
    """
    total = sum(len(group) for group in groups)
    spare = len(names) - total
    if spare < 0:
        return 0
    start = (0,) * len(groups)
    layer: dict[tuple[int, ...], int] = {start: 1}  # how far each group is -> number of ways, 2 for more than one
    history: list[dict[tuple[int, ...], tuple[tuple[int, ...], int]]] = []
    for seen, (name, shape) in enumerate(names):
        following: dict[tuple[int, ...], int] = {}
        back: dict[tuple[int, ...], tuple[tuple[int, ...], int]] = {}
        for places, ways in layer.items():
            options: list[tuple[tuple[int, ...], int]] = []
            if seen + 1 - sum(places) <= spare:
                options.append((places, -1))
            for g, place in enumerate(places):
                if (
                    place < len(groups[g])
                    and groups[g][place] in (None, shape)
                    and (not agrees or agrees(name, g, place))
                ):
                    options.append(((*places[:g], place + 1, *places[g + 1 :]), g))
            for option, g in options:
                following[option] = min(2, following.get(option, 0) + ways)
                back.setdefault(option, (places, g))
        if len(following) > STATES_MAX:
            return 2
        layer = following
        history.append(back)
    end = tuple(len(group) for group in groups)
    if layer.get(end, 0) != 1:
        return layer.get(end, 0)
    found: list[list[str]] = [[] for _ in groups]
    for (name, _), back in zip(reversed(names), reversed(history), strict=True):
        end, g = back[end]
        if g >= 0:
            found[g].append(name)
    return [list(reversed(members)) for members in found]
