"""Site: facts of a complete layout for placing.

They are its ranks, an EntryPlacer an entry, and the places that are taken.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from attrs import field

from ucpl.layout import Entry, FileRule, Group, Layout, States, Storing
from ucpl.layout.fills import PARAMETER
from ucpl.layout.layout import Policy
from ucpl.layout.templates import Template
from ucpl.placement.claims import Claims
from ucpl.placement.entries import Choices, EntryPlacer, Indexed, Kin, LocalBoxes
from ucpl.placement.names import Namer
from ucpl.placement.placement import Pieces, digits_of
from ucpl.records import frozen
from ucpl.tables import I64

if TYPE_CHECKING:
    from ucpl.placement.rank_ranges import Wanted

__all__ = ["Site", "Ranks"]


class Ranks:
    """Coordinates of all ranks on all meshes, as columns.

    Rank itself is an axis, too.
    """

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.count = max(1, layout.ranks)
        self.columns: dict[str, I64] = {"rank": np.arange(self.count)}
        self.degrees: dict[str, int] = {"rank": self.count}
        for mesh in layout.meshes:
            rest = np.arange(self.count)
            for axis, degree in zip(reversed(mesh.axes), reversed(mesh.degrees), strict=True):
                rest, here = np.divmod(rest, degree)
                if axis not in self.columns:
                    self.columns[axis] = here
                    self.degrees[axis] = degree
        self.cache: dict[tuple[tuple[str, ...], tuple[tuple[str, int], ...]], list[tuple[dict[str, int], int]]] = {}
        self.columns_of: dict[tuple[tuple[str, ...], tuple[tuple[str, int], ...]], tuple[dict[str, I64], I64]] = {}

    def combinations(
        self, axes: tuple[str, ...], where: tuple[tuple[str, int], ...] = ()
    ) -> list[tuple[dict[str, int], int]]:
        """Distinct coordinates over `axes`, each with its first rank.

        Only ranks with the coordinates `where` count.
        """
        memo = (axes, where)
        if memo not in self.cache:
            columns, first = self.distinct(axes, where)
            named = {a: c.tolist() for a, c in columns.items()}
            self.cache[memo] = [({a: named[a][i] for a in axes}, r) for i, r in enumerate(first.tolist())]
        return self.cache[memo]

    def distinct(self, axes: tuple[str, ...], where: tuple[tuple[str, int], ...] = ()) -> tuple[dict[str, I64], I64]:
        """Distinct coordinates as columns, with the first rank at each."""
        memo = (axes, where)
        if memo in self.columns_of:
            return self.columns_of[memo]
        mask = np.ones(self.count, dtype=bool)
        for axis, value in where:
            mask &= self.columns[axis] == value
        ranks = np.flatnonzero(mask)
        _, first = np.unique(self.number(axes, ranks), return_index=True)
        first = ranks[np.sort(first)]
        self.columns_of[memo] = {a: self.columns[a][first] for a in axes}, first
        return self.columns_of[memo]

    def number(self, axes: tuple[str, ...], ranks: I64) -> I64:
        """Number of each rank: equal for equal coordinates on some axes."""
        out = np.zeros(len(ranks), dtype=np.int64)
        for axis in axes:
            out = out * self.degrees[axis] + self.columns[axis][ranks]
        return out


@frozen(eq=False, slots=False)
class Site:
    layout: Layout
    rank: int | None  # only this one is placed
    ranks: Ranks
    number: dict[str, int]  # of each tensor
    k: int  # dims of the tensor with the most
    is_raw: bool  # no dim has a name: `infer` wrote the model, and paths are the checkpoint's own names
    placers: tuple[EntryPlacer, ...]
    claims: Claims
    namer: Namer
    wanted: Wanted | None = None  # only where something of this is
    met: dict[object, list[tuple[dict[str, int], int]]] = field(factory=dict)  # cached results, by request

    @classmethod
    def of(cls, layout: Layout, rank: int | None, wanted: Wanted | None = None) -> Site:
        # Only shares of specs ask for some boxes, and specs have no bundles.
        assert wanted is None or not any(entry.bundle for entry in layout.entries)
        number = {path: i for i, path in enumerate(layout.placed)}
        k = max((len(t.dims) for t in layout.placed.values()), default=0) or 1
        found: dict[Indexed, Choices] = {}
        kin: dict[Kin, dict[tuple[int, ...], LocalBoxes]] = {}
        placers = tuple(
            EntryPlacer(layout, e, number, k, choices_found=found, locals_found=kin) for e in layout.entries
        )
        is_raw = all("#" in dim for t in layout.placed.values() for dim in t.dims)
        return cls(layout, rank, Ranks(layout), number, k, is_raw, placers, Claims(), Namer(), wanted)

    def placer(self, entry: Entry, like: EntryPlacer) -> EntryPlacer:
        """A placer of a further entry, with the caches of this site."""
        return EntryPlacer(
            self.layout,
            entry,
            self.number,
            self.k,
            choices_found=like.choices_found,
            locals_found=like.locals_found,
        )

    def combinations(
        self, axes: tuple[str, ...], where: tuple[tuple[str, int], ...], *placers: EntryPlacer
    ) -> list[tuple[dict[str, int], int]]:
        """Distinct coordinates over some axes, each with the first rank there.

        If only some boxes are wanted: those at which one of these entries may have some of them.
        """
        if self.rank is None:
            return self.ranks.combinations(axes, where) if self.wanted is None else self.meeting(axes, where, placers)
        here = {a: int(c[self.rank]) for a, c in self.ranks.columns.items()}
        return [(here, self.rank)] if all(here[a] == v for a, v in where) else []

    def meeting(
        self, axes: tuple[str, ...], where: tuple[tuple[str, int], ...], placers: tuple[EntryPlacer, ...]
    ) -> list[tuple[dict[str, int], int]]:
        memo = (axes, where, tuple(map(id, placers)))
        if memo not in self.met:
            self.met[memo] = self.found_meeting(axes, where, placers)
        return self.met[memo]

    def found_meeting(
        self, axes: tuple[str, ...], where: tuple[tuple[str, int], ...], placers: tuple[EntryPlacer, ...]
    ) -> list[tuple[dict[str, int], int]]:
        assert self.wanted is not None
        said = dict.fromkeys(a for p in placers for a in (*p.axes, *(x for x, _ in p.entry.storing.at)))
        apart = (
            *axes,
            *(a for a in said if a not in axes),
        )  # stored boxes may differ along axes that were not requested
        _, each = self.ranks.distinct(apart, where)
        every = {a: c[each] for a, c in self.ranks.columns.items()}
        held = np.zeros(len(each), dtype=np.bool_)
        for placer in placers:
            here = self.wanted.held(placer, every, placer.degrees)
            for axis, coordinate in placer.entry.storing.at:
                here &= every[axis] == coordinate
            held |= here
        columns, first = self.ranks.distinct(axes, where)
        kept = np.isin(self.ranks.number(axes, first), self.ranks.number(axes, each[held]))
        return [({a: int(columns[a][i]) for a in axes}, int(first[i])) for i in np.flatnonzero(kept).tolist()]

    def divided(self, pieces: Pieces) -> tuple[Pieces, Pieces]:
        """Boxes of the tensors themselves, and those of live rows.

        Indices of live rows are behind a dim's end.
        """
        is_live = (pieces.low >= self.counts[pieces.tensor, : pieces.width]).any(axis=1)
        return pieces.take(np.flatnonzero(~is_live)), pieces.take(np.flatnonzero(is_live))

    @cached_property
    def counts(self) -> I64:
        """(tensors, K): how many indices of each dim a tensor has."""
        out = np.ones((len(self.number), self.k), dtype=np.int64)
        for path, n in self.number.items():
            counts = self.layout.placed[path].counts
            out[n, : len(counts)] = counts
        return out

    def mesh_names(self, names: frozenset[str]) -> tuple[str, ...]:
        return tuple(a for a in self.ranks.columns if a in names)

    def names_of(self, rule: FileRule, key: Template | None) -> frozenset[str]:
        """Names in the templates of a place."""
        out: frozenset[str] = frozenset()
        for t in (rule.path, rule.key, key):
            if t is not None:
                out |= t.names
        return out

    @property
    def valued(self) -> set[str]:
        """States that hold the parameter's own value.

        Names and derivations show it.
        """
        return {*PARAMETER, *(n for d in self.layout.derived for n in (d.state, d.source))}

    def policy_at(self, storing: Storing, cut: frozenset[str], rank: int) -> Policy:
        """Policy for a copy on a rank.

        `cut`: axes along which no two ranks hold the same. Of copies along an axis of `any`, those at coordinate 0
        lead; none does of an entry at one coordinate of it, since its copies are the tensor's other homes.
        """
        fixed = {a for a, _ in storing.at}
        loose = [a for a in storing.loose if a not in cut or a in fixed]
        if any(a in fixed or self.ranks.columns[a][rank] != 0 for a in loose):
            return Policy.ANY
        return storing.policy if self.over(storing) else Policy.LEAD if loose else Policy.SAME

    def policies(self, storing: Storing, cut: frozenset[str], placer: EntryPlacer, rank: int, local: LocalBoxes) -> I64:
        """Policies for each row of a rank's part of an entry.

        An axis may cut some terms of a sum, and copy the others.
        """
        some = sorted(a for a in self.partly_loose(storing, placer) if a not in cut)
        if not some:
            return np.full(len(local.offset), self.policy_at(storing, cut, rank), dtype=np.int64)
        split = np.zeros(len(local.offset), dtype=np.int64)
        for n, axis in enumerate(some):
            split |= (~placer.is_copied(local, axis)).astype(np.int64) << n
        kinds, which = np.unique(split, return_inverse=True)
        of_kind = [
            self.policy_at(storing, cut | {a for n, a in enumerate(some) if kind >> n & 1}, rank)
            for kind in kinds.tolist()
        ]
        return np.array(of_kind, dtype=np.int64)[which]

    @staticmethod
    def partly_loose(storing: Storing, placer: EntryPlacer) -> frozenset[str]:
        """Axes of `any` that cut some terms of an entry's pattern."""
        return frozenset(storing.loose) & placer.partly - {a for a, _ in storing.at}

    def over(self, storing: Storing) -> int:
        """Axes of the mean or sum, a bit each.

        Those are axes with more than one coordinate.
        """
        return sum(1 << self.bits[a] for a in storing.policy_axes if self.ranks.degrees[a] > 1)

    @cached_property
    def bits(self) -> dict[str, int]:
        return {axis: n for n, axis in enumerate(digits_of(self.layout))}

    def state_names(self, line: States, group: str | None) -> tuple[str, ...]:
        """Names of the states that a line stores for a group.

        They are those it names, or those that no other line names.
        """
        model = [
            s for s in self.layout.states if not s.scalar and (s.groups is None or group is None or group in s.groups)
        ]
        if line.names is not None:
            known = {s.name for s in self.layout.states}
            return tuple(n for n in line.names if n == "weight" or n not in known or any(s.name == n for s in model))
        spoken = {
            n
            for other in self.layout.state_lines
            if other.names is not None and (other.groups is None or group is None or group in other.groups)
            for n in other.names
        } | {d.state for d in self.layout.derived}
        return tuple(dict.fromkeys(s.name for s in model if s.name not in spoken))

    def group(self, name: str | None) -> Group | None:
        return self.layout.groups.get(name) if name is not None else None
