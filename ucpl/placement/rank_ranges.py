"""Ranks that hold elements of some boxes.

before: boxes of logical tensors, and coordinates of all ranks as columns
after:  a mask of coordinates at which an entry can have an element of these boxes

The mask is computed for all coordinates at once, along each stored axis alone: a range bounds the axis' part of a dim. A
bound may be too wide, never too narrow: a coordinate that is kept for nothing has boxes that meet nothing. If ranges cannot
describe an axis, it leaves nothing out.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

import numpy as np

from ucpl.layout import axes as ax
from ucpl.layout.brackets import Indices
from ucpl.placement.entries import EntryPlacer
from ucpl.placement.placement import Pieces, Placement
from ucpl.placement.plain_locals import spans_of
from ucpl.records import frozen
from ucpl.tables import I64, Bools, distinct, each, numbered

__all__ = ["Wanted"]

Boxes = tuple[I64, I64]  # low and high, (N, K)
Columns = Mapping[str, I64]  # of each mesh axis: the coordinates along it
Label = str | None
Reached = dict[tuple[Label, str], tuple[I64, I64]]  # range of a dim under a label: low and high, by coordinate


PAIRS_AT_ONCE = 1 << 20


class _Unbounded(Exception):
    """An axis that no ranges bound."""


@frozen(eq=False)
class Wanted:
    """Boxes of logical tensors that somebody asks for."""

    boxes: dict[str, Boxes]  # by tensor

    @classmethod
    def of(cls, placement: Placement) -> Wanted:
        """Boxes of a placement, each once; live rows, too."""
        held = (table for p in placement.parts for table in (p.folded, p.live) if table is not None and len(table))
        tables = {id(table): table for table in held}
        every = Pieces.concat(tables.values(), max((t.width for t in tables.values()), default=1))
        if len(every):
            every = every.take(distinct([every.tensor, *every.low.T, *every.high.T]))
        every = every.take(np.argsort(every.tensor, kind="stable"))
        numbers = each(every.tensor)
        ends = [*np.searchsorted(every.tensor, numbers).tolist(), len(every)]
        of = {placement.tensors[t]: slice(a, b) for t, a, b in zip(numbers, ends, ends[1:], strict=False)}
        return cls({path: (every.low[rows], every.high[rows]) for path, rows in of.items()})

    def held(self, placer: EntryPlacer, columns: Columns, degrees: dict[str, int]) -> Bools:
        """Mask of coordinates at which an entry may have wanted elements."""
        count = len(next(iter(columns.values()))) if columns else 1
        out = np.zeros(count, dtype=np.bool_)
        wanted = {label: path for label, path in placer.entry.targets.items() if path in self.boxes}
        if not wanted:
            return out
        reached = _Reached(placer, columns, degrees, count)
        for label, path in wanted.items():
            out |= self._meets(path, label, reached)
        return out

    def _meets(self, path: str, label: Label, reached: _Reached) -> Bools:
        low, high = self.boxes[path]
        tensor = reached.placer.layout.placed[path]
        meets: Bools = np.ones((reached.count, len(low)), dtype=np.bool_)
        for i, (dim, has) in enumerate(zip(tensor.dims, tensor.indices, strict=True)):
            found = reached.of(label, dim)
            if found is None or (bounds := _positions(found, has)) is None:
                continue
            meets &= _crossed(bounds, (low[:, i], high[:, i]))
        found_any: Bools = np.any(meets, axis=1)
        return found_any


def _crossed(ranges: tuple[I64, I64], boxes: tuple[I64, I64]) -> Bools:
    """(coordinates, boxes): whether a coordinate's range shares an index with a box."""
    first, last = ranges
    low, high = boxes
    if len(first) * len(low) <= PAIRS_AT_ONCE:
        out: Bools = (first[:, None] < high) & (low < last[:, None]) & (first < last)[:, None]
        return out
    _, one, which = np.unique(
        numbered([first, last]), return_index=True, return_inverse=True
    )  # most have that of others
    first, last = first[one], last[one]
    made: Bools = ((first[:, None] < high) & (low < last[:, None]) & (first < last)[:, None])[which.reshape(-1)]
    return made


def _positions(values: tuple[I64, I64], has: Indices) -> tuple[I64, I64] | None:
    """A range of a dim's indices as one of a tensor's positions.

    None: they are in no order.
    """
    if isinstance(has, range) and has.start == 0 and has.step == 1:
        return values
    known = np.array(has, dtype=np.int64)
    if (known[1:] <= known[:-1]).any():
        return None
    low, high = (np.searchsorted(known, v).astype(np.int64) for v in values)
    return low, high


