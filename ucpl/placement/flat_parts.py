"""State lines over flat buffers as parts of a placement.

Members are ordered, flats are cut, and intervals become boxes of tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import NoReturn

import numpy as np
from attrs import evolve, field

from ucpl.errors import fail
from ucpl.extents import FlatBuffer
from ucpl.language.nodes import Span
from ucpl.layout import FileRule, Group, States, Storing
from ucpl.layout import axes as ax
from ucpl.layout.scope import at
from ucpl.layout.templates import Template
from ucpl.placement import flats as fl
from ucpl.placement.bundles import BundleRows, rows_of
from ucpl.placement.cells import is_by_begin
from ucpl.placement.claims import BufferMark, Claimant, Spot, taken
from ucpl.placement.entries import EntryPlacer, parts_of
from ucpl.placement.homes import Homes
from ucpl.placement.names import Variables
from ucpl.placement.placement import Part, Pieces
from ucpl.placement.site import Site
from ucpl.records import define, frozen
from ucpl.tables import I64, Bools, clip, each, numbered, within
from ucpl.tables.blocks import Block, Name, name_texts

__all__ = ["FlatParts"]

Env = dict[str, int | str]


@frozen(eq=False)
class GroupLine:
    """A state line for one of its groups, with templates' facts."""

    line: States
    rule: FileRule
    key: Template
    name: str | None  # of the group
    group: Group | None
    axis: ax.Axis
    chain: fl.Chain | None
    cut: tuple[str, ...]  # mesh axes that cut the flat
    outer: tuple[str, ...]  # mesh axes that distinguish flats
    used: tuple[str, ...]  # both, and the axes that templates name
    involved: tuple[EntryPlacer, ...]


@frozen(eq=False)
class FlatHolders:
    """Ranks that hold windows of the same flats."""

    full: dict[str, int]  # all coordinates of the first of them
    bucket: int  # how many flats of the line came before
    places: fl.Places


@frozen(eq=False)
class Flats:
    """One flat of a context: its members, variables of templates, its number."""

    members: fl.Members
    variables: Env


@frozen(eq=False)
class Paddings:
    """Cells of each window without a tensor, with their padding kind."""

    count: I64
    undefined: Bools
    live: Bools


@define(slots=False)
class FoundWindows:
    """Windows of all contexts, as they are collected."""

    env: list[Env] = field(factory=list)  # a window: variables of its templates
    rank: list[int] = field(factory=list)
    replica: list[tuple[int, ...]] = field(factory=list)
    cuts: list[FlatCut] = field(factory=list)
    named: dict[int, tuple[Template, Name]] = field(factory=dict)  # see Variables

    @cached_property
    def columns(self) -> dict[str, I64 | tuple[str, ...]]:
        """Variables of templates, one value a window.

        They are made once all windows exist. All states of a line share them.
        """
        names = dict.fromkeys(n for env in self.env for n in env)
        found = {n: _column([env.get(n) for env in self.env]) for n in names}
        return {n: column for n, column in found.items() if column is not None}


