"""locate: every stored tensor of a layout, and which box of which logical tensor lies where in it.

Nothing is enumerated but the coordinates that change something. Not here: files, bytes, torch.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from attrs import define, evolve, field
from numpy.typing import NDArray

from ucpl.errors import fail
from ucpl.extents import Flat, Key
from ucpl.layout import Entry, FileRule, Group, Layout, States, Storing
from ucpl.layout import axes as ax
from ucpl.layout.layout import Policy
from ucpl.layout.scope import at
from ucpl.layout.templates import Template, key_steps, render, template
from ucpl.regions import flats as fl
from ucpl.regions.boxes import clip
from ucpl.regions.cells import CutError
from ucpl.regions.entries import Choice, EntryPlacer, Local, Ranks
from ucpl.regions.placement import POLICIES, Home, Part, Pieces, Placement, joined, no_pieces

I64 = NDArray[np.int64]
HOME_LIMIT = 20_000_000
VALUED = ("weight", "fp32", "master", "param")


def locate(layout: Layout, *, rank: int | None = None, stated: fl.Stated | None = None) -> Placement:
    """Place every tensor of a layout.

    rank:   only what this rank holds (other ranks are not enumerated).
    stated: (file rule, key, coordinates) -> flats as a checkpoint states them, for groups `from FILE "key"`.

    Raises UcplError E2xx.
    """
    return _Locator(layout, rank, stated).run()


@define
class _Locator:
    layout: Layout
    rank: int | None
    stated: fl.Stated | None
    ranks: Ranks = field(init=False)
    number: dict[str, int] = field(init=False)
    k: int = field(init=False)
    is_raw: bool = field(
        init=False
    )  # no dim has a name: `infer` wrote the model, and paths are the checkpoint's own names
    placers: list[EntryPlacer] = field(factory=list)
    templates: dict[int, tuple[Template, ...]] = field(factory=dict)
    nests: dict[tuple[str, str], Template] = field(factory=dict)
    claimed: dict[tuple[str, Key], tuple[Any, Any]] = field(factory=dict)
    flats: dict[Any, Flat] = field(factory=dict)
    orders: dict[Any, list[list[fl.Member]]] = field(factory=dict)

    def run(self) -> Placement:
        layout = self.layout
        self.ranks = Ranks(layout)
        if self.rank is not None and not 0 <= self.rank < self.ranks.count:
            fail("E213", f"rank {self.rank} of {self.ranks.count}", remedy=f"ranks are 0 to {self.ranks.count - 1}")
        tensors = tuple(layout.tensors)
        self.number = {path: i for i, path in enumerate(tensors)}
        self.k = max((len(t.dims) for t in layout.tensors.values()), default=0) or 1
        self.is_raw = all("#" in dim for t in layout.tensors.values() for dim in t.dims)
        self.placers = [EntryPlacer(layout, e, self.number, self.k) for e in layout.entries]
        parts: list[Part] = []
        for placer in self.placers:
            entry = placer.entry
            rule = layout.files[entry.storing.file]
            if rule.form is not None and entry.storing.key is not None:
                parts.append(self.entry_part(placer, rule, entry.storing.key, "weight"))
        for line in layout.state_lines:
            parts += self.state_parts(line)
        return Placement(layout, tensors, tuple(parts), tuple(self.flats.values()))

    def combinations(
        self, axes: tuple[str, ...], where: tuple[tuple[str, int], ...]
    ) -> list[tuple[dict[str, int], int]]:
        if self.rank is None:
            return self.ranks.combinations(axes, where)
        here = {a: int(c[self.rank]) for a, c in self.ranks.columns.items()}
        return [(here, self.rank)] if all(here[a] == v for a, v in where) else []

    def mesh_names(self, names: frozenset[str]) -> tuple[str, ...]:
        return tuple(a for a in self.ranks.columns if a in names)

    # ---- entries -------------------------------------------------------------------------------------------------

    def names_of(self, rule: FileRule, key: Template | None) -> frozenset[str]:
        out: frozenset[str] = frozenset()
        for t in (rule.path, rule.key, key):
            if t is not None:
                out |= t.names
        return out

    def entry_part(
        self,
        placer: EntryPlacer,
        rule: FileRule,
        key: Template,
        state: str,
        like: States | None = None,
        counts: dict[str, int] | None = None,
    ) -> Part:
        """What one entry stores of one state. `like`: as a state line says; `counts`: numbers that its template may use."""
        entry = placer.entry
        storing = like.storing if like is not None else entry.storing
        used = self.mesh_names(self.names_of(rule, key) | set(placer.axes) | {a for a, _ in entry.storing.at})
        where = (*entry.storing.at, *(storing.at if like is not None else ()))
        # Along these, homes may hold the same elements: the axes that do not cut, or not everything.
        shared = {a for a in used if a not in placer.axes} | ax.partly_cut(entry.shape)
        homes: list[Home] = []
        tables: list[Pieces] = []
        for here, rank in self.combinations(used, where):
            local = placer.local(here)
            choices = placer.choices(here)
            if not choices:
                continue
            first = len(homes)
            fresh = []
            for choice in choices:
                variables = {
                    "rank": rank,
                    **here,
                    **entry.variables,
                    **(counts or {}),
                    **choice.variables,
                    "state": state,
                }
                home = evolve(
                    self.home(rule, key, variables, local.shape, rank, local.padding, local.undefined),
                    live=local.live,
                    replica=tuple(here[a] for a in used if a in shared and self.ranks.degrees[a] > 1),
                )
                mark = (
                    state,
                    tuple(entry.targets.items()),
                    entry.shape,
                    tuple(here[a] for a in placer.shape_axes),
                    choice.digits,
                )
                if self.claim(home, mark, entry):
                    homes.append(home)
                    fresh.append(choice)
            said = placer.entry.storing if like is None or entry.storing.policy != "same" else storing
            kept = self.policy_at(said, placer.axes, rank)
            tables.append(self.rows(placer, local, fresh, first, kept))
            if len(homes) > HOME_LIMIT:
                fail("E214", f"`{entry.path}` is stored in more than {HOME_LIMIT} tensors", at(entry.span))
        # `value x - 1` says how the parameter itself is stored: its moments do not shift with it.
        value = entry.storing.value if state in self.valued else (1.0, 0.0)
        return Part(
            state,
            entry.path,
            rule.form or "",
            storing.dtype,
            storing.lossy,
            value,
            tuple(homes),
            joined(tables, self.k),
            entry.alias is not None,
            entry.span,
        )

    @property
    def valued(self) -> set[str]:
        """States that hold the parameter's own value, as far as names and derivations tell."""
        return {*VALUED, *(n for d in self.layout.derived for n in (d.state, d.source))}

    def policy_at(self, storing: Storing, cut: tuple[str, ...], rank: int) -> Policy:
        """Of a mean or sum over some axes, copies along the other axes count once: those at coordinate 0."""
        axes = storing.policy_axes
        if storing.policy not in ("mean", "sum") or not axes:
            return storing.policy
        if all(self.ranks.degrees.get(a, 1) == 1 for a in axes):
            return "same"
        mesh = self.layout.mesh_of(axes[0])
        named = {*axes, *cut, *(a for a, _ in storing.at)}
        first = all(self.ranks.columns[a][rank] == 0 for a in (mesh.axes if mesh else ()) if a not in named)
        return storing.policy if first else "any"

    def claim(self, home: Home, mark: Any, entry: Entry | States) -> bool:
        """Whether this (file, key) is new. The same tensor on another rank is the same home; another tensor is an error."""
        place = (home.file, home.key)
        if place not in self.claimed:
            self.claimed[place] = (mark, entry.span)
            return True
        other, span = self.claimed[place]
        if other == mark:
            return False
        fail(
            "E215",
            f"two tensors, or two pieces of one, have one place: {'/'.join(map(str, home.key))} of {home.file}",
            at(entry.span, "this one"),
            at(span, "and this one"),
            remedy="name the index or mesh axis that tells them apart in the file's or the key's template",
        )

    def home(
        self,
        rule: FileRule,
        key: Template,
        variables: dict[str, Any],
        shape: tuple[int, ...],
        rank: int,
        padding: int,
        undefined: bool,
    ) -> Home:
        steps = self.key(key, variables)
        if rule.key is not None:
            outer: list[str | int] = []
            for step in self.steps(rule.key):
                if (
                    step.text
                    and len(step.parts) == 1
                    and not isinstance(step.parts[0], str)
                    and step.parts[0].path == "key"
                ):
                    outer += steps
                else:
                    outer.append(
                        _step(render(step, {**variables, "key": "/".join(map(str, steps))}, self.layout.scope), step)
                    )
            final = tuple(outer)
        else:
            final = tuple(steps)
        assert rule.path is not None
        text = render(rule.path, {**variables, "key": "/".join(map(str, steps))}, self.layout.scope)
        return Home(text, final, shape, rank, padding, undefined)

    def steps(self, template: Template) -> tuple[Template, ...]:
        if id(template) not in self.templates:
            self.templates[id(template)] = key_steps(template) if template.text else ()  # "": the file is the tensor
        return self.templates[id(template)]

    def key(self, template: Template, variables: dict[str, Any]) -> list[str | int]:
        return [_step(render(step, variables, self.layout.scope), step) for step in self.steps(template)]

    def rows(self, placer: EntryPlacer, local: Local, choices: list[Choice], first: int, policy: str) -> Pieces:
        """Boxes of one coordinate, one copy a choice, with the bracketed dims filled in."""
        p, h = len(local.offset), len(choices)
        if p == 0 or h == 0:
            return no_pieces(self.k)
        paths = [placer.entry.targets[label] for label in local.label_of]
        tensor = np.array([self.number[path] for path in paths], dtype=np.int32)
        low, high = np.tile(local.low, (h, 1)), np.tile(local.high, (h, 1))
        if placer.entry.indices:
            for i, path in enumerate(paths):
                for n, choice in enumerate(choices):
                    for dim, position in placer.fixed(path, choice):
                        low[n * p + i, dim], high[n * p + i, dim] = position, position + 1
        return Pieces(
            np.tile(tensor, h),
            np.repeat(np.arange(first, first + h, dtype=np.int32), p),
            low,
            high,
            np.tile(local.stride, (h, 1)),
            np.tile(local.offset, h),
            np.full(p * h, POLICIES.index(policy), dtype=np.int8),
        )

    # ---- states --------------------------------------------------------------------------------------------------

    def state_names(self, line: States, group: str | None) -> tuple[str, ...]:
        """Names of the states that a line stores for a group: those it names, or those that no other line names."""
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

    def state_parts(self, line: States) -> list[Part]:
        rule = self.layout.files[line.storing.file]
        if rule.form is None:
            return []
        if line.shape == "like":
            return self.like_parts(line, rule)
        out: list[Part] = []
        bucket = np.zeros(self.ranks.count, dtype=np.int64)  # how many flats of the line each rank has so far
        for g in line.groups or (None,):
            names = self.state_names(line, g)
            group = self.layout.groups.get(g) if g is not None else None
            out += self.flat_parts(line, rule, g, group, names, bucket)
        return out

    def like_parts(self, line: States, rule: FileRule) -> list[Part]:
        out = []
        position = 0
        for number, g in enumerate(line.groups or (None,)):
            names = self.state_names(line, g)
            group = self.layout.groups.get(g) if g is not None else None
            placers = [p for p in self.placers if p.entry.alias is None and fl._trained(self.layout, p)]
            if group is not None and group.members is not None:
                order = {m: i for i, m in enumerate(group.members)}
                placers = sorted((p for p in placers if p.entry.path in order), key=lambda p: order[p.entry.path])
            for member, placer in enumerate(placers):
                counts = {"group": number, "member": member, "number": position, "bucket": number}
                position += 1
                key = line.storing.key or placer.entry.storing.key
                if key is None:
                    continue
                for state in names:
                    inner = key
                    if line.storing.key is not None and placer.entry.storing.key is not None and "key" in key.names:
                        inner = self.nested(key, placer.entry.storing.key)
                    out.append(self.entry_part(placer, rule, inner, state, line, counts))
        return out

    def nested(self, outer: Template, inner: Template) -> Template:
        """`{key}` in the template of a `like` line is the entry's own key."""
        memo = (outer.text, inner.text)
        if memo not in self.nests:
            self.nests[memo] = template(outer.text.replace("{key}", inner.text), outer.span)
        return self.nests[memo]

    def flat_parts(
        self, line: States, rule: FileRule, g: str | None, group: Group | None, names: tuple[str, ...], bucket: I64
    ) -> list[Part]:
        assert isinstance(line.shape, tuple)
        axis, key = line.shape[0], line.storing.key
        assert key is not None
        chain = fl.chain_of(axis)
        cut_axes = ax.mesh_axes_of(axis)
        for a in cut_axes:
            if a not in self.ranks.columns:
                fail(
                    "E201",
                    f"a state line is cut over `{a}`, which is in no mesh",
                    at(line.span),
                    remedy=f"add it: mesh {a} ...",
                )
        involved = self.involved(group)
        shared = [a for p in involved for a in (*p.axes, *(x for x, _ in p.entry.storing.at))]
        template_axes = self.mesh_names(self.names_of(rule, key) - {"rank"})
        # An axis that cuts the members themselves tells flats apart, though it may cut them as wholes, too.
        outer = tuple(a for a in self.ranks.columns if a in shared or (a in template_axes and a not in cut_axes))
        used = (*outer, *(a for a in self.ranks.columns if a in cut_axes and a not in outer))
        if "rank" in self.names_of(rule, key):
            used = (*used, "rank")
        contexts: dict[tuple[int, ...], list[tuple[dict[str, int], int]]] = {}
        known = (
            used
            if bucket.min() == bucket.max()
            else (*used, *(a for a in self.ranks.columns if a not in used and a != "rank"))
        )
        seen: set[tuple[int, ...]] = set()
        for here, rank in self.combinations(known, line.storing.at):
            context = (*(here[a] for a in outer), int(bucket[rank]))
            place = (*context, *(here[a] for a in used))
            if place not in seen:  # ranks that differ only in an axis of another group hold the same
                seen.add(place)
                contexts.setdefault(context, []).append((here, rank))
        after = bucket.copy()
        homes: list[Home] = []
        windows: list[tuple[list[fl.Member], fl.Window, int]] = []
        for context, places in contexts.items():
            full = {a: int(c[places[0][1]]) for a, c in self.ranks.columns.items()}
            start = context[-1]
            runs = self.flat_runs(line, group, g, full, places[0][0], involved)
            if "bucket" not in self.names_of(rule, key):
                start = self.numbered(rule, key, start)
            for offset, (members, variables) in enumerate(runs):
                if len(members) == 1:  # a flat of one tensor may be called by its name
                    variables = {"name": members[0].name, **variables}
                found = self.windows(line, axis, chain, members, places)
                here_only = {a: full[a] for a in outer if self.ranks.degrees[a] > 1}
                record = (g, context, start + offset)
                if record not in self.flats:
                    self.flats[record] = fl.flat_record(
                        start + offset,
                        g or "",
                        here_only,
                        members,
                        chain,
                        self.ranks.degrees,
                        cut_axes[-1] if cut_axes else None,
                    )
                for window in found:
                    env = {"rank": window.rank, **window.here, **variables, "bucket": start + offset, "group": g or ""}
                    homes.append(Home("", (), (window.length,), window.rank, window.padding, window.undefined))
                    windows.append((members, window, len(homes) - 1))
                    homes[-1] = evolve(
                        self.home(
                            rule,
                            key,
                            {**env, "state": "\0"},
                            (window.length,),
                            window.rank,
                            window.padding,
                            window.undefined,
                        ),
                        replica=tuple(here_only.values()),
                    )
            alike = bucket == context[-1]
            for a, place_on_axis in (*((a, full[a]) for a in outer), *line.storing.at):
                alike &= self.ranks.columns[a] == place_on_axis
            after[alike] += len(runs)
        bucket[:] = after
        changed = next((p for p in involved if p.entry.storing.value != (1.0, 0.0)), None)
        if changed is not None and self.valued & set(names):
            fail(
                "E217",
                f"`{changed.entry.path}` is stored with another value, and inside a flat buffer that is not supported",
                at(line.span, "the flat buffer"),
                at(changed.entry.span, "value"),
            )
        pieces = self.reduced(self.clipped(windows, line), homes, cut_axes, involved, line)
        # What no piece covers is padding: of the flat, and of members that are padded themselves.
        held = np.bincount(pieces.home, weights=(pieces.high - pieces.low).prod(axis=1), minlength=len(homes)).astype(
            np.int64
        )
        odd = {
            id(members): (any(m.local.undefined for m in members), any(m.local.live for m in members))
            for members, _, _ in windows
        }
        inner = [odd[id(members)] for members, _, _ in windows]
        homes = [
            evolve(h, padding=h.shape[0] - n, undefined=h.undefined or u, live=h.live or v)
            for h, n, (u, v) in zip(homes, held.tolist(), inner, strict=True)
        ]
        out = []
        for state in names:
            mine = tuple(
                evolve(
                    h,
                    file=h.file.replace("\0", state),
                    key=tuple(s.replace("\0", state) if isinstance(s, str) else s for s in h.key),
                )
                for h in homes
            )
            for i, h in enumerate(mine):
                self.claim(h, (id(line), g, i), line)
            out.append(
                Part(
                    state,
                    f"group {g}" if g else "all",
                    rule.form or "",
                    line.storing.dtype,
                    line.storing.lossy,
                    line.storing.value,
                    mine,
                    pieces,
                    False,
                    line.span,
                )
            )
        return out

    def reduced(
        self, pieces: Pieces, homes: list[Home], cut: tuple[str, ...], involved: list[EntryPlacer], line: States
    ) -> Pieces:
        """Pieces with the policy that holds at each home's rank."""
        rows = np.flatnonzero((pieces.policy == POLICIES.index("mean")) | (pieces.policy == POLICIES.index("sum")))
        if not len(rows):
            return pieces
        said = {
            self.number[path]: (p.entry.storing, p.axes)
            for p in involved
            if p.entry.storing.policy != "same"
            for path in p.entry.targets.values()
        }
        policy = pieces.policy.copy()
        for row in rows.tolist():
            storing, own = said.get(int(pieces.tensor[row]), (line.storing, ()))
            policy[row] = POLICIES.index(self.policy_at(storing, (*own, *cut), homes[pieces.home[row]].rank))
        return evolve(pieces, policy=policy)

    def numbered(self, rule: FileRule, key: Template, start: int) -> int:
        """The bucket that a key itself numbers, `base_optimizer_state/state/1/{state}`; else `start`."""
        for said in (key, rule.key):
            for step in reversed(self.steps(said) if said is not None else ()):
                if len(step.parts) == 1 and isinstance(step.parts[0], str) and step.parts[0].isdigit():
                    return int(step.parts[0])
        return start

    def involved(self, group: Group | None) -> list[EntryPlacer]:
        if group is not None and group.members is not None:
            members = set(group.members)
            return [p for p in self.placers if p.entry.path in members]
        if group is not None and group.without is not None:
            out = {m for g in group.without for m in (self.layout.groups[g].members or ())}
            return [p for p in self.placers if p.entry.path not in out and fl._trained(self.layout, p)]
        return [p for p in self.placers if fl._trained(self.layout, p)]

    def flat_runs(
        self,
        line: States,
        group: Group | None,
        g: str | None,
        full: dict[str, int],
        here: dict[str, int],
        involved: list[EntryPlacer],
    ) -> list[tuple[list[fl.Member], dict[str, Any]]]:
        """The flats of a group on these ranks: members, and variables of the group's own indices."""
        axes = tuple(dict.fromkeys(a for p in involved for a in (*p.axes, *(x for x, _ in p.entry.storing.at))))
        memo = (g, id(group), line.buckets, line.shape if line.buckets else None, tuple(full[a] for a in axes))
        if memo in self.orders:
            return self.orders[memo]  # type: ignore[return-value]
        names = [p.entry.path for p in self.placers]
        members = fl.ordered(self.layout, group, self.placers, names, full, self.stored_name)
        out: list[tuple[list[fl.Member], dict[str, Any]]] = []
        if group is not None and group.stated is not None:
            out = [(row, {}) for row in fl.stated_order(self.layout, group, members, self.stated, full)]
        else:
            for subset, variables in self.by_group_index(group, members, full):
                subset = fl.dealt(subset, group)
                out += [(b, variables) for b in fl.buckets_of(line, subset, self.layout, self.ranks.degrees, full)]
        self.orders[memo] = out  # type: ignore[assignment]
        return out

    def by_group_index(
        self, group: Group | None, members: list[fl.Member], full: dict[str, int]
    ) -> list[tuple[list[fl.Member], dict[str, Any]]]:
        """`group block[l] = ...`: one flat an index."""
        if group is None or not group.indices:
            return [(members, {})]
        names = [fl._index_name(a) for a in group.indices]
        out: dict[tuple[int, ...], tuple[list[fl.Member], dict[str, Any]]] = {}
        for member in members:
            key = tuple(member.choice.variables.get(n, -1) for n in names)
            if key not in out:
                variables = {
                    v: member.choice.variables[v]
                    for n in names
                    for v in (n, f"{n}.local")
                    if v in member.choice.variables
                }
                out[key] = ([], variables)
            out[key][0].append(member)
        return [out[k] for k in sorted(out)]

    def stored_name(self, e: int, choice: Choice, here: dict[str, int]) -> str:
        entry = self.placers[e].entry
        if entry.storing.key is None or self.is_raw:
            return entry.path
        variables = {"rank": 0, **here, **entry.variables, **choice.variables, "state": "weight"}
        return "/".join(map(str, self.key(entry.storing.key, variables)))

    def windows(
        self,
        line: States,
        axis: ax.Axis,
        chain: fl.Chain | None,
        members: list[fl.Member],
        places: list[tuple[dict[str, int], int]],
    ) -> list[fl.Window]:
        try:
            if chain is not None:
                lengths = np.array([m.length for m in members], dtype=np.int64)
                reals = np.array([m.real for m in members], dtype=np.int64)
                return fl.windows_of_chain(chain, lengths, self.ranks.degrees, places, reals)
            return fl.windows_of_tree(axis, members, self.layout, self.ranks.degrees, places)
        except CutError as error:
            fail(
                "E204",
                f"a flat buffer: {error.reason}",
                at(line.span, "cut here"),
                remedy="pad it first: pad(flat(each), dp)@dp",
            )

    def clipped(self, windows: list[tuple[list[fl.Member], fl.Window, int]], line: States) -> Pieces:
        """Intervals of members' local storage as boxes of logical tensors."""
        unique: dict[int, tuple[int, int]] = {}  # id(member) -> rows of the base table
        base: list[Pieces] = []
        rows = 0
        keep: list[fl.Member] = []
        row_begin: list[I64] = []
        row_count: list[I64] = []
        starts: list[I64] = []
        stops: list[I64] = []
        places: list[I64] = []
        home_of: list[I64] = []
        for members, window, home in windows:
            begin, count = [], []
            for m in window.member.tolist():
                member = members[m]
                if id(member) not in unique:
                    keep.append(member)
                    placer = self.placers[member.entry]
                    policy = placer.entry.storing.policy
                    table = self.rows(
                        placer, member.local, [member.choice], 0, policy if policy != "same" else line.storing.policy
                    )
                    base.append(table)
                    unique[id(member)] = (rows, len(table))
                    rows += len(table)
                b, c = unique[id(member)]
                begin.append(b)
                count.append(c)
            row_begin.append(np.array(begin, dtype=np.int64))
            row_count.append(np.array(count, dtype=np.int64))
            starts.append(window.start)
            stops.append(window.stop)
            places.append(window.position)
            home_of.append(np.full(len(begin), home, dtype=np.int64))
        if not base:
            return no_pieces(self.k)
        table = joined(base, self.k)
        begin_all, count_all = np.concatenate(row_begin), np.concatenate(row_count)
        start_all, stop_all = np.concatenate(starts), np.concatenate(stops)
        place_all, home_all = np.concatenate(places), np.concatenate(home_of)
        interval = np.repeat(np.arange(len(begin_all)), count_all)
        within = np.arange(len(interval)) - np.repeat(np.cumsum(count_all) - count_all, count_all)
        source = begin_all[interval] + within
        size = table.high[source] - table.low[source]
        picked, low, high = clip(
            table.offset[source], size, table.stride[source], start_all[interval], stop_all[interval]
        )
        row = source[picked]
        at_interval = interval[picked]
        local = table.offset[row] + (low * table.stride[row]).sum(axis=1)
        order = np.lexsort((local, at_interval))
        row, at_interval, local, low, high = row[order], at_interval[order], local[order], low[order], high[order]
        return Pieces(
            table.tensor[row],
            home_all[at_interval].astype(np.int32),
            table.low[row] + low,
            table.low[row] + high,
            table.stride[row],
            local - start_all[at_interval] + place_all[at_interval],
            table.policy[row],
        )


def _step(text: str, template: Template) -> str | int:
    """A step of a key. A whole number that the template writes or counts is a position; a tensor's name never is."""
    names = template.names
    if text.isdigit() and not (names & {"name", "alias", "owner"}):
        return int(text)
    return text
