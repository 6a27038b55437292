"""Values for list parameters without a default, found by search.

The text shows the use of a list: `where(p, 1)` asks for kinds, `@tp[p]` for the sizes of pieces, `l[p]` for indices, `by l`
for sizes. A first list is drawn, and changed item by item until the layout holds. A list suits one degree and maybe no other.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Literal

from attrs import evolve

from ucpl.conversion.degrees import Degrees, ListTrial, call_at
from ucpl.conversion.error_causes import same_place
from ucpl.errors import Diagnostic, UcplError
from ucpl.language import nodes, print_expr
from ucpl.language.walk import walk
from ucpl.layout import Library
from ucpl.layout.scope import Config, Scope, Value
from ucpl.layout.statements import items_of
from ucpl.records import frozen

__all__ = ["ListParameter", "call_with_lists", "dims_of", "list_parameters", "lists_text"]

OTHERS = (0, 1, 9)  # values besides those that the text asks for
ATTEMPTS_MAX = 240
STARTS_MAX = 4
_WITHOUT_VALUES = ("E101", "E105")  # of other names than the lists
_DIGITS_MAX = 6
_ALIKE = 3  # lists with one fault in one place: the fault is the text's
_NUMBERS = re.compile(r"[0-9]+")

CHANGES_MAX = 60  # of one list, until one has another fault
Items = tuple[nodes.Expr, ...]
Lists = dict[str, Items]
Attempt = Callable[[nodes.Call], None]  # raises UcplError where the layout does not hold


@frozen
class ListParameter:
    """A parameter that the text uses as a list, and its use."""

    name: str
    use: Literal["kinds", "pieces", "indices", "sizes"]
    dim: str = ""
    axis: str = ""  # of pieces: the mesh axis
    asked: Items = ()  # of kinds: the values that the text asks for

    def first(self, sizes: Mapping[str, int], degrees: Degrees, chance: random.Random) -> Items:
        size = sizes.get(self.dim, 4)
        match self.use:
            case "kinds":
                drawn = [*self.asked, *(chance.choice(self.values) for _ in range(size))][:size]
                return tuple(chance.sample(drawn, size))
            case "pieces":
                count = degrees.get(self.axis, sizes.get(self.axis, 1))
                even = [size // count + (i < size % count) for i in range(count)]
                if count > 1 and even[-1] > 1:
                    even[0], even[-1] = even[0] + 1, even[-1] - 1
                return tuple(map(nodes.Number, even))
            case "indices":
                return tuple(map(nodes.Number, sorted(chance.sample(range(size), size // 2))))
            case "sizes":
                return tuple(nodes.Number(chance.choice((4, 6, 12))) for _ in range(size))

    @property
    def values(self) -> Items:
        return tuple(dict.fromkeys((*self.asked, *map(nodes.Number, OTHERS)))) if self.use == "kinds" else ()

    def changed(self, items: Items, message: str) -> Iterator[Items]:
        """Lists with one other item, first at positions that a message names."""
        named = [*re.findall(rf"\b{re.escape(self.dim)}=([0-9]+)", message), *_NUMBERS.findall(message)]
        positions = [i for i in map(int, (n for n in named if len(n) < _DIGITS_MAX)) if i < len(items)]
        for i in dict.fromkeys((*positions, *range(len(items)))):
            yield from ((*items[:i], value, *items[i + 1 :]) for value in self.values if value != items[i])


def list_parameters(library: Library, node: nodes.Layout) -> tuple[ListParameter, ...]:
    """Parameters of a layout without a default that are lists."""
    open_ones = {p.name for p in node.parameters if p.default is None}
    found: dict[str, ListParameter] = {}
    items = items_of(library, nodes.Call(node.name)) if open_ones else []
    bound = {b.name: b.value for i in items if isinstance(i, nodes.Let | nodes.Dims) for b in i.bindings}
    for item in walk(*items):
        for one in _uses(item, bound) if type(item) in _USING else ():
            if one.name in open_ones:
                before = found.get(one.name, one)
                found[one.name] = evolve(
                    before, dim=before.dim or one.dim, asked=tuple(dict.fromkeys((*before.asked, *one.asked)))
                )
    return tuple(found[p.name] for p in node.parameters if p.name in found)


def dims_of(
    model: nodes.Model, node: nodes.Layout, library: Library, given: Mapping[str, Value], config: Config
) -> dict[str, int]:
    """Sizes of the dims that list parameters are about."""
    scope = Scope(given=dict(given), config=config)
    scope.bind(s for file in library.files.values() for s in file.statements)
    scope.bind(model.items)
    found = {}
    for one in list_parameters(library, node):
        try:
            found[one.dim] = scope.size(one.dim, nodes.NOWHERE) if scope.knows(one.dim) else 0
        except UcplError:  # the layout's own resolution reports it
            continue
    return {name: size for name, size in found.items() if size}


_USING = frozenset((nodes.Function, nodes.Dim, nodes.Cut, nodes.Binding))  # kinds of nodes that use a list


def _uses(node: object, bound: Mapping[str, nodes.Expr]) -> Iterator[ListParameter]:
    match node:
        case nodes.Function(name="where", args=(nodes.Name(path=name), *asked)):
            yield ListParameter(
                name, "kinds", asked=tuple(a for a in asked if isinstance(a, nodes.Number | nodes.Text))
            )
        case nodes.Dim(name=dim, range=nodes.Among(items=items)):
            for item in items:
                value = bound.get(item.path, item) if isinstance(item, nodes.Name) else item
                if isinstance(value, nodes.Function):
                    yield from (evolve(one, dim=dim) for one in _uses(value, bound))
                elif isinstance(value, nodes.Name):
                    yield ListParameter(value.path, "indices", dim)
        case nodes.Cut(axis=axis, splits=splits):
            dims = [one.name for one in walk(axis) if isinstance(one, nodes.Dim)]
            for split in splits:
                if split.kind == "sizes" and len(split.sizes) == 1 and isinstance(split.sizes[0], nodes.Name):
                    yield ListParameter(split.sizes[0].path, "pieces", dims[0] if dims else "", split.mesh_axis)
        case nodes.Binding(value=nodes.Name(path=name), by=str(dim)):
            yield ListParameter(name, "sizes", dim)


def call_with_lists(
    node: nodes.Layout,
    degrees: Degrees,
    lists: Sequence[ListParameter],
    sizes: Mapping[str, int],
    attempt: Attempt,
) -> nodes.Call:
    """The call at some degrees, with lists that suit them.

    Raises: UcplError of the last list, marked as a trial unless all lists have one fault.
    """
    if not lists:
        return call_at(node, degrees)
    search = _Search(node, degrees, attempt)
    for start in range(STARTS_MAX):
        chance = random.Random(f"{node.name} {degrees} {start}")
        now: Lists | None = {one.name: one.first(sizes, degrees, chance) for one in lists}
        while now is not None:
            found = search.fails(now)
            if found is None:
                return search.call(now)
            now = search.better(now, lists, found.message)
        if search.count > ATTEMPTS_MAX or len(search.messages) == 1:
            break
    raise search.error()


class _Search:
    def __init__(self, node: nodes.Layout, degrees: Degrees, attempt: Attempt) -> None:
        self.node, self.degrees, self.attempt = node, degrees, attempt
        self.count = 0
        self.found: list[Diagnostic] = []
        self.messages: set[str] = set()

    def better(self, now: Lists, lists: Sequence[ListParameter], message: str) -> Lists | None:
        """Lists with another fault than all before, or without one."""
        for one in lists:
            for items in islice(one.changed(now[one.name], message), CHANGES_MAX):
                new, known = {**now, one.name: items}, len(self.messages)
                if self.count > ATTEMPTS_MAX:
                    return None
                if self.fails(new) is None or len(self.messages) > known:
                    return new
        return None

    def call(self, lists: Lists) -> nodes.Call:
        call = call_at(self.node, self.degrees)
        drawn = (nodes.Argument(name, nodes.List(items)) for name, items in lists.items())
        return evolve(call, arguments=(*call.arguments, *drawn))

    def fails(self, lists: Lists) -> Diagnostic | None:
        self.count += 1
        try:
            self.attempt(self.call(lists))
        except UcplError as error:
            found = error.diagnostics[0]
            if found.code in _WITHOUT_VALUES:
                raise
            self.found.append(found)
            self.messages.add(found.message)
            return found
        return None

    def error(self) -> UcplError:
        first, last = self.found[0], self.found[-1]
        if len(self.found) >= _ALIKE and all(same_place(first, other) for other in self.found):
            return UcplError(last)
        return UcplError(evolve(last, about=ListTrial()))


def lists_text(call: nodes.Call) -> str:
    """The lists of a call, as it writes them."""
    return ", ".join(f"{a.name} = {print_expr(a.value)}" for a in call.arguments if isinstance(a.value, nodes.List))
