"""Entries as parts of a placement, at every coordinate.

They have their own names, or those that a `like` line gives.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from attrs import field

from ucpl.errors import fail
from ucpl.layout import FileRule, States, Storing
from ucpl.layout.reduced_states import reduced_entry
from ucpl.layout.scope import at
from ucpl.layout.templates import Template, nested
from ucpl.placement import flats as fl
from ucpl.placement.bundles import BundleRows, rows_of
from ucpl.placement.cells import is_by_begin
from ucpl.placement.claims import Claimant, EntryMark, Spot, taken
from ucpl.placement.entries import Choices, EntryPlacer, LocalBoxes
from ucpl.placement.homes import Homes
from ucpl.placement.names import MixedError, Variables
from ucpl.placement.placement import Part, Pieces
from ucpl.placement.site import Site
from ucpl.records import define, frozen
from ucpl.tables import I64, Block, Bools, Listed, within
from ucpl.tables.blocks import COORDINATE, Name, Slot

__all__ = ["ChoiceRun", "EntryParts", "runs_of"]

HOME_LIMIT = 20_000_000
Counts = dict[str, int | I64]


@frozen(eq=False)
class Spread:
    """Coordinates at which an entry has the same choices of its indices."""

    choices: Choices
    here: tuple[dict[str, int], ...]
    rank: tuple[int, ...]
    locals: tuple[LocalBoxes, ...]
    begins: tuple[
        tuple[int, ...], ...
    ] = ()  # of files that find a tensor by it, too: the begin of each box in the uncut tensor

    def at(self, coordinate: int, choices: Choices) -> Spread:
        """One coordinate, with some of the choices."""
        c = coordinate
        here = (self.here[c : c + 1], self.rank[c : c + 1], self.locals[c : c + 1], self.begins[c : c + 1])
        return Spread(choices, *here)


@frozen(eq=False)
class Arrays:
    """A spread as columns, one row a coordinate."""

    coordinates: dict[str, I64]
    shape: I64
    padding: I64
    undefined: Bools
    live: Bools
    replica: I64
    named: dict[int, tuple[Template, Name]] = field(factory=dict)  # see Variables

    @classmethod
    def of(cls, spread: Spread, replica: tuple[str, ...]) -> Arrays:
        count, locals_ = len(spread.rank), spread.locals
        columns = {a: np.array([h[a] for h in spread.here], dtype=np.int64) for a in spread.here[0]}
        return cls(
            {**columns, "rank": np.array(spread.rank, dtype=np.int64)},
            np.array([x.shape for x in locals_], dtype=np.int64).reshape(count, -1),
            np.array([x.padding for x in locals_], dtype=np.int64),
            np.array([x.undefined for x in locals_], dtype=np.bool_),
            np.array([x.live for x in locals_], dtype=np.bool_),
            np.array([[h[a] for a in replica] for h in spread.here], dtype=np.int64).reshape(count, len(replica)),
        )


@frozen(eq=False)
class Boxed:
    """Boxes of an entry, and of its live rows, if any."""

    pieces: Pieces
    live: Pieces | None

    @classmethod
    def among(cls, pieces: Pieces, site: Site, has_live: bool) -> Boxed:
        return cls(*site.divided(pieces)) if has_live else cls(pieces, None)

    def of(self, tensor: int) -> Boxed:
        """The same of another tensor."""
        pieces, live = (
            None if p is None else p.replace(tensor=np.full(len(p), tensor, dtype=np.int64))
            for p in (self.pieces, self.live)
        )
        assert pieces is not None
        return Boxed(pieces, live)


@frozen(eq=False)
class BundlePlaces:
    """Rows of a bundle, the numbers of its tensors, and the coordinates."""

    rows: BundleRows
    number: I64
    here: dict[str, I64]
    rank: I64


@define
class EntryParts:
    site: Site
    spreads_of: dict[object, list[Spread]] = field(factory=dict)
    arrays_of: dict[tuple[Spread, tuple[str, ...]], Arrays] = field(factory=dict)
    pieces_of: dict[object, Boxed] = field(factory=dict)  # states of one line share them
    reduced_of: dict[object, EntryPlacer | None] = field(factory=dict)  # of states without some dims
    chunks_of: dict[Spread, Spread] = field(factory=dict)
    bundles_of: dict[object, BundlePlaces] = field(factory=dict)

    def weight(self, placer: EntryPlacer, rule: FileRule, key: Template) -> Part:
        """Part of an entry for the tensor itself."""
        make = self.bundle if placer.entry.bundle else self.part
        return make(placer, rule, key, "weight", None, {})

    def like(self, line: States, rule: FileRule) -> list[Part]:
        """A `like` line: each state cut as the tensor's own entry is."""
        layout, site = self.site.layout, self.site
        if not any(site.state_names(line, g) for g in line.groups or (None,)):
            return []
        out = []
        positions: dict[object, int] = {}  # of tensors that are at one place: other ranks count for themselves
        for number, g in enumerate(line.groups or (None,)):
            names, group = site.state_names(line, g), site.group(g)
            placers = [p for p in site.placers if p.entry.alias is None and fl.is_trained(layout, p)]
            order = {m: i for i, m in enumerate(layout.tensors)}
            if group is not None and group.members is not None:
                order = {m: i for i, m in enumerate(group.members)}
                placers = sorted((p for p in placers if p.names[0] in order), key=lambda p: order[p.names[0]])
            counted = _counted(placers, order, positions)
            for placer, (member, position) in zip(placers, counted, strict=True):
                counts: Counts = {"group": number, "member": member, "number": position, "bucket": number}
                key = line.storing.key or placer.entry.storing.key
                if key is None:
                    continue
                if line.storing.key is not None and placer.entry.storing.key is not None and "key" in key.names:
                    key = nested(key, placer.entry.storing.key)
                for state in names:
                    own = self.reduced(placer, state, line)
                    make = self.bundle if placer.entry.bundle else self.part
                    out += [make(own, rule, key, state, line, counts)] if own is not None else []
        return out

    def reduced(self, placer: EntryPlacer, state: str, line: States) -> EntryPlacer | None:
        """The placer of a state.

        It differs if the state lacks dims. None: the entry's tensors do not have the state.
        """
        layout = self.site.layout
        if state not in layout.reduced:
            return placer
        memo = (id(placer), state, line.shape)
        if memo not in self.reduced_of:
            entry = reduced_entry(
                placer.entry, layout.placed, layout.indices, state, keeps_axes=line.shape == "like(1)"
            )
            made = None if entry is None else self.site.placer(entry, placer)
            self.reduced_of[memo] = made
        return self.reduced_of[memo]

    def part(
        self,
        placer: EntryPlacer,
        rule: FileRule,
        key: Template,
        state: str,
        like: States | None,
        counts: Counts,
    ) -> Part:
        """Part of a state, by its `like` line; templates may use `counts`."""
        entry, site, storing = placer.entry, self.site, placer.entry.storing if like is None else like.storing
        used = site.mesh_names(site.names_of(rule, key) | set(placer.axes) | {a for a, _ in entry.storing.at})
        where = (*entry.storing.at, *(storing.at if like is not None else ()))
        # Along these, homes may hold the same elements: the axes that do not cut, or not everything.
        shared = {*used}.difference(placer.axes) | placer.partly
        replica = tuple(a for a in used if a in shared and site.ranks.degrees[a] > 1)
        spreads = self.spreads(placer, used, where)
        by_begin = is_by_begin(rule, site.layout)
        if by_begin:
            spreads = [self.chunks(placer, s) for s in spreads if any(x.numel for x in s.locals)]
        variables: dict[str, str | int | I64] = {**entry.variables, **counts, "state": state}

        def blocks(of: list[Spread]) -> tuple[Block, ...]:
            return tuple(self.block(s, rule, key, variables, replica) for s in of)

        try:
            made = blocks(spreads)
        except MixedError:  # a name that changes with both: coordinate by coordinate
            spreads = [s.at(c, s.choices) for s in spreads for c in range(len(s.rank))]
            made = blocks(spreads)
        homes = Homes(made)
        if len(homes) > HOME_LIMIT:
            fail("E214", f"`{entry.path}` is stored in more than {HOME_LIMIT} tensors", at(entry.span))

        def mark(spot: Spot) -> object:
            b, c, j = spot
            coordinates = tuple((a, spreads[b].here[c][a]) for a in placer.shape_axes)
            targets = tuple(entry.targets.items())
            return EntryMark(state, targets, entry.shape, coordinates, spreads[b].choices.digits_of(j))

        span = entry.span if like is None or not like.span.line else like.span
        kept = site.claims.claim(Claimant(homes, mark, taken(span, entry), span))
        if kept is not None:
            spreads = [spreads[b].at(c, spreads[b].choices.take([j])) for b, c, j in kept]
            homes = Homes(blocks(spreads))
        said = entry.storing if like is None or entry.storing.speaks_of_copies else storing
        policy = (said.policy, said.policy_axes, said.loose, said.at) if said.speaks_of_copies else None
        number = site.number[next(iter(entry.targets.values()))]
        there = None if site.wanted is None else tuple(s.rank for s in spreads)
        alike = (placer.kin, used, where, policy, by_begin, tuple(id(s.choices) for s in spreads), there)
        found = self.pieces_of.get((alike, number)) if kept is None else None
        if found is None and kept is None and alike in self.pieces_of:  # of another tensor of this kind
            found = self.pieces_of[alike].of(number)
        if found is None:
            starts = homes.starts.tolist()
            tables = [self.pieces(placer, s, first, said) for s, first in zip(spreads, starts, strict=False)]
            found = Boxed.among(Pieces.concat(tables, site.k), site, any(x.live for s in spreads for x in s.locals))
        if kept is None:
            self.pieces_of.setdefault(alike, found)
            self.pieces_of[alike, number] = found
        # `value x - 1` is the storage of the parameter itself: its moments do not shift with it.
        own, all_of = entry.storing.value, storing.value if like is not None else (1.0, 0.0)
        value = own if state in site.valued and own != (1.0, 0.0) else all_of
        return Part(
            state,
            entry.path,
            rule.form or "",
            storing.dtype,
            storing.lossy,
            value,
            homes,
            found.pieces,
            entry.alias is not None,
            entry.span,
            entry.storing.scaled and state == "weight",
            storing.exact,
            live=found.live,
            copied=placer.copied,
            axes=tuple(dict.fromkeys((*used, *(a for a, _ in where)))),
        )

    def bundle(
        self, placer: EntryPlacer, rule: FileRule, key: Template, state: str, like: States | None, counts: Counts
    ) -> Part:
        """`part` of a bundle: tensors of different sizes as columns."""
        entry, site, storing = placer.entry, self.site, placer.entry.storing if like is None else like.storing
        used = site.mesh_names(site.names_of(rule, key) | set(placer.axes) | {a for a, _ in entry.storing.at})
        where = (*entry.storing.at, *(storing.at if like is not None else ()))
        replica = tuple(a for a in used if a not in placer.axes and site.ranks.degrees[a] > 1)
        copying = entry.storing if like is None or entry.storing.speaks_of_copies else storing
        by_begin = is_by_begin(rule, site.layout)
        places = self.bundled(placer, used, where, by_begin)
        rows, axes = places.rows, tuple(dict.fromkeys((*used, *(a for a, _ in where))))

        def homes_of(rows: BundleRows) -> Homes:
            at_row = {a: column[rows.coordinate] for a, column in places.here.items()}
            constants: dict[str, str | int] = {**entry.variables, "state": state}
            ranks, owned = places.rank[rows.coordinate], rows.owned
            columns: dict[str, I64 | tuple[str, ...] | Listed] = {**at_row, "rank": ranks, "name": owned}
            for name, value in counts.items():
                if isinstance(value, int):
                    constants[name] = value
                else:
                    columns[name] = value[rows.tensor]
            count = len(ranks)
            file, steps, counted = site.namer.in_file(rule, key, Variables(constants, columns, {}, count, 1))
            if by_begin:
                steps += tuple((Slot(COORDINATE, np.ascontiguousarray(column)),) for column in rows.begins.T)
                counted += (True,) * rows.begins.shape[1]
            copies = np.array([at_row[a] for a in replica], dtype=np.int64).reshape(len(replica), count).T
            zero, none = np.zeros(count, dtype=np.int64), np.zeros(count, dtype=np.bool_)
            held = (zero, none, none, copies)
            return Homes((Block(file, steps, counted, 1, rows.shape, ranks, *held, owned=owned),) if count else ())

        homes = homes_of(rows)
        if len(homes) > HOME_LIMIT:
            fail("E214", f"`{entry.path}` is stored in more than {HOME_LIMIT} tensors", at(entry.span))

        def mark(spot: Spot) -> object:
            at_spot = int(places.rows.coordinate[spot[1]])
            coordinates = tuple((a, int(places.here[a][at_spot])) for a in placer.shape_axes)
            return EntryMark(state, ((None, places.rows.owned[spot[1]]),), entry.shape, coordinates, ())

        span = entry.span if like is None or not like.span.line else like.span
        kept = site.claims.claim(Claimant(homes, mark, taken(span, entry), span))
        if kept is not None:
            rows = rows.take(np.array([c for _, c, _ in kept], dtype=np.int64))
            homes = homes_of(rows)
        alike = (id(places), copying.policy, copying.policy_axes, copying.loose, copying.at)
        pieces = self.pieces_of.get(alike) if kept is None else None
        if pieces is None:
            pieces = Boxed(self.bundle_pieces(placer, rows, places, copying), None)
        if kept is None:
            self.pieces_of[alike] = pieces
        own, all_of = entry.storing.value, storing.value if like is not None else (1.0, 0.0)
        value = own if state in site.valued and own != (1.0, 0.0) else all_of
        return Part(
            state,
            entry.path,
            rule.form or "",
            storing.dtype,
            storing.lossy,
            value,
            homes,
            pieces.pieces,
            False,
            entry.span,
            entry.storing.scaled and state == "weight",
            storing.exact,
            axes=axes,
        )

    def bundle_pieces(self, placer: EntryPlacer, rows: BundleRows, places: BundlePlaces, storing: Storing) -> Pieces:
        """A box for each row with elements."""
        site, cut, full = self.site, frozenset(placer.axes), rows.has_elements
        ranks = places.rank.tolist() if storing.loose else places.rank[:1].tolist()
        policies = np.array([site.policy_at(storing, cut, rank) for rank in ranks], dtype=np.int64)
        zero = np.zeros(len(full), dtype=np.int64)
        return Pieces(
            places.number[rows.tensor[full]],
            full,
            rows.low[full],
            rows.high[full],
            rows.stride[full],
            np.zeros_like(rows.low[full]),
            zero,
            policies[rows.coordinate[full]] if storing.loose else zero + policies[:1].sum(),
            zero + site.over(storing),
        )

    def bundled(
        self, placer: EntryPlacer, used: tuple[str, ...], where: tuple[tuple[str, int], ...], by_begin: bool
    ) -> BundlePlaces:
        """All rows of a bundle's tensors, which states of one line share."""
        memo = (placer.kin, used, where, by_begin)
        if memo not in self.bundles_of:
            site = self.site
            found = site.combinations(used, where)
            here = {a: np.array([h[a] for h, _ in found], dtype=np.int64) for a in used}
            rank = np.array([r for _, r in found], dtype=np.int64)
            if not here:
                here = {"rank": rank}
            rows = rows_of(site.layout, placer.names, placer.entry.shape, site.ranks.degrees, here, site.k)
            if by_begin:
                rows = rows.take(rows.has_elements)
            number = np.array([site.number[name] for name in placer.names], dtype=np.int64)
            self.bundles_of[memo] = BundlePlaces(rows, number, here, rank)
        return self.bundles_of[memo]

    def spreads(self, placer: EntryPlacer, used: tuple[str, ...], where: tuple[tuple[str, int], ...]) -> list[Spread]:
        """All coordinates at which the entry stores something, by their choices."""
        memo: tuple[object, ...] = (placer.kin, used, where)
        if self.site.wanted is None:
            if memo not in self.spreads_of:
                self.spreads_of[memo] = self.found_spreads(placer, self.site.combinations(used, where))
            return self.spreads_of[memo]
        found = self.site.combinations(used, where, placer)
        memo = (*memo, tuple(rank for _, rank in found))  # entries of one kind may be wanted at other coordinates
        if memo not in self.spreads_of:
            self.spreads_of[memo] = self.found_spreads(placer, found)
        return self.spreads_of[memo]

    def chunks(self, placer: EntryPlacer, spread: Spread) -> Spread:
        """Coordinates with elements, and the begin of each box.

        No file has the other coordinates. The begin is in the uncut tensor.
        """
        if spread not in self.chunks_of:
            kept = [c for c, local in enumerate(spread.locals) if local.numel]
            here = tuple(spread.here[c] for c in kept)
            self.chunks_of[spread] = Spread(
                spread.choices,
                here,
                tuple(spread.rank[c] for c in kept),
                tuple(spread.locals[c] for c in kept),
                tuple(placer.begins(at) for at in here),
            )
        return self.chunks_of[spread]

    @staticmethod
    def found_spreads(placer: EntryPlacer, places: list[tuple[dict[str, int], int]]) -> list[Spread]:
        found: dict[int, tuple[Choices, list[dict[str, int]], list[int], list[LocalBoxes]]] = {}
        placer.foresee(here for here, _ in places)
        for here, rank in places:
            local, choices = placer.local(here), placer.choices(here)
            if len(choices):
                group = found.setdefault(id(choices), (choices, [], [], []))
                group[1].append(here)
                group[2].append(rank)
                group[3].append(local)
        return [Spread(c, tuple(here), tuple(rank), tuple(local)) for c, here, rank, local in found.values()]

    def block(
        self,
        spread: Spread,
        rule: FileRule,
        key: Template,
        known: dict[str, str | int | I64],
        replica: tuple[str, ...],
    ) -> Block:
        """known: variables; those of a family may be columns."""
        assert rule.path is not None
        constants = {n: v for n, v in known.items() if isinstance(v, str | int)}
        counted_by = {n: v for n, v in known.items() if not isinstance(v, str | int)}
        if (spread, replica) not in self.arrays_of:
            self.arrays_of[spread, replica] = Arrays.of(spread, replica)
        arrays = self.arrays_of[spread, replica]
        variables = Variables(
            {n: v for n, v in constants.items() if n not in spread.choices.variables or n == "state"},
            arrays.coordinates,
            {**{n: v for n, v in spread.choices.variables.items() if n != "state"}, **counted_by},
            len(spread.rank),
            len(spread.choices),
            {} if counted_by else arrays.named,
        )
        file, steps, counted = self.site.namer.in_file(rule, key, variables)
        for column in zip(*spread.begins, strict=True):  # a step for each stored axis
            steps += ((Slot(COORDINATE, np.array(column, dtype=np.int64)),),)
            counted += (True,)
        held = (arrays.padding, arrays.undefined, arrays.live)
        rank = arrays.coordinates["rank"]
        names = spread.choices.variables.get("name")
        named = names if isinstance(names, tuple) else None
        return Block(file, steps, counted, len(spread.choices), arrays.shape, rank, *held, arrays.replica, named)

    def pieces(self, placer: EntryPlacer, spread: Spread, first: int, storing: Storing) -> Pieces:
        """Boxes of all coordinates of a spread.

        There is one for each run of choices that a box can hold. `first`: their first home.
        """
        site, choices, entry = self.site, spread.choices, placer.entry
        locals_ = spread.locals
        counts = np.array([len(local.offset) for local in locals_], dtype=np.int64)
        labels = [label for local in locals_ for label in local.label_of]
        if not labels:
            return Pieces.empty(site.k)
        coordinate, row = np.repeat(np.arange(len(locals_)), counts), within(counts)
        low, high, stride, offset = (
            np.concatenate([getattr(local, name) for local in locals_]) for name in ("low", "high", "stride", "offset")
        )
        known = {label: entry.targets[label] for label in dict.fromkeys(labels)}
        tensor = np.array([site.number[known[label]] for label in labels], dtype=np.int64)
        policy = self.policies(placer, spread, storing, counts)
        # Of tensors whose bracketed dims run alike, each run of choices is a box.
        positions = {site.number[path]: placer.positions(path, choices) for path in known.values()}
        by_runs: dict[int, list[int]] = {}
        for number, (_, table) in positions.items():
            by_runs.setdefault(id(table), []).append(number)
        tables, order = [], []
        for group, numbers in enumerate(by_runs.values()):
            rows = np.flatnonzero(np.isin(tensor, numbers))
            dims, table = positions[numbers[0]]
            for n_run, run in enumerate(runs_of(table)):
                lows, highs = low[rows], high[rows]
                home_stride = np.zeros_like(lows)
                for n, dim in enumerate(dims):
                    lows[:, dim], highs[:, dim] = run.low[n], run.high[n]
                    home_stride[:, dim] = run.step[n]
                home = first + coordinate[rows] * len(choices) + run.first
                over = np.full(len(rows), site.over(storing), dtype=np.int64)
                tables.append(
                    Pieces(tensor[rows], home, lows, highs, stride[rows], home_stride, offset[rows], policy[rows], over)
                )
                order.append(np.stack([row[rows], *np.full((2, len(rows)), [[n_run], [group]]), coordinate[rows]]))
        return Pieces.concat(tables, site.k).take(np.lexsort(np.concatenate(order, axis=1)))

    def policies(self, placer: EntryPlacer, spread: Spread, storing: Storing, counts: I64) -> I64:
        """Policies for copies, of each row of each coordinate."""
        site, cut = self.site, frozenset(placer.axes) - placer.partly
        if not storing.loose:  # the same on every rank
            one = site.policy_at(storing, cut, spread.rank[0])
            return np.full(int(counts.sum()), one, dtype=np.int64)
        each = zip(spread.rank, spread.locals, strict=True)
        return np.concatenate([site.policies(storing, cut, placer, rank, local) for rank, local in each])


