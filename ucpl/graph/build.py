"""build: two placements joined into a dependency graph, proved complete before any byte moves.

Every target element has exactly one source class; every source element is used, a copy, derived, or dropped by name.
Where that does not hold, the element is named.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
from attrs import define, evolve, field, frozen
from numpy.typing import NDArray

from ucpl.errors import Label, fail
from ucpl.extents import DTYPES, Key, StoredTensor
from ucpl.graph import nodes as ops
from ucpl.graph.copies import Chosen, choose
from ucpl.graph.fragments import PASSES, Fragments, intersect
from ucpl.graph.rows import Rows, rows_of
from ucpl.layout import Layout
from ucpl.layout.scope import at, nearest
from ucpl.regions import Home, Part, Placement, element_name
from ucpl.regions.boxes import subtract
from ucpl.regions.placement import POLICIES

if TYPE_CHECKING:
    import networkx as nx

I64 = NDArray[np.int64]

# Every value of the first is exactly a value of the second.
EXACT = {
    ("bf16", "f32"), ("f16", "f32"), ("bf16", "f64"), ("f16", "f64"), ("f32", "f64"), ("u8", "i16"), ("u8", "i32"),
    ("u8", "i64"),
    ("i8", "i16"), ("i8", "i32"), ("i8", "i64"), ("i16", "i32"), ("i16", "i64"), ("i32", "i64"), ("i32", "f64"), ("i16", "f32"),
    ("bool", "u8"), ("f8_e4m3fn", "f32"), ("f8_e5m2", "f32"), ("f8_e4m3fn", "bf16"), ("f8_e5m2", "bf16"),
}  # fmt: skip


@frozen(eq=False)
class Batch:
    """Moves of one kind and one state: what `order` turns into the plan's Moves."""

    kind: str  # copy, check, mean, sum
    state: str
    fragments: Fragments
    source_value: tuple[float, float]
    target_value: tuple[float, float]
    lossy: bool


@define(eq=False)
class Graph:
    """The dependency graph (`net`; a node is a record of graph.nodes) and its columns."""

    source: Placement
    target: Placement
    edges: list[tuple[ops.Node, ops.Node]] = field(factory=list)
    sources: list[StoredTensor] = field(factory=list)
    targets: list[StoredTensor] = field(factory=list)
    batches: list[Batch] = field(factory=list)
    derived: list[str] = field(factory=list)
    dropped: list[str] = field(factory=list)

    @property
    def net(self) -> nx.DiGraph:
        """The graph as networkx knows it: for those who look at it. Planning does not wait for its import."""
        import networkx as nx

        return nx.DiGraph(self.edges)

    def __str__(self) -> str:
        import networkx as nx

        lines = []
        net = self.net
        for node in nx.lexicographical_topological_sort(net, key=str):
            arrows = ", ".join(str(m) for m in net.successors(node))
            lines.append(f"{node}" + (f"  ->  {arrows}" if arrows else ""))
        return "\n".join(lines)


def build(
    source: Placement,
    target: Placement,
    *,
    drop: tuple[str, ...] = (),
    dtype_of: Callable[[str, Key], str | None] | None = None,
) -> Graph:
    """Join source and target.

    drop:     names of tensors and states that the target may leave out.
    dtype_of: the dtype that a checkpoint states for a stored tensor of the source, where the spec says none.

    Raises UcplError E30x: a hole, an overlap, a tensor without a place, a cast that loses.
    """
    return _Builder(source, target, set(drop), dtype_of).run()


