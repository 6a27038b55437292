"""An axis is a list of cells.

A cell says, for one stored position, which index each named dim has there.
"""

from __future__ import annotations

from itertools import product
from math import ceil
from typing import Any

from attrs import frozen

from tests.oracle.names import Numbers, Refused
from ucpl.language import nodes


@frozen
class Padding:
    """A position that belongs to no tensor.

    If one of several axes is padding, it has the indices of the others.

    Live: it has the index that it would have in a longer dim. `of`: the tensor, and the index in positions of it.
    """

    kind: str = "zero"
    index: tuple[tuple[str, int], ...] = ()
    label: str | None = None
    of: Any = None

    @property
    def is_live(self) -> bool:
        return self.kind == "live"


@frozen
class Cell:
    index: tuple[tuple[str, int], ...] = ()
    label: str | None = None


def join(cells: tuple[Any, ...]) -> Any:
    """Cells of several axes read as one position.

    Padding in any of them is padding, and live only if all of it is.
    """
    pads = [c for c in cells if isinstance(c, Padding)]
    if pads:
        worst = max(pads, key=lambda p: ("live", "zero", "undefined").index(p.kind))
        label = next((c.label for c in cells if c.label), None)
        return Padding(worst.kind, tuple(i for c in cells for i in c.index), label)
    index: tuple[tuple[str, int], ...] = ()
    label = None
    for c in cells:
        if not isinstance(c, Cell):
            raise Refused("a tensor of a flat beside another axis")
        if label and c.label:
            raise Refused(f"a position cannot be part {label} and part {c.label}")
        index, label = index + c.index, label or c.label
    return Cell(index, label)


def cells_of(
    axis: nodes.Axis,
    numbers: Numbers,
    rank: dict[str, int],
    bound: dict[str, nodes.Axis] | None = None,
    each: list[Any] | None = None,
    flat: list[list[Any]] | None = None,
) -> list[Any]:
    """The cells of one stored axis on one rank.

    bound: the value of a name in brackets by an `index` statement.
    each, flat: cells of one tensor, of every tensor of the group.
    """

    def inner(node: nodes.Axis) -> list[Any]:
        return cells_of(node, numbers, rank, bound, each, flat)

    match axis:
        case nodes.Dim(name=name) if bound and name in bound:
            rest = {k: v for k, v in bound.items() if k != name}
            return cells_of(bound[name], numbers, rank, rest, each, flat)
        case nodes.Dim(name=name, range=within):
            return [Cell(((name, i),)) for i in numbers.among(within, numbers.name(name))]
        case nodes.Copies(count=count):
            return [Cell()] * numbers.value(count)
        case nodes.Each():
            assert each is not None
            return each
        case nodes.Flat(axis=node):
            assert flat is not None
            return [c for one in flat for c in cells_of(node, numbers, rank, bound, one, flat)]
        case nodes.Trim(axis=nodes.Cut()):
            raise Refused("trim the full tensor before it is cut: the end of one piece is not the end of the tensor")
        case nodes.Trim(axis=node):
            cells = inner(node)
            while cells and isinstance(cells[-1], Padding) and not cells[-1].is_live:
                cells = cells[:-1]
            return cells
        case nodes.Stack(terms=terms):
            out: list[Any] = []
            for term in terms:
                if len(term.axes) == 1:
                    cells = inner(term.axes[0])
                else:
                    cells = [join(combination) for combination in product(*map(inner, term.axes))]
                if term.label is not None:
                    cells = [join((c, Cell((), term.label))) for c in cells]
                out += cells
            return out
        case nodes.Pad(axis=node, multiple=multiple, kind=kind):
            cells = inner(node)
            more = -len(cells) % numbers.value(multiple)
            if kind != "live":
                return cells + [Padding(kind)] * more
            if not isinstance(node, nodes.Dim) or node.range is not None:
                raise Refused("live rows are further rows of a dim")
            return cells + [Padding(kind, ((node.name, len(cells) + i),)) for i in range(more)]
        case nodes.Cut(axis=node, splits=splits):
            cells = inner(node)
            for split in splits:
                cells = cells[piece_of(split, len(cells), numbers, rank)]
            return cells
    raise TypeError(f"no meaning for {axis}")


def piece_of(split: nodes.Split, length: int, numbers: Numbers, rank: dict[str, int]) -> slice:
    """The slice of an axis that one rank keeps."""
    ways, here = int(numbers.name(split.mesh_axis)), rank[split.mesh_axis]
    grain = 1 if split.grain is None else numbers.value(split.grain)
    match split.kind:
        case "sizes":
            ends = [0]
            for size in split.sizes:
                value = numbers.value(size)
                for one in value if isinstance(value, list) else [value]:
                    ends.append(ends[-1] + one)
            if ends[-1] != length or len(ends) != ways + 1:
                raise Refused(f"{len(ends) - 1} sizes that add up to {ends[-1]} do not cut {length}")
            return slice(ends[here], ends[here + 1])
        case "spread":  # as even as units allow, the larger pieces first
            if length % grain:
                raise Refused(f"{length} is no whole number of units of {grain}")
            sizes = [0] * ways
            for unit in range(length // grain):
                sizes[unit % ways] += grain
            start = sum(sizes[:here])
            return slice(start, start + sizes[here])
        case "chunk":  # ceiling-sized pieces, the last ones short or empty
            step = ceil(ceil(length / ways) / grain) * grain
            return slice(here * step, (here + 1) * step)
    if length % ways:
        raise Refused(f"{length} does not divide by {ways}")
    step = length // ways
    return slice(here * step, (here + 1) * step)
