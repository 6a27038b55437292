"""The length of a stored axis with one unknown dim.

Lengths are summed over the ranks of the cut. A part of a sum that the cut excludes counts once per piece.
"""

from __future__ import annotations

from math import prod

from ucpl.errors import UcplError
from ucpl.language import nodes
from ucpl.language.walk import walk
from ucpl.layout.arithmetic import NotWhole
from ucpl.layout.scope import Scope
from ucpl.records import frozen

__all__ = ["Length", "length_of", "ways_of"]

_UNKNOWN = ("E101", "E105")


@frozen
class Length:
    """`times` * x + `plus`, and less than `short` fewer if padded."""

    plus: int
    times: int = 0
    name: str | None = None  # x
    short: int = 0

    def size(self, total: int) -> int | None:
        """x of an axis of that length, or None."""
        size, rest = divmod(total - self.plus, self.times)
        return size if rest == 0 and size >= 0 else None

    def sizes(self, total: int) -> range:
        """All that x may be, where the axis is padded."""
        least, most = total - self.short + 1 - self.plus, total - self.plus
        return range(max(0, -(-least // self.times)), most // self.times + 1)


def number(scope: Scope, expr: nodes.Expr) -> int | None:
    """The value of an expression; None: unknown, or a list."""
    try:
        return scope.integer(expr)
    except UcplError as error:
        found = error.diagnostics[0]
        if found.code in _UNKNOWN or (isinstance(found.about, NotWhole) and isinstance(found.about.value, list)):
            return None
        raise


def ways_of(axis: nodes.Axis, scope: Scope) -> int | None:
    """The number of pieces of an axis over all mesh axes."""
    found = [number(scope, nodes.Name(a)) for a in sorted(_cutting(axis))]
    return None if None in found else prod(n for n in found if n is not None)


def _cutting(axis: nodes.Record) -> set[str]:
    return {s.mesh_axis for node in walk(axis) if isinstance(node, nodes.Cut) for s in node.splits}


def length_of(axis: nodes.Axis, scope: Scope, ways: int = 1) -> Length | None:
    """The total length of all pieces of an axis.

    ways: their number. None: they do not determine one dim.
    """
    match axis:
        case nodes.Dim():
            return _dim(axis, scope, ways)
        case nodes.Cut(axis=inner, splits=splits):
            own = prod(number(scope, nodes.Name(s.mesh_axis)) or 0 for s in splits)
            return length_of(inner, scope, ways // own) if own and ways % own == 0 else None
        case nodes.Pad(axis=inner, multiple=multiple):
            return _padded(length_of(inner, scope), number(scope, multiple), ways)
        case nodes.Trim(axis=inner):
            return length_of(inner.axis if isinstance(inner, nodes.Pad) else inner, scope, ways)
        case nodes.Copies(count=count):
            times = number(scope, count)
            return None if times is None else Length(times * ways)
        case nodes.Stack(terms=terms):
            return _sum([_product(term.axes, scope, ways) for term in terms])
    return None


def _dim(dim: nodes.Dim, scope: Scope, ways: int) -> Length | None:
    size = number(scope, nodes.Name(dim.name))
    if dim.range is None:
        return Length(0, ways, dim.name) if size is None else Length(size * ways)
    if dim.range.others or len(dim.range.items) != 1 or not isinstance(part := dim.range.items[0], nodes.Range):
        return None
    low = 0 if part.start is None else number(scope, part.start)
    high = size if part.stop is None else number(scope, part.stop)
    if low is None or part.step is not None:
        return None
    if part.stop is None and size is None:
        return Length(-low * ways, ways, dim.name)
    return None if high is None else Length((high - low) * ways)


def _padded(inner: Length | None, multiple: int | None, ways: int) -> Length | None:
    if inner is None or multiple is None or multiple < 1 or inner.short:
        return None
    if inner.name is None:
        return Length(-(-inner.plus // multiple) * multiple * ways)
    return Length(inner.plus, inner.times, inner.name, multiple) if ways == 1 else None


def _product(axes: tuple[nodes.Axis, ...], scope: Scope, ways: int) -> Length | None:
    """The length of a product of axes.

    A cut of one factor cuts the product, and no mesh axis cuts two of them.
    """
    cuts = [_cutting(axis) for axis in axes]
    if sum(map(len, cuts)) != len(set[str]().union(*cuts)):
        return None
    degrees = [ways_of(axis, scope) for axis in axes]
    own = prod(n or 0 for n in degrees)
    if not own or ways % own:
        return None
    lengths = [length_of(axis, scope, n or 1) for axis, n in zip(axes, degrees, strict=True)]
    open_ones = [n for n in lengths if n is not None and n.name is not None]
    if None in lengths or len(open_ones) > 1:
        return None
    rest = prod((n.plus for n in lengths if n is not None and n.name is None), start=ways // own)
    if not open_ones:
        return Length(rest)
    (x,) = open_ones
    if x.short and rest != 1:
        return None
    return Length(x.plus * rest, x.times * rest, x.name, x.short)


def _sum(terms: list[Length | None]) -> Length | None:
    known = [t for t in terms if t is not None]
    names = {t.name for t in known if t.name is not None}
    if len(known) != len(terms) or len(names) > 1 or (len(terms) > 1 and any(t.short for t in known)):
        return None
    short = known[0].short if len(known) == 1 else 0
    return Length(sum(t.plus for t in known), sum(t.times for t in known), next(iter(names), None), short)
