"""Trial degrees of a layout: the least above 1 that divide.

Each axis of the mesh is tried alone, then all axes together. At degree 1 nothing is cut, so mistakes in cuts stay hidden: two
ranks that write one file, or half of a tensor on no rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice

from attrs import evolve, field

from ucpl.errors import Diagnostic, UcplError
from ucpl.language import nodes
from ucpl.language.walk import walk
from ucpl.layout import Library
from ucpl.layout.bases import placed
from ucpl.layout.statements import items_of
from ucpl.layout.templates import UnevenPlace
from ucpl.records import define, frozen

__all__ = [
    "OF_A_NUMBER",
    "Degrees",
    "ListTrial",
    "Tried",
    "call_at",
    "combinations",
    "degrees_of",
    "degrees_text",
    "depends_on_numbers",
    "is_part",
    "open_parameters",
    "try_degrees",
]

Degrees = dict[str, int]
Attempt = Callable[[Degrees], None]  # raises UcplError where the layout does not hold at these degrees

ALONE = range(2, 9)
TOGETHER = (2, 3, 4, 1)
TOGETHER_MAX = 27  # combinations
_TOO_MANY = "E141"

# Findings that depend on a number. If the number is a trial value, they are no evidence against the file.
# E211: an order that only a checkpoint states.
OF_A_NUMBER = frozenset(
    ("E104", "E108", "E132", "E140", "E141", "E142", "E143", "E144", "E145", "E149", "E160", "E161")
    + ("E202", "E203", "E204", "E206", "E210", "E211", "E214", "E216", "E231")
)


@frozen
class ListTrial:
    """The mark of an error at a drawn list: another may suit."""


def depends_on_numbers(error: UcplError) -> bool:
    found = error.diagnostics[0]
    return found.code in OF_A_NUMBER or isinstance(found.about, ListTrial)


def degrees_of(library: Library, node: nodes.Layout) -> tuple[str, ...]:
    """Parameters of a layout that determine axes of a mesh.

    The mesh can belong to a layout that it extends or uses. A parameter determines an axis through numbers: tp does in
    `let groups = gcd(tp, g), copies = tp / groups` and `mesh groups copies`.
    """
    items = items_of(library, nodes.Call(node.name))
    values = {b.name: b.value for i in items if isinstance(i, nodes.Let | nodes.Dims) for b in i.bindings}
    found: set[str] = set()
    open_names = [axis for item in items if isinstance(item, nodes.Mesh) for axis in item.axes]
    while open_names:
        name = open_names.pop()
        if name not in found:
            found.add(name)
            open_names += [n.path for n in walk(values[name]) if isinstance(n, nodes.Name)] if name in values else []
    return tuple(p.name for p in node.parameters if p.name in found)


def is_part(library: Library, file: nodes.File, node: nodes.Layout) -> bool:
    """True if a layout is used by others and incomplete alone."""
    return is_used(file, node) and (not has_files(library, node) or bool(open_parameters(library, node)))


def is_used(file: nodes.File, node: nodes.Layout) -> bool:
    """True if other layouts of the file extend or use this one."""
    layouts = [s for s in file.statements if isinstance(s, nodes.Layout)]
    called = [s.extends for s in layouts] + [i.call for s in layouts for i in s.items if isinstance(i, nodes.Use)]
    return any(c is not None and c.name == node.name for c in called)


def has_files(library: Library, node: nodes.Layout) -> bool:
    return any(isinstance(i, nodes.Files) for i in items_of(library, nodes.Call(node.name)))


def open_parameters(library: Library, node: nodes.Layout) -> tuple[str, ...]:
    """Parameters of a layout's model without argument and without default."""
    if node.of == "any":
        return ()
    model = library.model(node.of, node.span).node
    assert isinstance(model, nodes.Model)
    said = placed(model.parameters, nodes.Call(node.of, node.arguments, span=node.span))
    return tuple(p.name for p in model.parameters if p.default is None and p.name not in said)


def call_at(node: nodes.Layout, degrees: Degrees) -> nodes.Call:
    return nodes.Call(node.name, tuple(nodes.Argument(k, nodes.Number(v)) for k, v in degrees.items()))


def degrees_text(degrees: Degrees) -> str:
    return ", ".join(f"{k} = {v}" for k, v in degrees.items())


@frozen
class Tried:
    """The result of trials: degrees that hold, and axes without any.

    Each such axis has its reason.
    """

    good: tuple[Degrees, ...]
    unsuited: tuple[tuple[str, str], ...] = ()
    too_many: str = ""  # why all axes were not tried together: their ranks are more than a mesh may have
    hopeless: tuple[Diagnostic, ...] = ()  # reasons for which no degree above 1 can suit an axis