@define
class _Builder:
    source: Placement
    target: Placement
    drop: set[str]
    dtype_of: Callable[[str, Key], str | None] | None
    graph: Graph = field(init=False)
    k: int = field(init=False)
    common: dict[str, int] = field(factory=dict)
    first_source: dict[int, int] = field(factory=dict)  # part -> index of its first home in plan.sources
    first_target: dict[int, int] = field(factory=dict)
    source_part: list[int] = field(factory=list)  # plan.sources index -> part
    geometry: dict[Any, Joined] = field(factory=dict)
    used: set[tuple[str, str]] = field(factory=set)  # (tensor, state) that went somewhere

    def run(self) -> Graph:
        self.graph = Graph(self.source, self.target)
        self.check_models()
        for name in self.drop:
            known = {p.state for p in self.source.parts} | set(self.source.tensors) | set(self.source.layout.aliases)
            if name not in known and not any(s.name == name for s in self.source.layout.states):
                held = sorted({p.state for p in self.source.parts})
                close = nearest(name, [*held, *self.source.tensors])
                fail(
                    "E300",
                    f"--drop {name}: no tensor or state of that name",
                    Label("<command line>", where=f"--drop {name}"),
                    remedy=f"did you mean `{close}`?" if close else f"its states: {', '.join(held)}",
                )
        self.common = {path: i for i, path in enumerate(self.target.tensors)}
        self.k = max(
            [1]
            + [p.pieces.low.shape[1] for p in self.source.parts]
            + [p.pieces.low.shape[1] for p in self.target.parts]
        )
        self.place_targets()
        states = list(dict.fromkeys(p.state for p in self.target.parts))
        for state in states:
            self.state(state)
        self.leftovers()
        self.live_rows()
        self.settle_dtypes()
        return self.graph

    def live_rows(self) -> None:
        """Padding that was trained is not a part of the model: that it stays behind is said."""
        for part in self.source.parts:
            count = sum(h.padding for h in part.homes if h.live)
            if count:
                self.graph.dropped.append(
                    f"{part.state} of {part.label}: {count} elements of live padding are not kept"
                )

    def settle_dtypes(self) -> None:
        """A target that is padding alone (a rank beyond the end of the vocabulary) has the dtype of its part's others."""
        for number, part in enumerate(self.target.parts):
            first = self.first_target[number]
            homes = self.graph.targets[first : first + len(part.homes)]
            known = next((t.dtype for t in homes if t.dtype), "")
            for i, t in enumerate(homes):
                if not t.dtype and known:
                    self.graph.targets[first + i] = evolve(t, dtype=known)

    # ---- models ----------------------------------------------------------------------------------------------------

    def check_models(self) -> None:
        """Both sides speak of the same tensors."""
        ours, theirs = self.source.layout.tensors, self.target.layout.tensors
        for path, tensor in theirs.items():
            other = ours.get(path)
            if other is None:
                if path in self.drop:
                    continue
                fail(
                    "E301",
                    f"the target stores `{path}`, which the source's model lacks",
                    at(tensor.span) if tensor.span.line else Label(self.target.layout.call, where=path),
                    remedy="source and target must be layouts of one model",
                )
            named = all("#" not in d for d in (*tensor.dims, *other.dims))
            if other.counts != tensor.counts or (named and other.dims != tensor.dims):
                fail(
                    "E302",
                    f"`{path}` is {_shape(other.dims, other.counts)} in the source and"
                    f" {_shape(tensor.dims, tensor.counts)} in the target",
                    at(other.span, "source") if other.span.line else Label(self.source.layout.call, where=path),
                    at(tensor.span, "target") if tensor.span.line else Label(self.target.layout.call, where=path),
                )

    # ---- homes -----------------------------------------------------------------------------------------------------

    def home_dtype(self, layout: Layout, part: Part, home: Home, path: str | None) -> str | None:
        if part.dtype is not None:
            return part.dtype
        if part.state == "weight":
            return layout.tensors[path].dtype if path is not None else None
        return next((s.dtype for s in layout.states if s.name == part.state), None)

    def stored(self, placement: Placement, part: Part, number: int) -> list[StoredTensor]:
        """StoredTensors of a part's homes; dtype from the layout, or (for a source) from the checkpoint."""
        first_tensor: dict[int, str] = {}
        if len(part.pieces):
            homes, index = np.unique(part.pieces.home, return_index=True)
            first_tensor = {
                int(h): placement.tensors[int(part.pieces.tensor[i])]
                for h, i in zip(homes.tolist(), index.tolist(), strict=True)
            }
        any_path = next(iter(first_tensor.values()), None)
        out = []
        memo: dict[str | None, str | None] = {}
        for i, home in enumerate(part.homes):
            path = first_tensor.get(i, any_path)
            if path not in memo:
                memo[path] = self.home_dtype(placement.layout, part, home, path)
            dtype = memo[path]
            if self.dtype_of is not None and placement is self.source:
                dtype = self.dtype_of(home.file, home.key) or dtype
            out.append(
                StoredTensor(
                    home.file,
                    home.key,
                    dtype or "",
                    home.shape,
                    part.state,
                    part.label,
                    home.rank,
                    None,
                    home.padding,
                    home.padding_kind,
                )
            )
        return out

    def place_targets(self) -> None:
        owners: dict[tuple[str, str], int] = {}
        for number, part in enumerate(self.target.parts):
            self.first_target[number] = len(self.graph.targets)
            stored = self.stored(self.target, part, number)
            if not part.is_alias:
                for i, s in enumerate(stored):
                    owners.setdefault((s.file, f"{part.state}\0{part.label}"), self.first_target[number] + i)
            self.graph.targets += stored
            if self.source is not self.target:
                self.refuse_addends(part)
        for number, part in enumerate(self.target.parts):
            if not part.is_alias:
                continue
            first = self.first_target[number]
            for i in range(len(part.homes)):
                s = self.graph.targets[first + i]
                owner = owners.get((s.file, f"{part.state}\0{part.label}"))
                if owner is not None and self.graph.targets[owner].shape == s.shape:
                    self.graph.targets[first + i] = StoredTensor(
                        s.file, s.key, s.dtype, s.shape, s.state, s.label, s.rank, owner, s.padding, s.padding_kind
                    )

    def refuse_addends(self, part: Part) -> None:
        """Partial sums are read, never written: how a value divides into addends is nowhere said. E311."""
        addends = np.flatnonzero(part.pieces.policy == POLICIES.index("sum"))
        p = part.pieces
        boxes = np.concatenate([p.tensor[addends, None], p.low[addends], p.high[addends]], axis=1)
        if len(np.unique(boxes, axis=0)) < len(boxes):
            fail(
                "E311",
                f"{part.state} of `{part.label}` would be written as partial sums",
                at(part.span, "a sum, in the target")
                if part.span.line
                else Label(self.target.layout.call, where=part.label),
                remedy="write a target whose copies are `same` or `mean`",
            )

    def place_source(self, number: int) -> int:
        if number not in self.first_source:
            part = self.source.parts[number]
            self.first_source[number] = len(self.graph.sources)
            self.graph.sources += self.stored(self.source, part, number)
            self.source_part += [number] * len(part.homes)
        return self.first_source[number]

    def renumber(self, placement: Placement, wanted: set[str] | None = None) -> I64:
        return np.array(
            [self.common.get(p, -1) if wanted is None or p in wanted else -1 for p in placement.tensors] or [-1],
            dtype=np.int64,
        )

    # ---- one state -------------------------------------------------------------------------------------------------

    def state(self, state: str) -> None:
        parts = [
            (n, p) for n, p in enumerate(self.target.parts) if p.state == state and p.homes and not self.is_shared(n)
        ]
        if not parts:
            return
        wanted = self.tensors_of(self.target, [p for _, p in parts])
        direct = wanted & self.tensors_of(self.source, [p for p in self.source.parts if p.state == state])
        self.route(state, state, parts, direct, derived=False)
        rest = wanted - direct
        if rest:
            origin = self.derivation(state, rest)
            self.graph.derived.append(
                f"{state} of {_count(rest, 'tensor')} is derived from {origin}, rounded to nearest even where it is narrower"
            )
            self.route(state, origin, parts, rest, derived=True)

    @staticmethod
    def tensors_of(placement: Placement, parts: list[Part]) -> set[str]:
        return {placement.tensors[t] for p in parts for t in np.unique(p.pieces.tensor).tolist()}

    def is_shared(self, part: int) -> bool:
        first, homes = self.first_target[part], len(self.target.parts[part].homes)
        return homes > 0 and all(self.graph.targets[first + i].shares is not None for i in range(homes))

    def derivation(self, state: str, tensors: set[str]) -> str:
        """The state that a missing one is derived from, as the source's layout says. Raises E303 where it says nothing."""
        for d in self.source.layout.derived:
            if d.state == state and tensors <= self.tensors_of(
                self.source, [p for p in self.source.parts if p.state == d.source]
            ):
                return d.source
        missing = sorted(tensors)
        fail(
            "E303",
            f"the target stores {state} of `{missing[0]}`"
            + (f" and {len(missing) - 1} more" if len(missing) > 1 else "")
            + ", and the source has none",
            Label(self.source.layout.call, "source", where=f"{missing[0]}/{state}"),
            Label(self.target.layout.call, "target", where=f"{missing[0]}/{state}"),
            remedy=f"choose a target that does not store {state}, or say `derive {state} from ...` in the source's layout",
        )

    def route(self, state: str, origin: str, parts: list[tuple[int, Part]], wanted: set[str], *, derived: bool) -> None:
        """Moves of `origin` of the source into `state` of the target, for the tensors wanted."""
        if not wanted:
            return
        self.used |= {(path, origin) for path in wanted}
        source_parts = [
            (n, self.place_source(n), p)
            for n, p in enumerate(self.source.parts)
            if p.state == origin and p.homes and not wanted.isdisjoint(self.tensors_of(self.source, [p]))
        ]
        target_parts = [(n, self.first_target[n], p) for n, p in parts]
        mark = (
            tuple((id(p.pieces), p.is_alias) for _, _, p in source_parts),
            tuple((id(p.pieces), p.is_alias) for _, _, p in target_parts),
            frozenset(wanted),
        )
        if mark not in self.geometry:  # states of one line share their boxes: join them once
            self.geometry[mark] = self.join(state, origin, source_parts, target_parts, wanted)
        found = self.geometry[mark].moved(source_parts, target_parts)
        for kind, fragments in found.fragments:
            if kind != "check":
                self.cast(state, fragments, derived)
            self.batches(kind, state, fragments, derived)
        self.draw(state, origin, source_parts, parts, found)

    def join(
        self,
        state: str,
        origin: str,
        source_parts: list[tuple[int, int, Part]],
        target_parts: list[tuple[int, int, Part]],
        wanted: set[str],
    ) -> Joined:
        """Boxes of both sides joined and proved to cover each other."""
        rows = rows_of(source_parts, self.renumber(self.source, wanted), self.k)
        target_rows = rows_of(target_parts, self.renumber(self.target, wanted), self.k)
        alias_s = np.array([p.is_alias for p in self.source.parts], dtype=bool)
        alias_t = np.array([p.is_alias for p in self.target.parts], dtype=bool)
        chosen = choose(
            rows, alias_s, self.replica_of(self.source, self.first_source), self.blame(self.source, self.graph.sources)
        )
        # How the target's own copies will be merged one day says nothing about what is written to them now: the same.
        alike = evolve(target_rows, policy=np.zeros_like(target_rows.policy))
        firsts = choose(
            alike, alias_t, self.replica_of(self.target, self.first_target), self.blame(self.target, self.graph.targets)
        )
        self.covered(state, wanted, rows, chosen, self.source, "E308", "source")
        self.covered(state, wanted, target_rows, firsts, self.target, "E309", "target")
        found: list[tuple[str, Fragments]] = [("copy", intersect(chosen.primary, target_rows))]
        if len(chosen.copies):
            is_first = self.mark(target_rows, firsts.primary)
            found.append(("check", intersect(chosen.copies, target_rows.take(np.flatnonzero(is_first)))))
        for policy, name in ((1, "mean"), (2, "sum")):
            reduced = chosen.reduced.take(np.flatnonzero(chosen.reduced.policy == policy))
            if len(reduced):
                found.append((name, intersect(reduced, target_rows)))
        straight = []
        for kind, fragments in found:
            if kind != "copy" and not len(fragments):
                continue
            for step in PASSES:
                fragments = step(fragments)
            straight.append((kind, fragments))
        count = len(self.source.parts)
        return Joined(
            tuple(straight),
            tuple((n, first) for n, first, _ in source_parts),
            tuple((n, first) for n, first, _ in target_parts),
            np.bincount(chosen.primary.part, minlength=count),
            np.bincount(chosen.primary.part, chosen.primary.volume.astype(float), minlength=count).astype(np.int64),
            np.bincount(chosen.copies.part, minlength=count),
            next((k for k, _ in straight if k in ("mean", "sum")), ""),
        )

    @staticmethod
    def mark(rows: Rows, chosen: Rows) -> NDArray[np.bool_]:
        """Which rows are among those chosen, by home and place."""
        both = np.concatenate([np.stack([rows.home, rows.offset], 1), np.stack([chosen.home, chosen.offset], 1)])
        _, number = np.unique(both, axis=0, return_inverse=True)
        number = number.reshape(-1)
        return np.isin(number[: len(rows)], number[len(rows) :])

    def replica_of(self, placement: Placement, first: dict[int, int]) -> Callable[[int], object]:
        """What tells declared copies apart, by home."""
        numbers = [n for n in first if placement.parts[n].homes]
        numbers.sort(key=lambda n: first[n])
        starts = [first[n] for n in numbers]

        def replica(home: int) -> object:
            n = numbers[bisect_right(starts, home) - 1]
            return placement.parts[n].homes[home - first[n]].replica

        return replica

    def blame(self, placement: Placement, stored: list[StoredTensor]) -> Callable[[Rows, int, int, I64], NoReturn]:
        def overlap(rows: Rows, i: int, j: int, index: I64) -> NoReturn:
            path = self.target.tensors[int(rows.tensor[i])]
            a, b = stored[int(rows.home[i])], stored[int(rows.home[j])]
            fail(
                "E304",
                f"{element_name(self.target.layout, path, tuple(index.tolist()))} has two places that are no declared copies",
                Label(a.file, f"first here, {a.state}", where="/".join(map(str, a.key))),
                Label(b.file, "and here", where="/".join(map(str, b.key))),
                notes=(f"layout {placement.layout.call}",),
            )

        return overlap

    def batches(self, kind: str, state: str, fragments: Fragments, derived: bool) -> None:
        """Fragments with one way of changing values in one batch."""
        if not len(fragments):
            return
        source_values = [self.source.parts[n].value for n in range(len(self.source.parts))]
        target_part = self.parts_of_targets(fragments.target)
        ways: dict[tuple[tuple[float, float], tuple[float, float], bool], int] = {}
        number_s = {n: source_values[n] for n in np.unique(fragments.source_part).tolist()}
        number_t = {
            n: (self.target.parts[n].value, self.target.parts[n].lossy or derived)
            for n in np.unique(target_part).tolist()
        }
        way_of = np.zeros(len(fragments), dtype=np.int64)
        if len(set(number_s.values())) > 1 or len(set(number_t.values())) > 1:
            pairs = np.unique(np.stack([fragments.source_part, target_part], 1), axis=0)
            for s, t in pairs.tolist():
                way = ways.setdefault((number_s[s], *number_t[t]), len(ways))
                way_of[(fragments.source_part == s) & (target_part == t)] = way
        else:
            ways[(next(iter(number_s.values())), *next(iter(number_t.values())))] = 0
        for (source_value, target_value, lossy), way in ways.items():
            mine = fragments if len(ways) == 1 else fragments.take(np.flatnonzero(way_of == way))
            self.graph.batches.append(Batch(kind, state, mine, source_value, target_value, lossy))

    def parts_of_targets(self, homes: I64) -> I64:
        starts = np.array([f for n, f in self.first_target.items() if self.target.parts[n].homes], dtype=np.int64)
        numbers = np.array([n for n in self.first_target if self.target.parts[n].homes], dtype=np.int64)
        out: I64 = numbers[np.searchsorted(starts, homes, side="right") - 1]
        return out

    def target_part(self, home: int) -> int:
        return int(self.parts_of_targets(np.array([home]))[0])

    def cast(self, state: str, fragments: Fragments, derived: bool) -> None:
        """Fill in a target dtype that no spec states with the source's, and refuse a cast that loses. E305, E306."""
        if not len(fragments):
            return
        pairs = np.unique(np.stack([fragments.source, fragments.target], 1), axis=0)
        for s, t in pairs.tolist():
            a, b = self.graph.sources[s], self.graph.targets[t]
            if not b.dtype:
                if not a.dtype:
                    fail(
                        "E305",
                        f"no dtype is known for {state} of `{a.label}`",
                        Label(self.source.layout.call, where=a.label),
                        remedy="write `dtype bf16` in the model, or give a checkpoint",
                    )
                self.graph.targets[t] = StoredTensor(
                    b.file, b.key, a.dtype, b.shape, b.state, b.label, b.rank, b.shares, b.padding, b.padding_kind
                )
                continue
            if not a.dtype:
                self.graph.sources[s] = StoredTensor(
                    a.file, a.key, b.dtype, a.shape, a.state, a.label, a.rank, None, a.padding, a.padding_kind
                )
                continue
            for dtype in (a.dtype, b.dtype):
                if dtype not in DTYPES:
                    fail(
                        "E307",
                        f"no element type is called `{dtype}`",
                        Label(self.target.layout.call, where=b.label),
                        remedy=f"one of {', '.join(DTYPES)}",
                    )
            if a.dtype != b.dtype and (a.dtype, b.dtype) not in EXACT and not derived:
                part = self.target.parts[self.target_part(t)]
                if part.lossy:
                    continue
                fail(
                    "E306",
                    f"{state} of `{b.label}` would lose: {a.dtype} in the source, {b.dtype} in the target",
                    Label(a.file, a.dtype, where="/".join(map(str, a.key))),
                    at(part.span, b.dtype)
                    if part.span.line
                    else Label(b.file, b.dtype, where="/".join(map(str, b.key))),
                    remedy=f"keep {a.dtype}, or write `dtype {b.dtype} lossy` on the entry",
                )

    # ---- proof -----------------------------------------------------------------------------------------------------

    def covered(
        self, state: str, wanted: set[str], rows: Rows, chosen: Chosen, placement: Placement, code: str, where: str
    ) -> None:
        """Every element of every wanted tensor is in this side's primary boxes, which are disjoint. E308, E309."""
        held = np.zeros(len(self.target.tensors), dtype=np.int64)
        np.add.at(held, chosen.primary.tensor, chosen.primary.volume)
        if len(chosen.reduced):
            reduced = np.concatenate([chosen.reduced.tensor[:, None], chosen.reduced.low, chosen.reduced.high], axis=1)
            boxes = np.unique(reduced, axis=0)
            np.add.at(held, boxes[:, 0], (boxes[:, self.k + 1 :] - boxes[:, 1 : self.k + 1]).prod(axis=1))
        for path in sorted(wanted, key=lambda p: self.common[p]):
            tensor = self.target.layout.tensors[path]
            if held[self.common[path]] == tensor.numel:
                continue
            mine = rows.take(np.flatnonzero(rows.tensor == self.common[path]))
            whole_low, whole_high = np.zeros(self.k, dtype=np.int64), np.ones(self.k, dtype=np.int64)
            whole_high[: len(tensor.counts)] = tensor.counts
            left = subtract(whole_low, whole_high, mine.low, mine.high)
            missing = int(sum((b - a).prod() for a, b in left))
            first = element_name(self.target.layout, path, tuple(left[0][0].tolist())) if left else "beyond its shape"
            fail(
                code,
                f"{_count(range(missing), 'element')} of {state} of `{path}` {'is' if missing == 1 else 'are'}"
                f" nowhere in the {where},"
                f" the first {first}",
                Label(placement.layout.call, where, where=f"{path}/{state}"),
            )

    def leftovers(self) -> None:
        """Every tensor and state of the source has a place in the target, is derived there, or is dropped by name. E310."""
        derived = {d.state for d in self.target.layout.derived}
        taken_back = self.target_says_none()
        for part in self.source.parts:
            for t in np.unique(part.pieces.tensor).tolist():
                path = self.source.tensors[t]
                if (path, part.state) in self.used:
                    continue
                self.used.add((path, part.state))
                text = f"{part.state} of {path}"
                if part.state in self.drop or path in self.drop:
                    self.graph.dropped.append(f"{text}: dropped by name")
                elif part.state in derived and any(
                    (path, d.source) in self.used for d in self.target.layout.derived if d.state == part.state
                ):
                    self.graph.dropped.append(f"{text}: derived in the target")
                elif part.state in taken_back:
                    self.graph.dropped.append(f"{text}: the target stores no {part.state}")
                else:
                    fail(
                        "E310",
                        f"{text} has no place in the target",
                        Label(self.source.layout.call, "source", where=f"{path}/{part.state}"),
                        Label(self.target.layout.call, "target"),
                        remedy=f"--drop {part.state} leaves it out, --drop {path} the tensor",
                    )

    def target_says_none(self) -> set[str]:
        out = self.target.layout.not_kept
        states = {p.state for p in self.source.parts} - {"weight"}
        return set(out) | (states if "*" in out else set())

    def draw(
        self,
        state: str,
        origin: str,
        source_parts: list[tuple[int, int, Part]],
        parts: list[tuple[int, Part]],
        found: Joined,
    ) -> None:
        """Nodes and edges of one state."""
        edge = self.graph.edges.append
        label = parts[0][1].label if len(parts) == 1 else f"{len(parts)} entries"
        merge: ops.Node = ops.Reduce(label, state, found.reduces) if found.reduces else ops.Merge(label, state)
        for i, (n, first, part) in enumerate(source_parts):
            old = found.source_parts[i][0]
            read = ops.Read(n, part.label, origin, first, first + len(part.homes))
            rows, copies = int(found.rows[old]), int(found.copies[old])
            if rows or not copies:
                extract = ops.Extract(n, part.label, origin, rows, int(found.elements[old]))
                edge((read, extract))
                edge((extract, merge))
            if copies:
                check = ops.Check(n, part.label, origin, copies)
                edge((read, check))
                edge((check, merge))
        for n, part in parts:
            first = self.first_target[n]
            split = ops.Split(n, part.label, state, len(part.pieces))
            write = ops.Write(n, part.label, state, first, first + len(part.homes))
            edge((merge, split))
            edge((split, write))
            padding = sum(h.padding for h in part.homes)
            if padding:
                edge((ops.Fill(n, part.label, state, padding), write))


