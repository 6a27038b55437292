"""Parameters in the flat states of FSDP1's optimizer, found by their lengths.

The optimizer's numbers name no parameters. With `use_orig_params` a number is a parameter, and ranks have runs of it,
or none. Without it, a number is a unit that FSDP wraps: the parameters below a module except those of units inside it,
in order, padded to equal parts for all ranks. Numbers follow the order of modules, a unit before those inside it.
Source: torch 2.13, fsdp/_flat_param.py and _runtime_utils.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import groupby
from math import prod

from attrs import field

from ucpl.formats.matching import Slots, Unclear, match
from ucpl.records import define, frozen

__all__ = ["FlatMember", "Named", "Number", "members_of"]

WAYS_MAX = 200_000  # of the search: places in the optimizer's numbers, with elements that no unit has taken yet
Shape = tuple[int, ...]
Number = int | str  # of a parameter in an optimizer's state dict; or its name
Named = tuple[str, Shape]


@frozen
class FlatMember:
    """A parameter in the flat state of a number.

    begin: its first element in the flat state.
    """

    name: str
    shape: Shape
    begin: int


def members_of(
    params: Sequence[Named], groups: Sequence[Sequence[Number]], lengths: Mapping[Number, int | None], ranks: int
) -> list[list[list[FlatMember]]] | Unclear:
    """Parameters of each number, for each group.

    params: in the model's order. lengths: of each number over all ranks; None: it has no states. ranks: those that
    share a flat parameter.
    """
    single = match(
        [(name, (prod(shape),)) for name, shape in params],
        [Slots.of([None if (n := lengths[number]) is None else (n,) for number in numbers]) for numbers in groups],
    )
    shapes = dict(params)
    if not isinstance(single, Unclear):
        return [[[FlatMember(name, shapes[name], 0)] for name in names] for names in single]
    if len(groups) != 1 or list(groups[0]) != list(range(len(groups[0]))):
        return single
    known = [n for number in groups[0] if (n := lengths[number]) is not None]
    if len(known) != len(groups[0]):
        return single
    units = _Search(params, known, ranks).units()
    if isinstance(units, Unclear):
        return units if units.is_several else single
    return [[_behind(unit) for unit in units]]


def _behind(unit: Sequence[Named]) -> list[FlatMember]:
    out, at = [], 0
    for name, shape in unit:
        out.append(FlatMember(name, shape, at))
        at += prod(shape)
    return out


@define(eq=False)
class _Module:
    """A module with its modules and parameters in order.

    Parameters are numbers of the list of all parameters.
    """

    inside: list[_Module | int] = field(factory=list)
    like: tuple[object, ...] | None = None  # its contents, without names


def _tree(params: Sequence[Named]) -> _Module:
    """Build modules from the dots of names.

    A module whose only content is another module is replaced by that one: a unit of either is the same.
    """
    root, found = _Module(), dict[str, _Module]()
    for number, (name, _) in enumerate(params):
        here, path = root, ""
        for step in name.split(".")[:-1]:
            path = f"{path}.{step}"
            if path not in found:
                found[path] = _Module()
                here.inside.append(found[path])
            here = found[path]
        here.inside.append(number)
    return root


_Place = tuple[int, int]  # numbers of the optimizer that are taken, and elements below a module that no unit has taken
_Tree = tuple["_Tree | int", ...]  # parameters, in order, as they were put together


@frozen
class _Way:
    """One way to assign parameters of some modules to units.

    left: parameters that no unit has taken. units: number, and parameters. marks: of both, equal for equal ways.
    """

    left: _Tree = ()
    units: tuple[tuple[int, _Tree], ...] = ()
    marks: tuple[int, int] = (0, 0)

    def then(self, other: _Way) -> _Way:
        left, units = (a ^ b for a, b in zip(self.marks, other.marks, strict=True))
        return _Way((self.left, other.left), (*self.units, *other.units), (left, units))

    def as_unit(self, number: int) -> _Way:
        left, units = self.marks
        return _Way((), (*self.units, (number, self.left)), (0, units ^ hash((number, left))))


_Ways = dict[_Place, list[_Way]]
_From = Callable[["_Module", int, int], _Ways]


@define(eq=False)
class _Search:
    """The search for modules that are units.

    Neighbours with the same shapes, such as layers, are all units or none. At each place two ways are kept: a second
    one already makes the result unclear.
    """

    params: Sequence[Named]
    lengths: Sequence[int]
    ranks: int
    known: dict[tuple[int, int, int], _Ways] = field(factory=dict)

    def units(self) -> list[list[Named]] | Unclear:
        root = _tree(self.params)
        try:
            found = self.at([root], 0, 0).get((len(self.lengths), 0), [])
        except _TooManyError:
            return Unclear(True)
        if len(found) != 1:
            return Unclear(bool(found))
        units = {number: [self.params[i] for i in _flattened(tree)] for number, tree in found[0].units}
        return [units[number] for number in range(len(self.lengths))]

    def at(self, modules: Sequence[_Module], taken: int, room: int) -> _Ways:
        """Ways of equal modules, each a unit or none.

        taken: numbers before. room: elements of the unit around them.
        """
        out: _Ways = {}
        for ways_of in (self.inside, self.unit):
            for (after, left), ways in ways_of(modules[0], taken, room).items():
                here: _Ways = {(after, left): ways}
                for one in modules[1:]:
                    here = _joined(here, partial(self.equal, ways_of, one, (after - taken, left)), room)
                for place, found in here.items():
                    out[place] = _apart([*out.get(place, []), *found])
        return out

    def equal(self, ways_of: _From, module: _Module, step: _Place, taken: int, room: int) -> _Ways:
        """Ways with the neighbour's count of numbers and of remaining elements."""
        place = taken + step[0], step[1]
        found = ways_of(module, taken, room).get(place)
        return {place: found} if found else {}

    def unit(self, module: _Module, taken: int, room: int) -> _Ways:
        is_another = len(module.inside) == 1 and isinstance(module.inside[0], _Module)
        if taken == len(self.lengths) or is_another:
            return {}
        length, out = self.lengths[taken], _Ways()
        for (after, left), ways in self.inside(module, taken + 1, length).items():
            if left and -(-left // self.ranks) * self.ranks == length:
                out[after, 0] = _apart([*out.get((after, 0), []), *(way.as_unit(taken) for way in ways)])
        return out

    def inside(self, module: _Module, taken: int, room: int) -> _Ways:
        """Ways of a module's contents, in order."""
        key = id(module), taken, room
        if key in self.known:
            return self.known[key]
        if len(self.known) > WAYS_MAX:
            raise _TooManyError
        here: _Ways = {(taken, 0): [_Way()]}
        for like, some in groupby(module.inside, key=self.like):
            if isinstance(like, int):
                here = _joined(here, partial(self.single, like), room)
            else:
                alike = [one for one in some if isinstance(one, _Module)]
                here = _joined(here, partial(self.at, alike), room)
        self.known[key] = here
        return here

    def single(self, parameter: int, taken: int, room: int) -> _Ways:
        numel = prod(self.params[parameter][1])
        return {(taken, numel): [_Way((parameter,), (), (hash((parameter,)), 0))]} if numel <= room else {}

    def like(self, one: _Module | int) -> int | tuple[object, ...]:
        """A parameter's number, or the shapes of a module's contents."""
        if isinstance(one, int):
            return one
        if one.like is None:
            one.like = tuple(self.params[i][1] if isinstance(i, int) else self.like(i) for i in one.inside)
        return one.like


def _joined(here: _Ways, following: Callable[[int, int], _Ways], room: int) -> _Ways:
    """Continue each way by the ways of the following modules.

    following: gives these, for a count of numbers that are taken.
    """
    out: _Ways = {}
    for (number, left), ways in here.items():
        for (after, more), others in following(number, room).items():
            if left + more <= room:
                place = after, left + more
                out[place] = _apart([*out.get(place, []), *(way.then(other) for way in ways for other in others)])
    return out


def _apart(ways: Sequence[_Way]) -> list[_Way]:
    """Two of them that differ, at most."""
    return list({way.marks: way for way in ways}.values())[:2]


class _TooManyError(Exception):
    pass


def _flattened(tree: _Tree) -> list[int]:
    out, stack = list[int](), list[_Tree | int]([tree])
    while stack:
        one = stack.pop()
        if isinstance(one, int):
            out.append(one)
        else:
            stack += reversed(one)
    return out