@frozen(eq=False, slots=False)
class _Reached:
    """Range of each dim of an entry, by coordinate."""

    placer: EntryPlacer
    columns: Columns
    degrees: dict[str, int]
    count: int

    def of(self, label: Label, dim: str) -> tuple[I64, I64] | None:
        """None: of any of its indices, as far as is known here."""
        for ranges in self.by_axis:
            for name in (label, None) if label is not None else (None,):
                if (name, dim) in ranges:
                    return ranges[name, dim]
        return None

    @cached_property
    def by_axis(self) -> list[Reached]:
        """Of each stored axis, and of each index in brackets."""
        out = []
        entry, layout = self.placer.entry, self.placer.layout
        for axis, bound in (*((a, False) for a in entry.shape), *((a, True) for a in entry.indices)):
            if not bound and any(isinstance(a, ax.Pad) and a.kind == "live" for a in ax.walk(axis)):
                continue  # rows behind the end of a dim may be anywhere
            bounds: Reached = {}
            try:
                node = self.node(axis, dict(layout.indices) if bound else {})
                node.ranges(np.zeros(self.count, dtype=np.int64), _full(node.length, self.count), None, bounds)
            except _Unbounded:
                continue
            out.append(bounds)
        return out

    def node(self, axis: ax.Axis, bound: Mapping[str, ax.Axis]) -> _Node:
        match axis:
            case ax.Dim(name=name):
                if name in bound:
                    return self.node(bound[name], {k: v for k, v in bound.items() if k != name})
                high = self.placer.layout.sizes[name] if axis.high is None else axis.high
                return _Range(name, axis.low, high)
            case ax.Stack(terms=terms):
                parts: list[_Node] = []
                for term in terms:
                    factors = tuple(self.node(a, bound) for a in term.axes)
                    made: _Node = factors[0] if len(factors) == 1 else _Product(factors)
                    parts.append(made if term.label is None else _Labelled(term.label, made))
                return parts[0] if len(parts) == 1 else _Sum(tuple(parts))
            case ax.Pad(axis=inner, multiple=multiple):
                node = self.node(inner, bound)
                return _Sum((node, _Nothing(-node.length % multiple)))
            case ax.Cut(axis=inner, splits=splits):
                node = self.node(inner, bound)
                for split in splits:
                    if split.kind == "sizes" and len(split.sizes) != self.degrees[split.mesh_axis]:
                        raise _Unbounded  # refused where it is placed
                    ways, here = self.degrees[split.mesh_axis], self.columns[split.mesh_axis]
                    node = _Slice(node, *spans_of(split, node.length, ways, here))
                return node
        raise _Unbounded  # a trimmed axis has the length of its rest


def _full(length: I64 | int, count: int) -> I64:
    out: I64 = np.broadcast_to(np.asarray(length, dtype=np.int64), (count,))
    return out


# ---- axes as runs of cells, at all coordinates -------------------------------------------------------------------------------


@frozen(eq=False)
class _Range:
    dim: str
    low: int
    high: int

    @property
    def length(self) -> I64 | int:
        return self.high - self.low

    def ranges(self, low: I64, high: I64, label: Label, out: Reached) -> None:
        """Put the range of each dim for cells low..high into `out`."""
        mine = self.low + low, self.low + high
        known = out.get((label, self.dim))
        if known is not None:  # of two terms of a sum: the range of either
            none, other = mine[0] >= mine[1], known[0] >= known[1]
            first = np.where(none, known[0], np.where(other, mine[0], np.minimum(mine[0], known[0])))
            last = np.where(none, known[1], np.where(other, mine[1], np.maximum(mine[1], known[1])))
            mine = first, last
        out[label, self.dim] = mine


@frozen(eq=False)
class _Nothing:
    """Padding."""

    length: I64 | int

    def ranges(self, low: I64, high: I64, label: Label, out: Reached) -> None:
        return


@frozen(eq=False)
class _Labelled:
    label: str
    node: _Node

    @property
    def length(self) -> I64 | int:
        return self.node.length

    def ranges(self, low: I64, high: I64, label: Label, out: Reached) -> None:
        self.node.ranges(low, high, self.label if label is None else label, out)


@frozen(eq=False)
class _Slice:
    node: _Node
    low: I64
    high: I64

    @property
    def length(self) -> I64 | int:
        return self.high - self.low

    def ranges(self, low: I64, high: I64, label: Label, out: Reached) -> None:
        self.node.ranges(self.low + low, self.low + high, label, out)


@frozen(eq=False)
class _Sum:
    parts: tuple[_Node, ...]

    @property
    def length(self) -> I64 | int:
        out: I64 | int = 0
        for part in self.parts:
            out = out + part.length
        return out

    def ranges(self, low: I64, high: I64, label: Label, out: Reached) -> None:
        start: I64 | int = 0
        for part in self.parts:
            length = part.length
            part.ranges(np.clip(low - start, 0, length), np.clip(high - start, 0, length), label, out)
            start = start + length


@frozen(eq=False)
class _Product:
    """Row-major product.

    A run within one row has a range of the inner factors; a run over several rows has all of them.
    """

    factors: tuple[_Node, ...]

    @property
    def length(self) -> I64 | int:
        out: I64 | int = 1
        for factor in self.factors:
            out = out * factor.length
        return out

    def ranges(self, low: I64, high: I64, label: Label, out: Reached) -> None:
        if not self.factors:
            return
        first, *rest = self.factors
        inner = _Product(tuple(rest))
        row = np.maximum(inner.length, 1)
        top, bottom = low // row, -(-high // row)
        bottom = np.where(high > low, bottom, top)
        first.ranges(top, bottom, label, out)
        if rest:
            alone = bottom - top == 1
            whole = _full(inner.length, len(low))
            begin, end = np.where(alone, low - top * row, 0), np.where(alone, high - top * row, whole)
            inner.ranges(begin, np.where(high > low, end, begin), label, out)


_Node = _Range | _Nothing | _Labelled | _Slice | _Sum | _Product