@frozen(eq=False)
class Joined:
    """What joining the boxes of two sides gave; the same for every state that shares them, but for the homes' numbers."""

    fragments: tuple[tuple[str, Fragments], ...]
    source_parts: tuple[tuple[int, int], ...]  # (part, first home)
    target_parts: tuple[tuple[int, int], ...]
    rows: I64  # by source part as first numbered: primary boxes
    elements: I64
    copies: I64
    reduces: str

    def moved(self, source_parts: list[tuple[int, int, Part]], target_parts: list[tuple[int, int, Part]]) -> Joined:
        """The same with the homes of another state."""
        if [f for _, f, _ in source_parts] == [f for _, f in self.source_parts]:
            return self
        renumbered = []
        number = {old: n for (old, _), (n, _, _) in zip(self.source_parts, source_parts, strict=True)}
        lookup = np.zeros(max(number) + 1, dtype=np.int64)
        for old, n in number.items():
            lookup[old] = n
        for kind, f in self.fragments:
            renumbered.append(
                (
                    kind,
                    evolve(
                        f,
                        source=_shifted(f.source, [x for _, x in self.source_parts], [x for _, x, _ in source_parts]),
                        target=_shifted(f.target, [x for _, x in self.target_parts], [x for _, x, _ in target_parts]),
                        source_part=lookup[f.source_part],
                    ),
                )
            )
        return evolve(self, fragments=tuple(renumbered))


def _shifted(homes: I64, old: list[int], new: list[int]) -> I64:
    order = np.argsort(old)
    starts, moved = np.array(old)[order], np.array(new)[order]
    which = np.searchsorted(starts, homes, side="right") - 1
    out: I64 = homes - starts[which] + moved[which]
    return out


def _shape(dims: tuple[str, ...], counts: tuple[int, ...]) -> str:
    return "[" + ", ".join(str(c) if "#" in d else f"{d}={c}" for d, c in zip(dims, counts, strict=True)) + "]"


def _count(items: object, word: str) -> str:
    n = len(items)  # type: ignore[arg-type]
    return f"{n} {word}{'' if n == 1 else 's'}"
