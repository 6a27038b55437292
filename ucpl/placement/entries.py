"""Entries on ranks: stored boxes of logical tensors at each coordinate."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Mapping
from itertools import product
from math import prod
from typing import TypeVar

import numpy as np
from attrs import field
from numpy.typing import NDArray

from ucpl.errors import Diagnostic, Label, UcplError, fail
from ucpl.layout import Entry, Layout, LogicalTensor
from ucpl.layout import axes as ax
from ucpl.layout.brackets import Indices, before, places_of
from ucpl.layout.remedies import for_cut, for_dealt
from ucpl.layout.scope import at
from ucpl.placement.cells import (
    BrokenRun,
    Cells,
    Concat,
    DimRange,
    Labelled,
    Product,
    begin_of,
    build,
    cut,
    padding_of,
    pieces_of,
)
from ucpl.placement.logical_rows import LogicalRows, Row
from ucpl.records import define, frozen

I64 = NDArray[np.int64]
Kin = Hashable  # equal for entries with the same boxes, but for the tensor's number
Indexed = tuple[Hashable, tuple[int, ...]]  # the brackets that choices are made of, and the coordinates
Reach = tuple[tuple[str, ...], tuple[Indices, ...]]  # a tensor's dims, and which indices of each it has
Number = TypeVar("Number", int, I64)
Texts = tuple[str, ...]
CHOICE_LIMIT = 4_000_000
FORESEEN_MIN = 16  # coordinates
PIECE_LIMIT = 1_000_000  # boxes of one entry on one rank


@frozen(eq=False)
class Choices:
    """All choices of the bracketed indices at one coordinate, in order.

    Choices that the tensors lack are left out.
    """

    count: int
    digits: dict[str, I64]  # of each choice, by name
    # variables of a template: an index, its digits, and its place in the run that a rank holds; names of a family's tensors
    variables: dict[str, I64 | Texts]
    placed: dict[Reach, tuple[tuple[int, ...], I64]] = field(factory=dict)  # EntryPlacer.positions remembers here

    def __len__(self) -> int:
        return self.count

    def take(self, rows: list[int]) -> Choices:
        return Choices(
            len(rows),
            {n: v[rows] for n, v in self.digits.items()},
            {n: _taken(v, rows) for n, v in self.variables.items()},
            {known: (dims, at[rows]) for known, (dims, at) in self.placed.items()},
        )

    def digits_of(self, choice: int) -> tuple[tuple[str, int], ...]:
        return tuple((n, int(v[choice])) for n, v in self.digits.items())


def _taken(values: I64 | Texts, rows: list[int]) -> I64 | Texts:
    return tuple(values[row] for row in rows) if isinstance(values, tuple) else values[rows]


@frozen(eq=False)
class LocalBoxes:
    """Boxes of one entry at one coordinate, brackets aside.

    Their bracketed dims are open: low = high = -1.
    """

    shape: tuple[int, ...]
    label_of: tuple[str | None, ...]  # per row
    low: I64  # (P, K)
    high: I64
    stride: I64
    offset: I64  # (P,)
    padding: int
    undefined: bool
    live: bool = False

    @property
    def numel(self) -> int:
        out = 1
        for n in self.shape:
            out *= n
        return out


@define
class EntryPlacer:
    """One entry of a layout, with a cache per coordinate."""

    layout: Layout
    entry: Entry
    number: dict[str, int]  # tensor path -> index
    k: int  # columns
    shape_axes: tuple[str, ...] = field(init=False)
    index_axes: tuple[str, ...] = field(init=False)
    partly: frozenset[str] = field(init=False)  # axes that cut some terms of its shape and not others
    copied: bool = field(init=False)  # elements have several places in one stored tensor
    kin: Kin = field(init=False)
    locals: dict[tuple[int, ...], LocalBoxes] = field(init=False)
    choices_found: dict[Indexed, Choices] = field(factory=dict)  # of all placers of a layout
    locals_found: dict[Kin, dict[tuple[int, ...], LocalBoxes]] = field(
        factory=dict
    )  # of all placers of a layout, by kin
    begins_found: dict[tuple[int, ...], tuple[int, ...]] = field(factory=dict)
    degrees: dict[str, int] = field(factory=dict)

    def __attrs_post_init__(self) -> None:
        self.degrees = {a: n for m in self.layout.meshes for a, n in zip(m.axes, m.degrees, strict=True)}
        self.shape_axes = tuple(dict.fromkeys(a for x in self.entry.shape for a in ax.mesh_axes_of(x)))
        self.index_axes = tuple(dict.fromkeys(a for x in self.entry.indices for a in self._index_axes(x, frozenset())))
        self.partly = ax.partly_cut(self.entry.shape)
        self.copied = ax.is_copied(*self.entry.shape)
        self.locals = self.locals_found.setdefault(self._pattern_key(), {})
        self.kin = id(self.locals)  # of whatever is equal: to compare patterns takes long
        for axis in (*self.shape_axes, *self.index_axes):
            if axis not in self.degrees:
                fail(
                    "E201",
                    f"`{self.entry.path}` is cut over `{axis}`, which is in no mesh",
                    at(self.entry.span),
                    remedy=f"the mesh axes are {', '.join(self.degrees)}; another one is added to the `mesh` line"
                    if self.degrees
                    else f"add the line: mesh {axis}",
                )

    def _pattern_key(self) -> Kin:
        """Key of one tensor without brackets: its pattern and sizes.

        In the pattern, the dims' places replace their names.
        """
        paths = list(self.entry.targets.items())
        if self.entry.bundle or self.entry.indices or len(paths) != 1 or paths[0][0] is not None:
            return id(self)
        tensor, sizes = self.layout.placed[paths[0][1]], self.layout.sizes
        places = {dim: str(i) for i, dim in enumerate(tensor.dims)}
        if any(d in self.layout.indices or d not in places for d in (*tensor.dims, *ax.dims_of(*self.entry.shape))):
            return id(self)
        shape = tuple(ax.renamed(axis, places) for axis in self.entry.shape)
        return shape, tuple(sizes[d] for d in tensor.dims), tensor.indices

    def _index_axes(self, axis: ax.Axis, seen: frozenset[str]) -> tuple[str, ...]:
        found = list(ax.mesh_axes_of(axis))
        for name in ax.dims_of(axis):
            if name in self.layout.indices and name not in seen:
                found += self._index_axes(self.layout.indices[name], seen | {name})
        return tuple(found)

    @property
    def axes(self) -> tuple[str, ...]:
        """Mesh axes that change the stored boxes."""
        return tuple(dict.fromkeys((*self.shape_axes, *self.index_axes)))

    def is_here(self, here: dict[str, int]) -> bool:
        return all(here[a] == v for a, v in self.entry.storing.at)

    # ---- brackets ------------------------------------------------------------------------------------------------

    def choices(self, here: dict[str, int]) -> Choices:
        """All choices of the bracketed indices at a coordinate."""
        memo = (self._indexed, tuple(here[a] for a in self.index_axes))
        if memo not in self.choices_found:
            self.choices_found[memo] = self._choices(here)
        return self.choices_found[memo]

    @property
    def names(self) -> Texts:
        """Tensors of the entry.

        They are its own, or those of a family or bundle.
        """
        return self.entry.bundle or self.layout.members(self.entry.path)

    @property
    def is_family(self) -> bool:
        return self.entry.path in self.layout.families

    @property
    def has_names(self) -> bool:
        """True for a family or bundle, with a name per tensor."""
        return bool(self.entry.bundle) or self.is_family

    @property
    def _indexed(self) -> Hashable:
        """Key of the choices, coordinates aside.

        Entries that share it share their choices.
        """
        if self.entry.bundle:
            return id(self)
        if not self.entry.indices:
            return ()
        tensors = (self.layout.placed[path] for path in self.entry.targets.values())
        return self.entry.indices, tuple(dict.fromkeys((t.dims, t.indices) for t in tensors))

    def _choices(self, here: dict[str, int]) -> Choices:
        if self.entry.bundle:
            return Choices(len(self.names), {}, {"name": self.names})
        if self.is_family:
            (axis,) = self.entry.indices
            assert isinstance(axis, ax.Dim)
            each = np.arange(len(self.names))
            return Choices(len(each), {axis.name: each}, {axis.name: each, "name": self.names})
        lists = []
        for axis in self.entry.indices:
            lists.append(self._index_cells(axis, here))
            total = 1
            for cells in lists:
                total *= max(1, len(cells))
            if total > CHOICE_LIMIT:
                fail(
                    "E202",
                    f"`{self.entry.path}` has more than {CHOICE_LIMIT} choices of its indices",
                    at(self.entry.span),
                )
        count = prod(map(len, lists))
        grid = np.unravel_index(np.arange(count), tuple(map(len, lists))) if lists and count else ()
        digits: dict[str, I64] = {}
        known: dict[str, I64 | Texts] = {}
        for cells, rows in zip(lists, grid, strict=False):
            name = cells[0][0]
            own = {d: np.array([dict(cell)[d] for _, _, cell in cells], dtype=np.int64) for d, _ in cells[0][2]}
            columns = {d: column[rows] for d, column in own.items()}
            digits |= columns
            known |= columns
            known[f"{name}.local"] = np.array([local for _, local, _ in cells], dtype=np.int64)[rows]
            known[name] = self.value(name, columns)
        return Choices(count, digits, known).take(np.flatnonzero(self._exist(digits, count)).tolist())

    def positions(self, path: str, choices: Choices) -> tuple[tuple[int, ...], I64]:
        """Bracketed dims of a target tensor, and the choices' places: (J, dims)."""
        tensor = self.layout.placed[path]
        known = (tensor.dims, tensor.indices)
        if known not in choices.placed:
            choices.placed[known] = self._positions(tensor, choices)
        return choices.placed[known]

    def _positions(self, tensor: LogicalTensor, choices: Choices) -> tuple[tuple[int, ...], I64]:
        dims = tuple(i for i, dim in enumerate(tensor.dims) if self._has_digits(dim, choices.digits))
        table = np.empty((len(choices), len(dims)), dtype=np.int64)
        for m, i in enumerate(dims):
            table[:, m], found = self._places(tensor, i, choices.digits)
            assert found.all()
        return dims, table

    def _index_cells(self, axis: ax.Axis, here: dict[str, int]) -> list[tuple[str, int, tuple[tuple[str, int], ...]]]:
        name = next(iter(ax.dims_of(axis)), "")
        parts = parts_of(axis)
        whole = axis if parts is None else ax.Dim(name)
        try:
            cells = build(whole, self.layout.sizes, self.degrees, here, dict(self.layout.indices))
        except ax.UnevenCut as error:
            fail(
                "E203",
                f"index `{name}` of `{self.entry.path}`: {error.reason}",
                at(self.entry.span),
                at_index(self.layout, name),
                remedy=for_dealt(name, error),
            )
        if cells.length > CHOICE_LIMIT:
            fail("E202", f"index `{name}` has {cells.length} values", at(self.entry.span))
        listed = [(name, i, cell) for i, cell in enumerate(_enumerate(cells))]
        if parts is None:
            return listed
        values = np.array([self.value(name, dict(cell)) for _, _, cell in listed], dtype=np.int64)
        return [listed[i] for low, high in parts for i in np.flatnonzero((low <= values) & (values < high)).tolist()]

    def value(self, dim: str, digits: Mapping[str, Number]) -> Number:
        """Index of a dim from its digits: numbers, or columns of them."""
        if dim in digits or dim not in self.layout.indices:
            return digits[dim]
        first, *rest = ax.digits_of(self.layout.indices[dim])
        total = self.value(first, digits)
        for digit in rest:
            total = total * self.layout.sizes[digit] + self.value(digit, digits)
        return total

    def _has_digits(self, dim: str, digits: Collection[str]) -> bool:
        if dim in digits:
            return True
        rule = self.layout.indices.get(dim)
        return (
            rule is not None
            and ax.digits_of(rule) != (dim,)
            and all(self._has_digits(d, digits) for d in ax.digits_of(rule))
        )

    def _exist(self, digits: dict[str, I64], count: int) -> NDArray[np.bool_]:
        """Mask of choices that all tensors of the entry have."""
        mask = np.ones(count, dtype=bool)
        for path in self.entry.targets.values():
            tensor = self.layout.placed[path]
            for i, dim in enumerate(tensor.dims):
                if self._has_digits(dim, digits):
                    mask &= self._places(tensor, i, digits)[1]
        return mask

    def _places(self, tensor: LogicalTensor, i: int, digits: dict[str, I64]) -> tuple[I64, NDArray[np.bool_]]:
        """Positions along dim i of the tensor, and a mask of them.

        The tensor may have only some indices.
        """
        return places_of(tensor.indices[i], self.value(tensor.dims[i], digits))

    def box(self, local: LocalBoxes, row: int, choices: Choices, choice: int) -> tuple[str, I64, I64]:
        """One row of a Local as (tensor, low, high).

        Its bracketed dims are filled in.
        """
        path = self.entry.targets[local.label_of[row]]
        low, high = local.low[row].copy(), local.high[row].copy()
        dims, positions = self.positions(path, choices)
        for dim, position in zip(dims, positions[choice].tolist(), strict=True):
            low[dim], high[dim] = position, position + 1
        return path, low, high

    # ---- the stored axes -----------------------------------------------------------------------------------------

    def foresee(self, places: Iterable[dict[str, int]]) -> None:
        """Compute the boxes of many coordinates at once, if possible."""
        new = {tuple(here[a] for a in self.shape_axes): None for here in places}
        new = {at: None for at in new if at not in self.locals}
        if len(new) > FORESEEN_MIN:
            self.locals.update(self._plain(list(new)))

    def _plain(self, coordinates: list[tuple[int, ...]]) -> dict[tuple[int, ...], LocalBoxes]:
        """A Local for each coordinate, where the pattern is plain; else none."""
        from ucpl.placement.plain_locals import boxes_at

        found = boxes_at(self, np.array(coordinates, dtype=np.int64).reshape(len(coordinates), -1))
        if found is None:
            return {}
        none, zero = np.zeros((0, self.k), dtype=np.int64), np.zeros(1, dtype=np.int64)
        out: dict[tuple[int, ...], LocalBoxes] = {}
        for i, at_ in enumerate(coordinates):
            shape, one = tuple(found.shape[i].tolist()), slice(i, i + 1)
            out[at_] = (
                LocalBoxes(shape, (None,), found.low[one], found.high[one], found.stride[one], zero, 0, False)
                if 0 not in shape
                else LocalBoxes(shape, (), none, none, none, zero[:0], 0, False)
            )
        return out

    def local(self, here: dict[str, int]) -> LocalBoxes:
        """Boxes at a coordinate.

        Raises E204 for a cut that leaves a remainder, E205 if the dims are not the tensor's.
        """
        memo = tuple(here[a] for a in self.shape_axes)
        if memo in self.locals:
            return self.locals[memo]
        cells: list[Cells] = []
        for axis in self.entry.shape:
            try:
                built = build(axis, self.layout.sizes, self.degrees, here)
            except ax.UnevenCut as error:
                said, place = f"`{self.entry.path}`: {error.reason}", at(self.entry.span, "cut here")
                raise UcplError(Diagnostic("E204", said, (place,), remedy=for_cut(error), about=error)) from None
            cells.append(self._restricted(built))
        shape = tuple(c.length for c in cells)
        whole: Cells = Product(tuple(cells)) if cells else Product(())
        dims = LogicalRows(self.layout, self.entry, self.k)
        rows: list[Row] = []
        for piece in pieces_of(whole):
            rows += dims.rows(piece)
            if len(rows) > PIECE_LIMIT:
                fail(
                    "E206",
                    f"`{self.entry.path}` falls into more than {PIECE_LIMIT} boxes on one rank",
                    at(self.entry.span),
                )
        pads = padding_of(whole)
        found = LocalBoxes(
            shape,
            tuple(r[0] for r in rows),
            np.array([r[1] for r in rows], dtype=np.int64).reshape(len(rows), self.k),
            np.array([r[2] for r in rows], dtype=np.int64).reshape(len(rows), self.k),
            np.array([r[3] for r in rows], dtype=np.int64).reshape(len(rows), self.k),
            np.array([r[4] for r in rows], dtype=np.int64),
            sum(pads.values()),
            "undefined" in pads,
            "live" in pads,
        )
        self.locals[memo] = found
        return found

    def begins(self, here: dict[str, int]) -> tuple[int, ...]:
        """Begins of the box at a coordinate, along each stored axis.

        Raises: UcplError E238.
        """
        memo = tuple(here[a] for a in self.shape_axes)
        if memo not in self.begins_found:
            self.begins_found[memo] = tuple(self._begin(axis, here) for axis in self.entry.shape)
        return self.begins_found[memo]

    def _begin(self, axis: ax.Axis, here: dict[str, int]) -> int:
        try:
            begin = begin_of(axis, self.layout.sizes, self.degrees, here)
        except BrokenRun:
            fail(
                "E238",
                f"`{self.entry.path}`: parts of an axis are cut on their own, and a chunk of a dcp file is one box",
                at(self.entry.span),
                remedy="cut the complete axis, (a: r + b: r)@tp, or write an entry with a name of its own for each part",
            )
        if not begin:
            return 0
        before = cut(build(ax.uncut(axis), self.layout.sizes, self.degrees, here), 0, begin)
        return self._restricted(before).length  # indices that the tensor lacks are dealt, and have no place

    def is_copied(self, local: LocalBoxes, axis: str) -> NDArray[np.bool_]:
        """Mask of rows that other coordinates of a mesh axis have, too.

        If the axis cuts some terms of a sum, those are the rows of the others.
        """
        here = dict(zip(self.shape_axes, next(at for at, one in self.locals.items() if one is local), strict=True))
        other = self.local({**here, axis: 1 if here[axis] == 0 else 0}) if self.degrees[axis] > 1 else local

        def boxes(one: LocalBoxes) -> list[object]:
            rows = zip(one.label_of, one.low.tolist(), one.high.tolist(), strict=True)
            return [(label, *low, *high) for label, low, high in rows]

        known = set(boxes(other))
        return np.array([box in known for box in boxes(local)], dtype=np.bool_)

    def _restricted(self, cells: Cells) -> Cells:
        """Cells without indices that the tensors lack (`l[1..]` as an axis).

        They are positions of the tensors.
        """
        limits: dict[str, Indices] = {}
        bracket = {name for axis in self.entry.indices for name in ax.dims_of(axis)}
        for path in self.entry.targets.values():
            tensor = self.layout.placed[path]
            for i, dim in enumerate(tensor.dims):
                if dim in bracket:
                    continue  # an entry is there for the indices that all its tensors have
                if limits.setdefault(dim, tensor.indices[i]) != tensor.indices[i]:
                    fail(
                        "E207", f"tensors of `{self.entry.path}` have different ranges of `{dim}`", at(self.entry.span)
                    )
        limits = {d: has for d, has in limits.items() if len(has) != self.layout.sizes.get(d, len(has))}
        return _restrict(cells, limits) if limits else cells


