"""A stored axis on one rank as a tree of runs.

It is the list of cells of the language, never enumerated. `( )` multiplies and adds, `@` slices, `pad` extends. A slice
of a product is at most a ragged head, a full middle and a ragged tail per level, so that a cut of k digits gives at
most 2k - 1 boxes.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

from attrs import evolve

from ucpl.layout import FileRule, Layout
from ucpl.layout import axes as ax
from ucpl.records import frozen
from ucpl.registry import format_named

Digit = tuple[str, int, int, int]  # (name, low, high, stride in elements)


@frozen(slots=False)
class DimRange:
    """Indices low..high of one dim (or digit)."""

    dim: str
    low: int
    high: int

    @cached_property
    def length(self) -> int:
        return self.high - self.low


@frozen(slots=False)
class Padding:
    """Cells that belong to no tensor.

    Live ones are further indices of `dim`: the first is `low` behind its end.
    """

    count: int
    kind: ax.PadKind = "zero"
    dim: str | None = None
    low: int = 0

    @cached_property
    def length(self) -> int:
        return self.count


@frozen(slots=False)
class Same:
    """Positions with equal elements, of no dim."""

    count: int

    @cached_property
    def length(self) -> int:
        return self.count


@frozen(slots=False)
class Product:
    """Row-major: the last factor runs fastest."""

    factors: tuple[Cells, ...]

    @cached_property
    def length(self) -> int:
        out = 1
        for f in self.factors:
            out *= f.length
        return out


@frozen(slots=False)
class Concat:
    """End to end."""

    parts: tuple[Cells, ...]

    @cached_property
    def length(self) -> int:
        return sum(p.length for p in self.parts)


@frozen(slots=False)
class Labelled:
    """Cells that belong to one logical tensor.

    It is the tensor of the label (`q:`), or member `tag` of a flat.
    """

    label: str | None
    cells: Cells
    tag: int | None = None

    @cached_property
    def length(self) -> int:
        return self.cells.length


Cells = DimRange | Padding | Same | Product | Concat | Labelled


def cut(cells: Cells, low: int, high: int) -> Cells:
    """Cells low..high of the list."""
    length = cells.length
    low, high = max(0, low), min(length, high)
    if low >= high:
        return Concat(())
    if (low, high) == (0, length):
        return cells
    match cells:
        case DimRange():
            return DimRange(cells.dim, cells.low + low, cells.low + high)
        case Padding():
            return Padding(high - low, cells.kind, cells.dim, cells.low + low)
        case Same():
            return Same(high - low)
        case Labelled():
            return Labelled(cells.label, cut(cells.cells, low, high), cells.tag)
        case Concat(parts=parts):
            out, start = [], 0
            for part in parts:
                stop = start + part.length
                if start < high and low < stop:
                    out.append(cut(part, low - start, high - start))
                start = stop
                if start >= high:
                    break
            return out[0] if len(out) == 1 else Concat(tuple(out))
        case Product(factors=(only,)):
            return cut(only, low, high)
        case Product(factors=(first, *rest)):
            inner = rest[0] if len(rest) == 1 else Product(tuple(rest))
            row = inner.length
            top, bottom = low // row, (high - 1) // row
            if top == bottom:
                return Product((cut(first, top, top + 1), cut(inner, low - top * row, high - top * row)))
            pieces: list[Cells] = []
            full_low, full_high = top, bottom + 1
            if low != top * row:
                pieces.append(Product((cut(first, top, top + 1), cut(inner, low - top * row, row))))
                full_low += 1
            tail: list[Cells] = []
            if high != (bottom + 1) * row:
                tail.append(Product((cut(first, bottom, bottom + 1), cut(inner, 0, high - bottom * row))))
                full_high -= 1
            if full_low < full_high:
                pieces.append(Product((cut(first, full_low, full_high), inner)))
            return Concat((*pieces, *tail))
    raise TypeError(cells)


def trim(cells: Cells) -> Cells:
    """Cells without the padding at the end.

    Live rows stay: training changes them as it changes others.
    """
    match cells:
        case Padding():
            return cells if cells.kind == "live" else Concat(())
        case Concat(parts=parts):
            kept = list(parts)
            while kept:
                last = trim(kept[-1])
                if last.length:
                    kept[-1] = last
                    break
                kept.pop()
            return Concat(tuple(kept))
        case Labelled():
            return Labelled(cells.label, trim(cells.cells), cells.tag)
        case Product(factors=factors):
            padded = _padding_at_end(cells)
            return cut(cells, 0, cells.length - padded) if padded else Product(factors)
    return cells


def _padding_at_end(cells: Cells) -> int:
    """Number of padding cells at the end.

    Of a product, rows that are padding at their end count completely.
    """
    match cells:
        case Padding():
            return 0 if cells.kind == "live" else cells.length
        case DimRange() | Same():
            return 0
        case Labelled():
            return _padding_at_end(cells.cells)
        case Concat(parts=parts):
            total = 0
            for part in reversed(parts):
                here = _padding_at_end(part)
                total += here
                if here < part.length:
                    break
            return total
        case Product(factors=(only,)):
            return _padding_at_end(only)
        case Product(factors=(first, *rest)):
            inner = rest[0] if len(rest) == 1 else Product(tuple(rest))
            rows, tail = _padding_at_end(first), _padding_at_end(inner)
            if rows == first.length or tail == inner.length:
                return cells.length
            return rows * inner.length + tail
    raise TypeError(cells)


def build(
    axis: ax.Axis,
    sizes: dict[str, int],
    degrees: dict[str, int],
    here: dict[str, int],
    bound: dict[str, ax.Axis] | None = None,
    each: Cells | None = None,
    flat: list[Cells] | None = None,
) -> Cells:
    """Cells of one axis at the mesh coordinates `here`.

    bound: index rules that names stand for (inside brackets only). each, flat: the cells that those words mean here.
    Raises UnevenCut for a cut that leaves a remainder.
    """

    def inner(node: ax.Axis) -> Cells:
        return build(node, sizes, degrees, here, bound, each, flat)

    match axis:
        case ax.Dim(name=name):
            if bound and name in bound:
                rest = {k: v for k, v in bound.items() if k != name}
                return build(bound[name], sizes, degrees, here, rest, each, flat)
            return DimRange(name, axis.low, sizes[name] if axis.high is None else axis.high)
        case ax.Stack(terms=terms):
            parts: list[Cells] = []
            for term in terms:
                factors = tuple(map(inner, term.axes))
                cells: Cells = factors[0] if len(factors) == 1 else Product(factors)
                parts.append(cells if term.label is None else Labelled(term.label, cells))
            return parts[0] if len(parts) == 1 else Concat(tuple(parts))
        case ax.Pad(axis=node, multiple=multiple, kind=kind):
            cells = inner(node)
            missing = -cells.length % multiple
            dim = cells.dim if kind == "live" and isinstance(cells, DimRange) else None
            return Concat((cells, Padding(missing, kind, dim))) if missing else cells
        case ax.Trim(axis=node):
            return trim(inner(node))
        case ax.Cut(axis=node, splits=splits):
            cells = inner(node)
            for split in splits:
                low, high = ax.piece_of(split, cells.length, degrees[split.mesh_axis], here[split.mesh_axis])
                cells = cut(cells, low, high)
            return cells
        case ax.Copies(count=count):
            return Same(count)
        case ax.Each():
            assert each is not None
            return each
        case ax.Flat(axis=node):
            assert flat is not None
            return Concat(tuple(build(node, sizes, degrees, here, bound, one, flat) for one in flat))
    raise TypeError(axis)


@frozen
class DigitBox:
    """A box of digits at `offset`, each digit with its stride.

    `offset` is the place of element (0, 0, ...). live: the dim of its live rows, whose indices count from the dim's
    end.
    """

    label: str | None
    tag: int | None
    digits: tuple[Digit, ...]
    offset: int
    live: str | None = None


def pieces_of(cells: Cells) -> list[DigitBox]:
    """All boxes of a list of cells.

    Padding is in none, but live rows of a dim are.
    """
    match cells:
        case DimRange(dim=dim, low=low, high=high):
            return [DigitBox(None, None, ((dim, low, high, 1),), 0)] if high > low else []
        case Same(count=count):
            return [DigitBox(None, None, (), n) for n in range(count)]
        case Padding(dim=None):
            return []
        case Padding(dim=str(dim), low=low):
            return [DigitBox(None, None, ((dim, low, low + cells.count, 1),), 0, dim)] if cells.count else []
        case Labelled(label=label, tag=tag):
            return [
                DigitBox(
                    label if label is not None else p.label,
                    tag if tag is not None else p.tag,
                    p.digits,
                    p.offset,
                    p.live,
                )
                for p in pieces_of(cells.cells)
            ]
        case Concat(parts=parts):
            out: list[DigitBox] = []
            start = 0
            for part in parts:
                out += [DigitBox(p.label, p.tag, p.digits, p.offset + start, p.live) for p in pieces_of(part)]
                start += part.length
            return out
        case Product(factors=factors):
            found = [DigitBox(None, None, (), 0)]
            for factor in factors:
                row = factor.length
                mine = pieces_of(factor)
                found = [
                    DigitBox(
                        outer.label if outer.label is not None else p.label,
                        outer.tag if outer.tag is not None else p.tag,
                        (*((d, a, b, s * row) for d, a, b, s in outer.digits), *p.digits),
                        outer.offset * row + p.offset,
                        outer.live or p.live,
                    )
                    for outer in found
                    for p in mine
                ]
            return found
    raise TypeError(cells)


def behind(piece: DigitBox, count: int) -> DigitBox:
    """A box of live rows, with indices from the dim's begin.

    The dim has `count` indices.
    """
    digits = ((d, a + count, b + count, s) if d == piece.live else (d, a, b, s) for d, a, b, s in piece.digits)
    return evolve(piece, digits=tuple(digits), live=None)


def padding_of(cells: Cells) -> dict[ax.PadKind, int]:
    """Number of padding cells by kind."""
    match cells:
        case DimRange() | Same():
            return {}
        case Padding():
            return {cells.kind: cells.count}
        case Labelled():
            return padding_of(cells.cells)
        case Concat(parts=parts):
            total: dict[ax.PadKind, int] = {}
            for part in parts:
                for kind, n in padding_of(part).items():
                    total[kind] = total.get(kind, 0) + n
            return total
        case Product(factors=factors):
            real = 1
            kinds: set[ax.PadKind] = set()
            for f in factors:
                inner = padding_of(f)
                kinds |= set(inner)
                real *= f.length - sum(inner.values())
            missing = cells.length - real
            return {kind: missing * (n == 0) for n, kind in enumerate(sorted(kinds))} if missing else {}
    raise TypeError(cells)


# ---- the begin of a box ----------------------------------------------------------------------------------------------


def is_by_begin(rule: FileRule, layout: Layout) -> bool:
    """True if a file's stored tensors are found by key and begin.

    The begin is its place in the uncut tensor. Without a framework, a form is any word, and files are distinguished by
    their names.
    """
    return format_named(layout.framework).stores_chunks(rule.form)


class BrokenRun(Exception):
    """Error: a rank has no single run of the axis."""


def begin_of(axis: ax.Axis, sizes: dict[str, int], degrees: Mapping[str, int], here: dict[str, int]) -> int:
    """Positions of the axis before those that a rank has. Raises: BrokenRun."""
    return _run(axis, sizes, dict(degrees), here)[0]


def _run(axis: ax.Axis, sizes: dict[str, int], degrees: dict[str, int], here: dict[str, int]) -> tuple[int, int]:
    """(begin, length) of a rank's run."""
    match axis:
        case ax.Cut(axis=inner, splits=splits):
            begin, length = _run(inner, sizes, degrees, here)
            for split in splits:
                low, high = ax.piece_of(split, length, degrees[split.mesh_axis], here[split.mesh_axis])
                begin, length = begin + low, high - low
            return begin, length
        case ax.Stack(terms=(ax.Term(axes=factors),)) if ax.mesh_axes_of(axis):
            begin, length = 0, 1
            for factor in factors:  # row-major: the cut factor has single rows above it, and uncut ones below
                whole = build(ax.uncut(factor), sizes, degrees, here).length
                low, count = _run(factor, sizes, degrees, here)
                if length > 1 and count != whole:
                    raise BrokenRun
                begin, length = begin * whole + low, length * count
            return begin, length
        case _:
            if ax.mesh_axes_of(axis):
                raise BrokenRun
            return 0, build(axis, sizes, degrees, here).length
