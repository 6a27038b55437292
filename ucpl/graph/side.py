"""One side of a graph: numbered stored tensors and rows' facts."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import NoReturn

import numpy as np
from attrs import field

from ucpl.errors import Label, fail
from ucpl.extents import AS_U8, Key, Shelf, Shelves, wide
from ucpl.graph.rows import StoredBoxes
from ucpl.layout import Layout
from ucpl.layout.layout import Policy
from ucpl.layout.scope import at
from ucpl.placement import Home, Part, Placement, element_name
from ucpl.records import define
from ucpl.registry import format_named
from ucpl.tables import I64, Bools, Space, each, split_rows

__all__ = ["DtypeOf", "GraphSide", "spaced"]

DtypeOf = Callable[[str, Key], str | None]


@define
class GraphSide:
    """Parts of a placement that take part.

    `names` are the tensors that numbers mean, `named` their layout.
    """

    placement: Placement
    names: tuple[str, ...]
    named: Layout
    first: dict[int, int] = field(factory=dict)  # of each part: the number of its first stored tensor
    count: int = 0
    space: Space = Space(1)

    def place(self, number: int) -> None:
        """Number the stored tensors of a part, if it is not yet."""
        if number not in self.first:
            self.first[number] = self.count
            self.count += len(self.placement.parts[number].homes)

    def range(self, number: int) -> tuple[int, int]:
        return self.first[number], self.first[number] + len(self.placement.parts[number].homes)

    def numbered(self, parts: tuple[int, ...]) -> list[tuple[int, int, Part]]:
        return [(n, self.first[n], self.placement.parts[n]) for n in parts]

    def mark(self, number: int) -> object:
        """Equal for parts whose boxes are the same."""
        part = self.placement.parts[number]
        values = tuple(sorted(part.values.items()))
        return id(part.folded), part.is_alias, part.value, values, part.lossy, part.scaled, part.exact

    @property
    def width(self) -> int:
        return max((p.folded.width for p in self.placement.parts), default=1)

    @property
    def is_alias(self) -> Bools:
        return np.array([p.is_alias for p in self.placement.parts], dtype=np.bool_)

    @property
    def numel_max(self) -> int:
        return max((self.placement.parts[n].homes.numel_max for n in self.first), default=1)

    # ---- rows --------------------------------------------------------------------------------------------------------

    def replica(self, rows: StoredBoxes) -> I64:
        """Replica number of each row.

        Boxes of one part with equal numbers must not overlap.
        """
        out = np.zeros(len(rows), dtype=np.int64)
        home = self.space.home(rows.offset)
        for n in each(rows.part):
            mine = rows.part == n
            part = self.placement.parts[n]
            if part.copied:
                out[mine] = np.arange(np.count_nonzero(mine))
            else:
                out[mine] = part.homes.replica(home[mine] - self.first[n])
        return out

    def member(self, rows: StoredBoxes) -> I64:
        """Member of each row of a mean or sum.

        The row is the member or a copy of it.
        """
        out = np.zeros(len(rows), dtype=np.int64)
        home = self.space.home(rows.offset)
        for n, over in {*zip(rows.part.tolist(), rows.over.tolist(), strict=True)}:
            mine = (rows.part == n) & (rows.over == over)
            rank = self.placement.parts[n].homes.rank(home[mine] - self.first[n])
            for divisor, degree in self.placement.digits(over):
                out[mine] = out[mine] * degree + rank // divisor % degree
        return out

    def singly(self, rows: StoredBoxes) -> StoredBoxes:
        """Rows that run over several stored tensors, one row a tensor."""
        over = rows.stride >= self.space.step
        if not over.any():
            return rows
        row, index = split_rows(rows.high - rows.low, over)
        r, cut = rows.take(row), over[row]
        low = r.low + index
        return r.replace(low=low, high=np.where(cut, low + 1, r.high), offset=r.offset + (index * r.stride).sum(axis=1))

    def home(self, rows: StoredBoxes, row: int, index: I64) -> tuple[Part, Home]:
        """Storage of an element of a row."""
        address = rows.offset[row] + ((index - rows.low[row]) * rows.stride[row]).sum()
        number = int(rows.part[row])
        part = self.placement.parts[number]
        return part, part.homes.home(int(self.space.home(address)) - self.first[number])

    def overlap(self, rows: StoredBoxes, one: int, other: int, index: I64) -> NoReturn:
        """Two rows hold one element and are no declared copies. E304."""
        path = self.names[int(rows.tensor[one])]
        (part_a, a), (_, b) = self.home(rows, one, index), self.home(rows, other, index)
        fail(
            "E304",
            f"{element_name(self.named, path, tuple(index.tolist()))} has two places that are no declared copies",
            Label(a.file, f"first here, {part_a.state}", where="/".join(map(str, a.key))),
            Label(b.file, "and here", where="/".join(map(str, b.key))),
            notes=(f"layout {self.placement.layout.call}",),
            remedy="a part occurs once in a stored tensor: take one of the two out. Copies inside one tensor, as of key-value"
            " heads that are repeated, are a factor: (g copies(2) d)"
            if (a.file, a.key) == (b.file, b.key)
            else "",
        )

    def disagree(self, rows: StoredBoxes, one: int, other: int) -> NoReturn:
        """Report two homes of an element with different policies, E314."""
        path = self.names[int(rows.tensor[one])]
        parts = [self.placement.parts[int(rows.part[row])] for row in (one, other)]
        words = [Policy(int(rows.policy[row])).word for row in (one, other)]
        fail(
            "E314",
            f"copies of `{path}` are put together in two ways: `{words[0]}` and `{words[1]}`, or over other axes",
            *(
                at(p.span, w) if p.span.line else Label(self.placement.layout.call, w)
                for p, w in zip(parts, words, strict=True)
            ),
            remedy="one clause, over the same axes, on every line that stores the tensor",
        )

    # ---- stored tensors ----------------------------------------------------------------------------------------------

    def is_shared(self, number: int) -> bool:
        """True if a part is second names alone.

        They are tensors whose storage another part of the same file writes.
        """
        return number in self.owned and bool((self.owned[number] >= 0).all())

    @property
    def owned(self) -> dict[int, I64]:
        """Number of the tensor that each second name shares, or -1.

        A part shares its storage.
        """
        if self._owned is None:
            self._owned = self._find_owners()
        return self._owned

    _owned: dict[int, I64] | None = None

    def _find_owners(self) -> dict[int, I64]:
        aliases = [n for n in self.first if self.placement.parts[n].is_alias]
        wanted = {(self.placement.parts[n].state, self.placement.parts[n].label) for n in aliases}
        owners: dict[tuple[str, str, str], tuple[int, tuple[int, ...]]] = {}
        for n, first in self.first.items():
            part = self.placement.parts[n]
            if not part.is_alias and (part.state, part.label) in wanted:
                for i, home in enumerate(part.homes):
                    owners.setdefault((home.file, part.state, part.label), (first + i, home.shape))
        out = {}
        for n in aliases:
            part = self.placement.parts[n]
            shares = np.full(len(part.homes), -1, dtype=np.int64)
            for i, home in enumerate(part.homes):
                owner = owners.get((home.file, part.state, part.label))
                if owner is not None and owner[1] == home.shape and not self._is_apart(part.form, home.file):
                    shares[i] = owner[0]
            out[n] = shares
        return out

    def _is_apart(self, form: str, file: str) -> bool:
        """True if a file has own bytes for each name.

        Neither safetensors nor chunks have storage under two names. A Hugging Face folder leaves second names out, and
        lists them in the file's metadata.
        """
        of = format_named(self.placement.layout.framework)
        return of.stores_chunks(form) or (file.endswith(".safetensors") and of.is_of_a_spec)

    def shelves(self, dtype_of: DtypeOf | None, *, sharing: bool = True) -> Shelves:
        """All stored tensors, by number."""
        out: list[Shelf] = []
        for n in sorted(self.first, key=lambda n: self.first[n]):
            part = self.placement.parts[n]
            dtypes = self.dtypes(part, dtype_of)
            shares = self.owned.get(n) if sharing else None
            if shares is not None and not (shares >= 0).any():
                shares = None
            at = choice = 0
            for block in part.homes.blocks:
                rows = block.choices if block.owned is None else len(block)
                mine, begins = slice(at, at + len(block)), slice(choice, choice + rows)
                at, choice = at + len(block), choice + rows
                out.append(
                    Shelf(
                        block,
                        part.state,
                        part.label,
                        dtypes if len(dtypes) == 1 else dtypes[mine],
                        None if shares is None else shares[mine],
                        None if part.begins is None or not sharing else part.begins[begins],
                    )
                )
        return Shelves(tuple(out))

    def dtypes(self, part: Part, dtype_of: DtypeOf | None) -> tuple[str, ...]:
        """One dtype for all stored tensors, or one each.

        They are from the layout, or (for a source) from the checkpoint.
        """
        said = self.said(part)
        if dtype_of is not None:
            each = said if len(said) > 1 else said * len(part.homes)
            places = (place for _, some in part.homes.places() for place in some)
            said = tuple(_seen(dtype_of(*place), d) for place, d in zip(places, each, strict=True))
        return said[:1] if len(set(said)) == 1 else said

    def said(self, part: Part) -> tuple[str, ...]:
        layout = self.placement.layout
        if part.dtype is not None:
            return (part.dtype,)
        of = {t: layout.dtype_of(self.placement.tensors[t], part.state) for t in part.tensors}
        known = set(of.values())
        if not of and part.label in layout.placed:  # stored tensors without elements
            return (layout.dtype_of(part.label, part.state),)
        if len(known) < 2:
            return (known.pop() if known else layout.state_dtypes.get(part.state, ""),)
        # Tensors of several dtypes in one part: each stored tensor has the narrowest that holds all of its elements, and
        # all that share a tensor have one.
        pairs = {*zip(part.pieces.home.tolist(), part.pieces.tensor.tolist(), strict=True)}
        held: dict[int, str] = {}
        homes: dict[int, list[int]] = {}
        for home, tensor in sorted(pairs):
            held[home] = wide(held[home], of[tensor]) if home in held else of[tensor]
            homes.setdefault(tensor, []).append(home)
        _level(held, homes.values())
        other = next(iter(held.values()))
        return tuple(held.get(i, other) for i in range(len(part.homes)))


def _level(held: dict[int, str], shared: Collection[Sequence[int]]) -> None:
    """Give stored tensors that hold parts of one tensor one dtype."""
    is_done = False
    while not is_done:
        is_done = True
        for some in shared:
            both = wide(*(held[home] for home in some))
            is_done &= all(held[home] == both for home in some)
            held.update(dict.fromkeys(some, both))


def _seen(stated: str | None, said: str) -> str:
    """Stated type of a file, as the layout reads it.

    u8 that are the bits of another type are of that type.
    """
    return said if not stated or (stated == "u8" and said in AS_U8.values()) else stated


def spaced(*sides: GraphSide) -> None:
    """Give sides room for their positions. E312."""
    for side in sides:
        try:
            side.space = Space.over(side.count, side.numel_max)
        except ValueError as error:
            fail("E312", f"too much for one plan: {error}", Label(side.placement.layout.call))