def try_degrees(base: Degrees, axes: tuple[str, ...], attempt: Attempt) -> Tried:
    """Try each axis alone from `base`, then all axes together.

    Raises: UcplError of `attempt`, with the degrees as a note.
    """
    search = _Search(base, attempt)
    least = {axis: n for axis in axes if (n := search.alone(axis)) is not None}
    if len(axes) > 1:
        search.together(axes, least)
    reached = {axis for degrees in search.good for axis in axes if degrees[axis] > 1}
    unsuited = tuple((a, search.why[a]) for a in axes if a not in reached and a in search.why)
    hopeless = tuple(d for axis, d in search.hopeless.items() if axis not in reached)
    return Tried(
        tuple(search.good), tuple(u for u in unsuited if u[0] not in search.hopeless), search.too_many, hopeless
    )


@define
class _Search:
    base: Degrees
    attempt: Attempt
    good: list[Degrees] = field(factory=list)
    why: dict[str, str] = field(factory=dict)  # of an axis: why its least degree does not suit
    too_many: str = ""
    hopeless: dict[str, Diagnostic] = field(factory=dict)
    last: Diagnostic | None = None  # the finding of the last degrees that did not suit

    def alone(self, axis: str) -> int | None:
        if self.base[axis] > 1:  # a default that is a degree is tried unchanged
            return self.base[axis]
        found: list[Diagnostic] = []
        for n in ALONE:
            if self.holds({**self.base, axis: n}, axis):
                return n
            if self.last is not None and isinstance(self.last.about, UnevenPlace):
                found.append(_noted(self.last, {**self.base, axis: n}))
        # Coordinate 1 is there at every degree above 1: a division by a number that no degree changes fails at all of them.
        if len(found) > 1 and len({d.message for d in found}) == 1:
            self.hopeless[axis] = found[0]
        return None

    def together(self, axes: tuple[str, ...], least: Degrees) -> None:
        """Try the least degrees, then combinations until one holds.

        If degree 2 on all axes has too many ranks, no combination is possible.
        """
        for degrees in islice(combinations(axes, least), TOGETHER_MAX):
            self.too_many = ""
            if self.holds({**self.base, **degrees}) or (self.too_many and set(degrees.values()) == {2}):
                return
        self.too_many = ""

    def holds(self, degrees: Degrees, axis: str = "") -> bool:
        if degrees in self.good:
            return True
        try:
            self.attempt(degrees)
        except UcplError as error:
            self.last = error.diagnostics[0]
            if depends_on_numbers(error):
                if error.diagnostics[0].code == _TOO_MANY:
                    self.too_many = error.diagnostics[0].message
                self.why.setdefault(axis, f"at {degrees_text(degrees)}, {error.diagnostics[0].message}")
                return False
            raise UcplError(*(_noted(d, degrees) for d in error.diagnostics)) from None
        self.good.append(degrees)
        return True


def combinations(axes: tuple[str, ...], least: Degrees) -> Iterator[Degrees]:
    """The least degrees, then combinations of TOGETHER.

    Combinations with few ones come first, and among these small sums.
    """
    yield {axis: least.get(axis, 2) for axis in axes}
    for ones in range(len(axes) + 1):
        for total in range(_bounds(len(axes), ones)[0], _bounds(len(axes), ones)[1] + 1):
            yield from (dict(zip(axes, c, strict=True)) for c in _with_sum(len(axes), ones, total))


def _bounds(count: int, ones: int) -> tuple[int, int]:
    """The least and the greatest sum of `count` numbers of TOGETHER.

    ones: how many of them are 1.
    """
    above = [n for n in TOGETHER if n > 1]
    return ones + (count - ones) * min(above), ones + (count - ones) * max(above)


def _with_sum(count: int, ones: int, total: int) -> Iterator[tuple[int, ...]]:
    """Generate combinations lazily.

    There are 4 ** count of them; the caller uses a few.
    """
    if count == 0:
        yield ()
        return
    for n in TOGETHER:
        left = count - 1, ones - (n == 1)
        if 0 <= left[1] <= left[0] and _bounds(*left)[0] <= total - n <= _bounds(*left)[1]:
            yield from ((n, *rest) for rest in _with_sum(*left, total - n))


def _noted(d: Diagnostic, degrees: Degrees) -> Diagnostic:
    return evolve(d, notes=(*d.notes, f"at {degrees_text(degrees)}"))