@define
class FlatParts:
    site: Site
    stated: fl.Stated | None
    records: dict[object, FlatBuffer] = field(factory=dict)
    bodies: dict[object, fl.Body] = field(factory=dict)
    sequences: dict[object, I64] = field(factory=dict)
    names: dict[object, tuple[str, ...]] = field(factory=dict)
    runs: dict[object, tuple[fl.Body, list[Flats]]] = field(factory=dict)
    cuts: dict[object, fl.BufferWindows] = field(factory=dict)
    bundles: dict[object, BundleRows] = field(factory=dict)
    records_of: dict[object, tuple[tuple[str, tuple[int, ...]], ...]] = field(factory=dict)

    def parts(self, line: States, rule: FileRule) -> list[Part]:
        out: list[Part] = []
        bucket = np.zeros(self.site.ranks.count, dtype=np.int64)  # how many flats of the line each rank has so far
        for name in line.groups or (None,):
            out += self.group_parts(self.line(line, rule, name), bucket)
        return out

    def line(self, line: States, rule: FileRule, name: str | None) -> GroupLine:
        assert isinstance(line.shape, tuple) and line.storing.key is not None
        site, axis, key = self.site, line.shape[0], line.storing.key
        if (short := min(site.layout.reduced & {*site.state_names(line, name)}, default=None)) is not None:
            fail(
                "E225",
                f"{short} lacks dims of its parameters, and a flat buffer has all elements of each",
                at(line.span),
                remedy=f"store it by a line of its own: state {short} = like",
            )
        cut = ax.mesh_axes_of(axis)
        for a in cut:
            if a not in site.ranks.columns:
                fail(
                    "E201",
                    f"a state line is cut over `{a}`, which is in no mesh",
                    at(line.span),
                    remedy=f"the mesh axes are {', '.join(site.ranks.columns)}; another one is added to the `mesh` line"
                    if site.ranks.columns
                    else f"add the line: mesh {a}",
                )
        group = site.group(name)
        involved = self.involved(group)
        shared = [a for p in involved for a in (*p.axes, *(x for x, _ in p.entry.storing.at))]
        named = site.names_of(rule, key)
        template_axes = site.mesh_names(named - {"rank"})
        # An axis that cuts the members themselves distinguishes flats, though it may cut complete members, too.
        outer = tuple(a for a in site.ranks.columns if a in shared or (a in template_axes and a not in cut))
        used = (*outer, *(a for a in site.ranks.columns if a in cut and a not in outer))
        if "rank" in named:
            used = (*used, "rank")
        return GroupLine(line, rule, key, name, group, axis, fl.chain_of(axis), cut, outer, used, involved)

    def involved(self, group: Group | None) -> tuple[EntryPlacer, ...]:
        site = self.site
        if group is not None and group.members is not None:
            members = set(group.members)
            return tuple(p for p in site.placers if p.names[0] in members)
        out: set[str] = set()
        if group is not None and group.without is not None:
            out = {m for g in group.without for m in (site.layout.groups[g].members or ())}
        return tuple(p for p in site.placers if p.entry.path not in out and fl.is_trained(site.layout, p))

    # ---- one group -----------------------------------------------------------------------------------------------

    def group_parts(self, line: GroupLine, bucket: I64) -> list[Part]:
        names = self.site.state_names(line.line, line.name)
        found, after = FoundWindows(), bucket.copy()
        before = bucket.copy() if bucket.min() != bucket.max() else None
        for context in self.contexts(line, bucket):
            count = self.collect(line, context, found)
            alike = bucket == context.bucket
            for a, coordinate in *((a, context.full[a]) for a in line.outer), *line.line.storing.at:
                alike &= self.site.ranks.columns[a] == coordinate
            after[alike] += count
        bucket[:] = after
        values = self.values(line, names)
        boxes = _FlatBoxes(self.site, line.line.storing, line.cut, line.involved)
        pieces = boxes.trusted(boxes.clipped(found.cuts), found.rank)
        length = np.concatenate([c.length for _, _, c, _ in found.cuts] or [np.zeros(0, dtype=np.int64)])
        live: Pieces | None = None
        if any(body.is_live(members) for members, body, _, _ in found.cuts):
            pieces, live = self.site.divided(pieces)
        # Cells without a piece are padding: of the flat, and of members that are padded themselves.
        held = np.bincount(pieces.home, weights=pieces.volume, minlength=len(length)).astype(np.int64)
        loose = [c.undefined | body.is_undefined(members) for members, body, c, _ in found.cuts]
        trained = np.zeros(len(length), dtype=np.bool_)
        trained[live.home if live is not None else []] = True
        none = np.zeros(0, dtype=np.bool_)
        padding = Paddings(length - held, np.concatenate([none, *loose]), trained)
        parts = [self.part(line, found, state, (pieces, live), (length, padding)) for state in names]
        if before is not None:
            parts = [evolve(p, bucket=before) for p in parts]
        # The parameter itself is stored so, and its master with it: moments do not shift.
        return [evolve(p, values=values) if p.state in self.site.valued else p for p in parts]

    def contexts(self, line: GroupLine, bucket: I64) -> list[FlatHolders]:
        ranks = self.site.ranks
        known = line.used
        if bucket.min() != bucket.max():
            known = (*known, *(a for a in ranks.columns if a not in known and a != "rank"))
        seen: set[tuple[int, ...]] = set()
        found: dict[tuple[int, ...], fl.Places] = {}
        # If several groups share their numbers, each rank counts all of its flats, wanted or not.
        among = line.involved if len(line.line.groups or (None,)) == 1 else self.site.placers
        for here, rank in self.site.combinations(known, line.line.storing.at, *among):
            context = (*(here[a] for a in line.outer), int(bucket[rank]))
            place = (*context, *(here[a] for a in line.used))
            if place not in seen:  # ranks that differ only in an axis of another group hold the same
                seen.add(place)
                found.setdefault(context, []).append((here, rank))
        return [
            FlatHolders({a: int(c[places[0][1]]) for a, c in ranks.columns.items()}, context[-1], places)
            for context, places in found.items()
        ]

    def collect(self, line: GroupLine, context: FlatHolders, found: FoundWindows) -> int:
        """Windows of one context. Returns how many flats it has."""
        degrees, start = self.site.ranks.degrees, context.bucket
        body, runs = self.flats(line, context)
        if "bucket" not in self.site.names_of(line.rule, line.key):
            start = self.numbered(line, start)
        here_only = {a: context.full[a] for a in line.outer if degrees[a] > 1}
        for number, flat in enumerate(runs, start):
            variables = flat.variables
            if len(flat.members) == 1:  # a flat of one tensor may be called by its name
                variables = {"name": body.name(flat.members, 0), **variables}
            cut = self.cut(line, flat.members, context.places)
            record = (line.name, tuple(context.full[a] for a in line.outer), context.bucket, number)
            if record not in self.records:
                told = FlatBuffer(
                    number,
                    line.name or "",
                    here_only,
                    self.names_and_shapes(flat.members, body),
                    (),
                    0,
                    line.cut[-1] if line.cut else None,
                )
                self.records[record] = fl.flat_record(told, flat.members, line.chain)
            found.cuts.append((flat.members, body, cut, len(found.rank)))
            for here, rank in context.places:
                found.env.append({"rank": rank, **here, **variables, "bucket": number})
                found.rank.append(rank)
                found.replica.append(tuple(here_only.values()))
        return len(runs)

    def names_and_shapes(self, members: fl.Members, body: fl.Body) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """Names and local shapes of members.

        Ranks whose members have the same ones share one tuple.
        """
        entries = each(members.entry)
        shapes: dict[int, tuple[int, ...]] = {e: body.locals[e].shape for e in entries if e in body.locals}
        memo = (
            members.entry.tobytes(),
            members.choice.tobytes(),
            tuple((id(body.names[e]), shapes.get(e) or id(body.bundles.get(e))) for e in entries),
        )
        if memo not in self.records_of:
            sizes = {e: [*map(tuple, rows.shape.tolist())] for e, rows in body.bundles.items()}
            columns = zip(body.names_of(members), members.entry.tolist(), members.choice.tolist(), strict=True)
            self.records_of[memo] = tuple([(name, sizes[e][c] if e in sizes else shapes[e]) for name, e, c in columns])
        return self.records_of[memo]

    def numbered(self, line: GroupLine, start: int) -> int:
        """The bucket that a key itself numbers, `base_optimizer_state/state/1/{state}`; else `start`."""
        for said in (line.key, line.rule.key):
            for step in reversed(self.site.namer.steps(said) if said is not None else ()):
                if (
                    len(step.parts) == 1
                    and isinstance(step.parts[0], str)
                    and step.parts[0].isascii()
                    and step.parts[0].isdigit()
                    and len(step.parts[0]) <= 9
                ):
                    return int(step.parts[0])
        return start

    # ---- members ---------------------------------------------------------------------------------------------------

    def flats(self, line: GroupLine, context: FlatHolders) -> tuple[fl.Body, list[Flats]]:
        """The flats of a group on these ranks."""
        site, group, full = self.site, line.group, context.full
        axes = tuple(dict.fromkeys(a for p in line.involved for a in (*p.axes, *(x for x, _ in p.entry.storing.at))))
        shape = line.line.shape if line.line.buckets else None
        memo = (line.name, id(group), line.line.buckets, shape, tuple(full[a] for a in axes))
        if memo in self.runs:
            return self.runs[memo]
        which = fl.present(site.layout, group, site.placers, full)
        choices = {e: site.placers[e].choices(full) for e in which}
        single = [e for e in which if not site.placers[e].entry.bundle]
        body = fl.Body(
            {e: site.placers[e].local(full) for e in single},
            choices,
            {e: self.stored_names(e, full) for e in which},
            {e: self.bundle_rows(e, full) for e in which if site.placers[e].entry.bundle},
        )
        order = (tuple(which), tuple(id(choices[e]) for e in which))
        if order not in self.sequences:
            if any(site.placers[e].has_names for e in which):
                names = group.members if group is not None and group.members is not None else site.layout.tensors
                self.sequences[order] = fl.listed_order(site.placers, which, names)
            else:
                found = fl.module_order(site.placers, which, choices)
                self.sequences[order] = np.array(found, dtype=np.int64).reshape(len(found), 2)
        members = fl.ordered(site.placers, which, self.sequences[order], body)
        out: list[Flats] = []
        if group is not None and group.stated is not None:
            stated = fl.stated_order(group, members, body, self.stated, full)
            out = [Flats(row, {}) for row in stated]
        else:
            for subset, variables in self.by_group_index(group, members, body):
                subset = fl.dealt(subset, group)
                try:
                    buckets = fl.buckets_of(line.line, subset, site.layout, site.ranks.degrees, full)
                except ax.UnevenCut as error:
                    _uneven(line.line.span, error)
                out += [Flats(b, variables) for b in buckets]
        self.runs[memo] = (body, out)
        return self.runs[memo]

    def bundle_rows(self, e: int, here: dict[str, int]) -> BundleRows:
        """A row for each tensor of a bundle, on these ranks."""
        placer = self.site.placers[e]
        memo = (placer.kin, tuple(here[a] for a in placer.shape_axes))
        if memo not in self.bundles:
            columns = {a: np.array([here[a]], dtype=np.int64) for a in placer.shape_axes}
            made = rows_of(self.site.layout, placer.names, placer.entry.shape, placer.degrees, columns, self.site.k)
            self.bundles[memo] = made
        return self.bundles[memo]

    def by_group_index(self, group: Group | None, members: fl.Members, body: fl.Body) -> list[tuple[fl.Members, Env]]:
        """`group block[l] = ...`: one flat an index."""
        if group is None or not group.indices:
            return [(members, {})]
        names = [next(iter(ax.dims_of(a)), "") for a in group.indices]
        wanted = {n: parts for n, a in zip(names, group.indices, strict=True) if (parts := parts_of(a)) is not None}
        found: dict[tuple[int, ...], tuple[list[int], Env]] = {}
        for i, (e, c) in enumerate(zip(members.entry.tolist(), members.choice.tolist(), strict=True)):
            known = body.choices[e].variables
            key = tuple(int(known[n][c]) if n in known else -1 for n in names)
            at = dict(zip(names, key, strict=True))
            if any(not any(low <= at[n] < high for low, high in parts) for n, parts in wanted.items()):
                continue  # `group block[l[1, 4]]` has these layers, and no others
            if key not in found:
                said = [v for n in names for v in (n, f"{n}.local") if v in known]
                found[key] = ([], {v: int(known[v][c]) for v in said})
            found[key][0].append(i)
        return [(members.take(np.array(found[k][0], dtype=np.int64)), found[k][1]) for k in sorted(found)]

    def stored_names(self, e: int, here: dict[str, int]) -> tuple[str, ...]:
        """Stored names of an entry's tensors, choice by choice."""
        site, placer = self.site, self.site.placers[e]
        choices, key = placer.choices(here), placer.entry.storing.key
        if placer.has_names:
            return placer.names
        if key is None or site.is_raw or not len(choices):  # without a choice its indices have no values to name it by
            return self.names.setdefault((e, len(choices)), (placer.entry.path,) * len(choices))
        memo = (e, id(choices), tuple(here.get(a) for a in sorted(key.names)))
        if memo not in self.names:
            constants: Env = {"rank": 0, **here, **placer.entry.variables, "state": "weight"}
            of_choice = {n: v for n, v in choices.variables.items() if n != "state"}
            constants = {n: v for n, v in constants.items() if n not in of_choice}
            variables = Variables(constants, {}, of_choice, 1, len(choices))
            _, steps, _ = site.namer.place(key, None, key, variables)
            texts = (name_texts(step, [0] * len(choices), range(len(choices))) for step in steps)
            self.names[memo] = tuple("/".join(names) for names in zip(*texts, strict=True))
        return self.names[memo]

    def cut(self, line: GroupLine, members: fl.Members, places: fl.Places) -> fl.BufferWindows:
        """Windows of one flat.

        Flats of members with the same lengths, on ranks at the same places, are cut alike.
        """
        coordinates = tuple(tuple(here[a] for a in line.cut) for here, _ in places)
        kin = np.array([p.is_family for p in self.site.placers], dtype=np.bool_)[members.entry]
        folds = members.take(kin) if kin.any() else None  # members of families: like windows of several are one row
        known = None if folds is None else (kin.tobytes(), folds.entry.tobytes(), folds.choice.tobytes())
        memo = (line.axis, members.length.tobytes(), members.real.tobytes(), coordinates, known)
        if line.chain is not None and memo in self.cuts:
            return self.cuts[memo]
        degrees = self.site.ranks.degrees
        alike = None if folds is None else fl.Alike(np.where(kin, members.entry, -1), members.choice)
        try:
            if line.chain is not None:
                made = fl.windows_of_chain(line.chain, members.length, degrees, places, members.real, alike)
            else:
                made = fl.windows_of_tree(line.axis, members, self.site.layout, degrees, places)
        except ax.UnevenCut as error:
            _uneven(line.line.span, error)
        self.cuts[memo] = made
        return made

    # ---- the part ------------------------------------------------------------------------------------------------------

    def values(self, line: GroupLine, names: Sequence[str]) -> dict[str, tuple[float, float]]:
        """Members that are stored with a value of their own.

        Their entries give it. E217 if two give different ones.
        """
        found: dict[str, tuple[float, float]] = {}
        for placer in line.involved:
            if placer.entry.storing.scaled and self.site.valued & set(names):
                fail(
                    "E217",
                    f"`{placer.entry.path}` is stored times its scale, and inside a flat buffer that is not supported",
                    at(line.line.span, "the flat buffer"),
                    at(placer.entry.span, "value"),
                    remedy="take `value x * scale` off the entry, and cut the scale with its tensor",
                )
            own = placer.entry.storing.value
            for path in placer.entry.paths:
                if found.setdefault(path, own) != own or own != (1.0, 0.0) != line.line.storing.value:
                    fail(
                        "E217",
                        f"`{path}` has two values in one flat buffer",
                        at(line.line.span, "the flat buffer"),
                        at(placer.entry.span, "one of them"),
                        remedy="say `value` once: on the entry, for its tensor; or on the line, for all of them",
                    )
        return {path: value for path, value in found.items() if value != (1.0, 0.0)}

    def part(
        self,
        line: GroupLine,
        found: FoundWindows,
        state: str,
        pieces: tuple[Pieces, Pieces | None],
        sizes: tuple[I64, Paddings],
    ) -> Part:
        """One state of the line.

        All states share the pieces, and those of live rows.
        """
        length, padding = sizes
        count = len(found.rank)
        blocks: tuple[Block, ...] = ()
        if is_by_begin(line.rule, self.site.layout):
            fail(
                "E238",
                f"`{line.name or state}`: a flat buffer has no place in a file of framework dcp() yet",
                at(line.line.span),
                remedy="store each tensor as it is, with `like`: torch.distributed.checkpoint saves FSDP2 so",
            )
        if count:
            constants: Env = {"state": state, "group": line.name or ""}
            columns = {n: v for n, v in found.columns.items() if n not in constants}
            variables = Variables(constants, columns, {}, count, 1, found.named)
            file, key, counted = self.site.namer.in_file(line.rule, line.key, variables)
            replica = np.array(found.replica, dtype=np.int64).reshape(count, -1)
            rank = np.array(found.rank, dtype=np.int64)
            held = (padding.count, padding.undefined, padding.live)
            blocks = (Block(file, key, counted, 1, length[:, None], rank, *held, replica),)
        homes = Homes(blocks)

        def mark(spot: Spot) -> object:
            return BufferMark(id(line), state, spot)

        storing = line.line.storing
        kept = self.site.claims.claim(Claimant(homes, mark, taken(line.line.span), line.line.span))
        assert kept is None  # no two have one mark
        label = f"group {line.name}" if line.name else "all"
        return Part(
            state,
            label,
            line.rule.form or "",
            storing.dtype,
            storing.lossy,
            storing.value,
            homes,
            pieces[0],
            False,
            line.line.span,
            exact=storing.exact,
            live=pieces[1],
            copied=any(placer.copied for placer in line.involved),
            axes=tuple(dict.fromkeys((*line.used, *(a for a, _ in storing.at)))),
        )