def _counted(
    placers: list[EntryPlacer], order: dict[str, int], positions: dict[object, int]
) -> list[tuple[int | I64, int | I64]]:
    """Each tensor's place in its group and in all groups.

    Tensors at one place count. `positions`: how many there are so far, by place.
    """
    rows = [(n, 0) for n in range(len(placers))]
    if any(p.has_names for p in placers):
        each = [(order[name], n, c) for n, p in enumerate(placers) for c, name in enumerate(p.names)]
        rows = [(n, c) for _, n, c in sorted(each)]
    members: dict[object, int] = {}
    found = [(np.zeros(len(p.names), dtype=np.int64), np.zeros(len(p.names), dtype=np.int64)) for p in placers]
    places = [frozenset(p.entry.storing.at) for p in placers]
    for n, choice in rows:
        at_ = places[n]
        member, position = members.get(at_, 0), positions.get(at_, 0)
        members[at_], positions[at_] = member + 1, position + 1
        found[n][0][choice], found[n][1][choice] = member, position
    return [
        (member, position) if placer.has_names else (int(member[0]), int(position[0]))
        for placer, (member, position) in zip(placers, found, strict=True)
    ]


# --- Runs: choices of bracketed indices that one box can hold -------------------------------------------------------


@frozen
class ChoiceRun:
    """A run of choices from `first` on, as a box.

    The box is low..high of the bracketed dims; along each dim, the choice's number steps by `step`.
    """

    first: int
    low: tuple[int, ...]
    high: tuple[int, ...]
    step: tuple[int, ...]