def at_index(layout: Layout, name: str) -> Label:
    return Label(layout.call, where=f"index {name}", text=f"{name} = {layout.sizes.get(name)}")


def parts_of(axis: ax.Axis) -> list[tuple[int, int]] | None:
    """Runs of an index in brackets, `l[..5]` or `l[1, 4]`, or None.

    The rank's indices are counted before: `{l.local}` is a layer's number on its rank, in every line.
    """
    dims = (axis,) if isinstance(axis, ax.Dim) else ax.children(axis) if isinstance(axis, ax.Stack) else ()
    runs = [(d.low, d.high) for d in dims if isinstance(d, ax.Dim)]
    if (
        len(runs) != len(dims)
        or len(set(ax.dims_of(axis))) != 1
        or (isinstance(axis, ax.Stack) and len(axis.terms) < 2)
    ):
        return None
    return None if runs == [(0, None)] else [(low, 1 << 62 if high is None else high) for low, high in runs]


def _enumerate(cells: Cells) -> list[tuple[tuple[str, int], ...]]:
    match cells:
        case DimRange(dim=dim, low=low, high=high):
            return [((dim, v),) for v in range(low, high)]
        case Product(factors=factors):
            return [tuple(d for c in combo for d in c) for combo in product(*map(_enumerate, factors))]
        case Concat(parts=parts):
            return [c for p in parts for c in _enumerate(p)]
        case Labelled(cells=inner):
            return _enumerate(inner)
    return []


def _restrict(cells: Cells, limits: dict[str, Indices]) -> Cells:
    """Ranges of indices as ranges of positions.

    Positions are those of the existing indices: they are neighbours, even over gaps.
    """
    match cells:
        case DimRange(dim=dim, low=low, high=high) if dim in limits:
            low, high = before(limits[dim], low), before(limits[dim], high)
            return DimRange(dim, low, high) if low < high else Concat(())
        case Product(factors=factors):
            return Product(tuple(_restrict(f, limits) for f in factors))
        case Concat(parts=parts):
            return Concat(tuple(_restrict(p, limits) for p in parts))
        case Labelled():
            return Labelled(cells.label, _restrict(cells.cells, limits), cells.tag)
    return cells
