"""Names for numbered parameters, by an order or by their shapes.

Optimizers number their parameters. A number has the shape of its states, and each group keeps the model's order. The search
finds the only assignment, or shows that there is none or more than one.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate

from ucpl.errors import Label, fail
from ucpl.files.checkpoint import Order
from ucpl.records import frozen

__all__ = ["Shape", "Slots", "Unclear", "check_order", "match", "match_consecutive"]

Shape = tuple[int, ...]
STATES_MAX = 200_000  # of the search in `match`


@frozen
class Unclear:
    """A result without names: there is no way, or more than one."""

    is_several: bool
    name: str = ""  # of the first parameter that two ways put in two places
    places: tuple[tuple[int, int], ...] = ()  # (group, number in it) where it may be; (-1, -1): it is not trained


@frozen
class Slots:
    """A group's room for parameters, in units.

    A unit is a number of the optimizer, or an element of a flat buffer.
    """

    room: int
    fits: Callable[[str, Shape, int], bool]  # whether a parameter may stand at this place

    @classmethod
    def of(cls, shapes: Sequence[Shape | None]) -> Slots:
        """Numbers, with their shapes where these are known."""
        return cls(len(shapes), lambda _, shape, at: shapes[at] in (None, shape))


_Places = tuple[int, ...]  # how far each group is filled
_NOWHERE = -1


def match(
    names: Sequence[tuple[str, Shape]], groups: Sequence[Slots], cost: Callable[[Shape], int] = lambda _: 1
) -> list[list[str]] | Unclear:
    """Names for the parameters of each group, if only one way fits.

    Each group keeps the order of `names`. `cost`: the units that a parameter takes. Names can be left over (frozen).
    """
    costs = [cost(shape) for _, shape in names]
    spare = sum(costs) - sum(group.room for group in groups)
    layer: dict[_Places, int] = {(0,) * len(groups): 1}  # -> number of ways, 2 for more than one
    history: list[dict[_Places, list[tuple[_Places, int]]]] = []
    seen = 0
    for (name, shape), units in zip(names, costs, strict=True):
        following: dict[_Places, int] = {}
        back: dict[_Places, list[tuple[_Places, int]]] = {}
        seen += units
        for places, ways in layer.items():
            options = [(places, _NOWHERE)] if seen - sum(places) <= spare else []
            for g, at in enumerate(places):
                if at + units <= groups[g].room and groups[g].fits(name, shape, at):
                    options.append(((*places[:g], at + units, *places[g + 1 :]), g))
            for option, g in options:
                following[option] = min(2, following.get(option, 0) + ways)
                back.setdefault(option, []).append((places, g))
        if len(following) > STATES_MAX:
            return Unclear(True)
        layer = following
        history.append(back)
    end = tuple(group.room for group in groups)
    if spare < 0 or layer.get(end, 0) != 1:
        return _unclear(names, history, end) if spare >= 0 and end in layer else Unclear(False)
    found: list[list[str]] = [[] for _ in groups]
    for (name, _), back in zip(reversed(names), reversed(history), strict=True):
        end, g = back[end][0]
        if g >= 0:
            found[g].append(name)
    return [list(reversed(members)) for members in found]


def _unclear(
    names: Sequence[tuple[str, Shape]], history: Sequence[dict[_Places, list[tuple[_Places, int]]]], end: _Places
) -> Unclear:
    """The last parameter that two ways put in two places."""
    for (name, _), back in zip(reversed(names), reversed(history), strict=True):
        if len(back[end]) > 1:
            places = [(g, before[g]) if g >= 0 else (_NOWHERE, _NOWHERE) for before, g in back[end]]
            return Unclear(True, name, tuple(sorted(places)))
        end = back[end][0][0]
    return Unclear(True)


def match_consecutive(
    names: Sequence[tuple[str, Shape]], groups: Sequence[Slots], cost: Callable[[Shape], int] = lambda _: 1
) -> list[list[str]] | Unclear:
    """`match` for groups that follow each other in the order of `names`."""
    bounds = [0, *accumulate(group.room for group in groups)]

    def group_at(at: int) -> tuple[int, int]:
        g = bisect_right(bounds, at, 0, len(groups)) - 1
        return g, at - bounds[g]

    def fits(name: str, shape: Shape, at: int) -> bool:
        g, inside = group_at(at)
        return inside + cost(shape) <= groups[g].room and groups[g].fits(name, shape, inside)

    made = match(names, [Slots(bounds[-1], fits)], cost)
    if isinstance(made, Unclear):
        places = tuple(group_at(at) if g >= 0 else (g, at) for g, at in made.places)
        return Unclear(made.is_several, made.name, places)
    out: list[list[str]] = [[] for _ in groups]
    shapes = dict(names)
    at = 0
    for name in made[0]:
        out[group_at(at)[0]].append(name)
        at += cost(shapes[name])
    return out


# ---- the caller's order ----------------------------------------------------------------------------------------------


def check_order(order: Order, names: Sequence[str], found: Sequence[str | None], kind: str, whose: Label) -> list[str]:
    """The parameters of the caller's names.

    found: the parameter of each name, or None. kind: the text for one of them. Raises: UcplError E466.
    """
    if None in found:
        fail("E466", f"{order.origin} names {names[found.index(None)]}, which is no {kind}", whose)
    owners = [name for name in found if name is not None]
    doubled = next((name for name in owners if owners.count(name) > 1), None)
    if doubled is not None:
        fail("E466", f"{order.origin} names {doubled} twice", whose)
    return owners