def runs_of(positions: I64) -> Iterator[ChoiceRun]:
    """Runs of choices, in order.

    positions: (J, D), the place of each choice along the bracketed dims. The runs have all choices.
    """
    count, dims = positions.shape
    if count == 0:
        return
    whole = _box(positions)
    if whole is not None:
        yield whole
        return
    # Runs in which one dim counts up by one, and the others stay.
    step = np.diff(positions, axis=0)
    one = (step == 1).sum(axis=1) == 1
    one &= (step != 0).sum(axis=1) == 1
    along = np.where(one, step.argmax(axis=1), -1)
    first = 0
    while first < count:
        last, dim = first, int(along[first]) if first < count - 1 else -1
        while last < count - 1 and dim >= 0 and along[last] == dim:
            last += 1
        low, high = positions[first].tolist(), (positions[last] + 1).tolist()
        yield ChoiceRun(first, tuple(low), tuple(high), tuple(int(d == dim) for d in range(dims)))
        first = last + 1


def _box(positions: I64) -> ChoiceRun | None:
    """All choices as one box, if they are its elements.

    Some dim is the fastest.
    """
    low, high = positions.min(axis=0), positions.max(axis=0) + 1
    size = high - low
    if int(size.prod()) != len(positions):
        return None
    changed = [_first_change(positions[:, d]) for d in range(positions.shape[1])]
    weight = np.zeros_like(size)
    step = 1
    for d in sorted(range(len(size)), key=lambda d: changed[d]):  # the dim that changes first is the fastest
        if size[d] > 1:
            weight[d] = step
            step *= int(size[d])
    number = ((positions - low) * weight).sum(axis=1)
    if not (number == np.arange(len(positions))).all():
        return None
    return ChoiceRun(0, tuple(low.tolist()), tuple(high.tolist()), tuple(weight.tolist()))


def _first_change(column: I64) -> int:
    differs = np.flatnonzero(column != column[0])
    return int(differs[0]) if len(differs) else len(column)