def _column(values: list[int | str | None]) -> I64 | tuple[str, ...] | None:
    """One value a window, or None if a window has none.

    A template that names it is then refused.
    """
    if None in values:
        return None
    if all(type(v) is int for v in values):
        return np.array(values, dtype=np.int64)
    return tuple(str(v) for v in values)


# --- Boxes of the pieces of a flat buffer ---------------------------------------------------------------------------

_ROW_BITS = 32
FlatCut = tuple[
    fl.Members, fl.Body, fl.BufferWindows, int
]  # members, their bodies, windows, the number of the first window


@frozen(eq=False)
class _Base:
    start: int  # its first row in the table of all
    table: Pieces
    boxes: I64  # (members,) how many of them each member has
    first: I64  # (members,) and the first of those, in the table of all

    def has_places_of(self, other: _Base) -> bool:
        """True if boxes have the same sizes and places in local storage.

        Their elements may differ.
        """
        a, b = self.table, other.table
        return self is other or (
            np.array_equal(self.boxes, other.boxes)
            and np.array_equal(a.offset, b.offset)
            and np.array_equal(a.stride, b.stride)
            and np.array_equal(a.high - a.low, b.high - b.low)
        )


def _alike(cuts: Sequence[FlatCut], base: Sequence[_Base]) -> I64:
    """For each cut, the first one with the same windows.

    Its members have the same places, too.
    """
    first: dict[tuple[int, int], list[int]] = {}
    out = []
    for i, (_, _, cut, _) in enumerate(cuts):
        known = first.setdefault((id(cut.rows), len(base[i].table)), [])
        found = next((j for j in known if base[i].has_places_of(base[j])), i)
        if found == i:
            known.append(i)
        out.append(found)
    return np.array(out, dtype=np.int64)


