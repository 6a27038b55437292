"""Families of a placement, their single tensors, and the tensors' order."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

import numpy as np
from attrs import evolve, field

from ucpl.layout import Layout, States
from ucpl.placement.placement import Part, Pieces, Placement
from ucpl.records import define
from ucpl.tables import I64, Block, split_rows

__all__ = ["FamilyOrder", "apart"]


def apart(placement: Placement, together: Collection[str] = ()) -> Placement:
    """The placement without families, except those named in `together`."""
    layout = placement.layout
    kept = {path: family for path, family in layout.families.items() if path in together}
    if len(kept) == len(layout.families):
        return placement
    made = evolve(layout, families=kept)
    number = {path: n for n, path in enumerate(made.placed)}
    # Of tensors that `only` leaves out, the layout has no number, and no part has a row.
    members = [np.array([number.get(name, -1) for name in _names(placement, path, kept)]) for path in placement.tensors]
    is_split = np.array([path in layout.families and path not in kept for path in placement.tensors], dtype=np.bool_)
    begin = np.cumsum([0, *map(len, members)])
    every = np.concatenate(members).astype(np.int64)
    done: dict[int, Pieces] = {}

    def rows(pieces: Pieces) -> Pieces:
        if id(pieces) not in done:  # states of one line share their boxes
            done[id(pieces)] = _apart(pieces, is_split, begin, every)
        return done[id(pieces)]

    def part(one: Part) -> Part:
        values = {name: value for path, value in one.values.items() for name in _names(placement, path, kept)}
        live = None if one.live is None else rows(one.live)
        return evolve(one, folded=rows(one.folded), live=live, values=values)

    return evolve(placement, layout=made, tensors=tuple(made.placed), parts=tuple(map(part, placement.parts)))


def _names(placement: Placement, path: str, kept: Collection[str]) -> tuple[str, ...]:
    return (path,) if path in kept else placement.layout.members(path)


def _apart(pieces: Pieces, is_split: np.ndarray[tuple[int], np.dtype[np.bool_]], begin: I64, every: I64) -> Pieces:
    """One box for each member, for boxes of families.

    The first dim of a family is over its members.
    """
    over = np.zeros(pieces.low.shape, dtype=np.bool_)
    split = is_split[pieces.tensor]
    over[split, 0] = True
    row, index = split_rows(pieces.high - pieces.low, over)
    p, split, nth = pieces.take(row), split[row], index[:, 0]
    number = every[begin[p.tensor] + np.where(split, p.low[:, 0] + nth, 0)]
    columns = {"low": p.low, "high": p.high, "stride": p.stride, "home_stride": p.home_stride}
    fills = pieces.blocks()
    moved = {name: np.where(split[:, None], _shifted(c, fills[name]), c) for name, c in columns.items()}
    return p.replace(
        tensor=number,
        home=p.home + nth * p.home_stride[:, 0] * split,
        offset=p.offset + nth * p.stride[:, 0] * split,
        **moved,
    )


def _shifted(rows: I64, fill: int) -> I64:
    out = np.full_like(rows, fill)
    out[:, :-1] = rows[:, 1:]
    return out


# --- The order of stored tensors ------------------------------------------------------------------------------------------

Key = tuple[
    int, int, int
]  # of a tensor of a part: its line, its place there, and the part's place among those of the tensor


@define
class FamilyOrder:
    """The order of stored tensors without families and bundles.

    It is line by line, tensor by tensor. Files are written in this order: a target has the same bytes with families and
    without.
    """

    layout: Layout
    is_needed: bool = field(init=False)
    rows: list[list[tuple[Key, int]]] = field(factory=list)  # of each part: key and stored tensors, by block and choice
    lines: int = 0
    names: dict[str, int] = field(init=False)  # of tensors and second names: their places in the model

    def __attrs_post_init__(self) -> None:
        self.is_needed = bool(self.layout.families) or any(entry.bundle for entry in self.layout.entries)
        self.names = {name: n for n, name in enumerate((*self.layout.tensors, *self.layout.aliases))}

    def weight(self, part: Part, entry: int) -> None:
        """A part of the entry with this number."""
        if not self.is_needed:
            return
        wild = self.layout.wild
        line = 0 if entry < wild.start else 1 if entry in wild else 2
        alias = self.layout.entries[entry].alias
        self.add(part, lambda name: (line, self.names[alias or name] if line == 1 else entry, entry))

    def states(self, parts: Sequence[Part], line: States) -> None:
        """The parts of a state line, group by group, tensor by tensor."""
        if not self.is_needed:
            return
        self.lines += 1
        number = 2 + self.lines
        orders = [self.members(group) for group in line.groups or (None,)]
        place = {name: n for n, name in enumerate(name for order in orders for name in order)}
        for n, part in enumerate(parts):
            if isinstance(line.shape, str):
                self.add(part, lambda name, n=n: (number, place.get(name, 0), n))  # type: ignore[misc]
            else:
                self.add(part, lambda _, n=n: (number, n, 0))  # type: ignore[misc]

    def members(self, group: str | None) -> Sequence[str]:
        known = self.layout.groups.get(group) if group is not None else None
        return known.members if known is not None and known.members is not None else tuple(self.layout.tensors)

    def add(self, part: Part, key: Callable[[str], Key]) -> None:
        self.rows.append([(key(name), count) for block in part.homes.blocks for name, count in _members(part, block)])

    def ordered(self, parts: list[Part]) -> list[Part]:
        """Parts that know the order, where there are families."""
        if not self.is_needed:
            return parts
        keys = np.array([key for rows in self.rows for key, _ in rows], dtype=np.int64).reshape(-1, 3)
        counts = np.array([count for rows in self.rows for _, count in rows], dtype=np.int64)
        order = np.lexsort(keys.T[::-1])  # stable: part by part, row by row
        begins = np.empty_like(counts)
        begins[order] = np.cumsum(counts[order]) - counts[order]
        ends = np.cumsum([0, *map(len, self.rows)]).tolist()
        runs = zip(parts, ends, ends[1:], strict=False)
        return [evolve(part, begins=_by_coordinate(part, begins[a:b])) for part, a, b in runs]


def _members(part: Part, block: Block) -> Iterable[tuple[str, int]]:
    """Tensors of a block, each with the count of its stored ones.

    A flat buffer has its label.
    """
    if block.owned is not None:
        counts = np.bincount(block.owned.at, minlength=len(block.owned.texts)).tolist()
        return zip(block.owned.texts, counts, strict=True)
    names = block.named if block.named is not None else (part.label,) * block.choices
    return ((name, len(block.rank)) for name in names)


def _by_coordinate(part: Part, begins: I64) -> I64:
    """Places in the order of files.

    They are of each stored tensor of a bundle, else of the first one of each choice.
    """
    owned = part.homes.blocks[0].owned if part.homes.blocks else None
    return begins if owned is None else begins[owned.at] + _nth(owned.at)


def _nth(tensor: I64) -> I64:
    """Number of each row among the rows of its tensor."""
    first = np.flatnonzero(np.diff(tensor, prepend=-1))
    return np.arange(len(tensor)) - np.repeat(first, np.diff(first, append=len(tensor)))