@frozen(eq=False)
class _FlatBoxes:
    site: Site
    storing: Storing  # of the state line
    cut: tuple[str, ...]  # mesh axes that cut the flat
    involved: tuple[EntryPlacer, ...]

    def clipped(self, cuts: Sequence[FlatCut]) -> Pieces:
        """Intervals of members' local storage as boxes of logical tensors.

        Flats whose members lie alike in storage (ranks of tensor parallelism hold other elements in the same places) and that
        are cut alike are clipped once.
        """
        if not cuts:
            return Pieces.empty(self.site.k)
        base, table = self.bases(cuts)
        like = _alike(cuts, base)
        first, which = np.unique(like, return_inverse=True)  # the cuts that are clipped, and of each cut which of them
        windows = fl.Windows.concat(
            [r.replace(window=r.window + n) for r, n in ((cuts[i][2].rows, cuts[i][3]) for i in first)]
        )
        of_row = np.concatenate([base[i].boxes[cuts[i][2].rows.member] for i in first])
        first_row = np.concatenate([base[i].first[cuts[i][2].rows.member] for i in first])
        interval = np.repeat(np.arange(len(first_row)), of_row)
        source = first_row[interval] + within(of_row)
        picked, low, high = clip(
            table.offset[source],
            table.high[source] - table.low[source],
            table.stride[source],
            windows.start[interval],
            windows.stop[interval],
        )
        row, at_interval = source[picked], interval[picked]
        local = table.offset[row] + (low * table.stride[row]).sum(axis=1)
        order = np.lexsort((local, at_interval))
        row, at_interval, local, low, high = row[order], at_interval[order], local[order], low[order], high[order]
        # Each cut has the boxes of the one that it is like, in its own rows of the table and in its own windows.
        cut_of_row = np.repeat(np.arange(len(first)), [len(cuts[i][2].rows) for i in first])
        boxes = np.bincount(cut_of_row[at_interval], minlength=len(first))
        taken = np.repeat((np.cumsum(boxes) - boxes)[which], boxes[which]) + within(boxes[which])
        place = np.array([(b.start, cut[3]) for b, cut in zip(base, cuts, strict=True)])
        shift = np.repeat(place - place[like], boxes[which], axis=0)
        at_interval, local = at_interval[taken], local[taken]
        cut_ = table.take(row[taken] + shift[:, 0])
        first_low, last_high, stride = cut_.low + low[taken], cut_.low + high[taken], cut_.stride
        several = windows.count[at_interval] > 1  # the first dim of a family is over its members
        if several.any():
            last_high[several, 0] += windows.count[at_interval][several] - 1
            stride = stride.copy()
            stride[several, 0] = windows.pace[at_interval][several]
        return cut_.replace(
            home=windows.window[at_interval] + shift[:, 1],
            low=first_low,
            high=last_high,
            stride=stride,
            offset=local - windows.start[at_interval] + windows.position[at_interval],
        )

    def bases(self, cuts: Sequence[FlatCut]) -> tuple[list[_Base], Pieces]:
        """Boxes of the members of each cut, and one table of all.

        Each list is as long as its cut.
        """
        done: dict[int, _Base] = {}
        total = 0
        for members, body, _, _ in cuts:
            if id(members) not in done:
                table, boxes = self.member_boxes(members, body)
                done[id(members)] = _Base(total, table, boxes, np.cumsum(boxes) - boxes + total)
                total += len(table)
        return [done[id(members)] for members, *_ in cuts], Pieces.concat([b.table for b in done.values()], self.site.k)

    def member_boxes(self, members: fl.Members, body: fl.Body) -> tuple[Pieces, I64]:
        """Boxes of all members of a flat in order, and their numbers."""
        tables, owner = [], []
        count = np.zeros(len(members), dtype=np.int64)
        for e in each(members.entry):
            (which,) = (members.entry == e).nonzero()
            if e in body.bundles:
                tables.append(self.bundle_boxes(e, body.bundles[e], members.choice[which]))
                owner.append(which)
                count[which] = 1
                continue
            placer, local = self.site.placers[e], body.locals[e]
            rows = len(local.offset)
            if not rows:
                continue
            low, high = (np.concatenate([ends[None]] * len(which)) for ends in (local.low, local.high))
            paths = [placer.entry.targets[label] for label in local.label_of]
            for path in dict.fromkeys(paths):
                mine = [i for i, p in enumerate(paths) if p == path]
                dims, positions = placer.positions(path, body.choices[e])
                for n, dim in enumerate(dims):
                    at_ = positions[members.choice[which], n][:, None]
                    low[:, mine, dim], high[:, mine, dim] = at_, at_ + 1
            k = self.site.k
            every = len(which) * rows
            # Member and row of a box, if the policy depends on them: `trusted` puts the policy here.
            apart = bool(self.site.partly_loose(self.policy(placer)[0], placer))
            whose = (e << _ROW_BITS) + (np.arange(rows, dtype=np.int64) if apart else np.zeros(rows, dtype=np.int64))
            tables.append(
                Pieces(
                    np.array([self.site.number[p] for p in paths] * len(which), dtype=np.int64),
                    np.zeros(every, dtype=np.int64),
                    low.reshape(every, k),
                    high.reshape(every, k),
                    np.concatenate([local.stride] * len(which)),
                    np.zeros((every, k), dtype=np.int64),
                    np.concatenate([local.offset] * len(which)),
                    np.concatenate([whose] * len(which)),
                    np.zeros(every, dtype=np.int64),
                )
            )
            owner.append(np.repeat(which, rows))
            count[which] = rows
        table = Pieces.concat(tables, self.site.k)
        if not owner:
            return table, count
        return table.take(np.argsort(np.concatenate(owner), kind="stable")), count

    def bundle_boxes(self, e: int, rows: BundleRows, choice: I64) -> Pieces:
        """One box for each of some tensors of a bundle."""
        numbers = np.array([self.site.number[name] for name in rows.names], dtype=np.int64)
        none, zero = np.zeros((len(choice), self.site.k), dtype=np.int64), np.zeros(len(choice), dtype=np.int64)
        sides = rows.low[choice], rows.high[choice], rows.stride[choice]
        return Pieces(numbers[choice], zero, *sides, none, zero, zero + (e << _ROW_BITS), zero)

    def trusted(self, pieces: Pieces, rank: Sequence[int]) -> Pieces:
        """Pieces with the policy for copies at each home's rank.

        It is that of the tensor's own entry, or else the line's. Until then, `policy` is the number of that entry, and
        of a row of it.
        """
        if not any(s.speaks_of_copies for s in (self.storing, *(p.entry.storing for p in self.involved))):
            return pieces.replace(policy=np.zeros_like(pieces.policy))
        at_rank = np.array(rank, dtype=np.int64)[pieces.home]
        _, first, which = np.unique(numbered([pieces.policy, at_rank]), return_index=True, return_inverse=True)
        policy, over = [], []
        for row in first.tolist():
            placer = self.site.placers[int(pieces.policy[row]) >> _ROW_BITS]
            storing, cut = self.policy(placer)
            local = placer.local({a: int(self.site.ranks.columns[a][at_rank[row]]) for a in placer.shape_axes})
            policies = self.site.policies(storing, cut, placer, int(at_rank[row]), local)
            policy.append(int(policies[int(pieces.policy[row]) & ((1 << _ROW_BITS) - 1)]) if len(policies) else 0)
            over.append(self.site.over(storing))
        return pieces.replace(
            policy=np.array(policy, dtype=np.int64)[which], over=np.array(over, dtype=np.int64)[which]
        )

    def policy(self, placer: EntryPlacer) -> tuple[Storing, frozenset[str]]:
        """Policy of a member's copies, and the axes that cut everything.

        No two ranks along these hold the same of the member.
        """
        own = placer.entry.storing
        cut = frozenset(placer.axes) - placer.partly | frozenset(self.cut)
        return (own if own.speaks_of_copies else self.storing), cut


def _uneven(span: Span, error: ax.UnevenCut) -> NoReturn:
    """Refuse a cut of a flat buffer, or of its members."""
    remedy = "pad it first: pad(flat(each), dp)@dp"
    fail("E204", f"a flat buffer: {error.reason}", at(span, "cut here"), remedy=remedy)
