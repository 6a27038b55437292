"""build: two placements joined into a graph, proved complete before bytes move.

Every target element has exactly one source class; every source element is used, a copy, derived, or dropped by name. If
that does not hold, the element is named. Tensors that are stored alike are joined once: layers, experts, states of one
line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property

import networkx as nx
import numpy as np
from attrs import evolve, field

from ucpl.errors import Label, fail
from ucpl.extents import Key
from ucpl.graph.copies import Chosen, choose
from ucpl.graph.coverage import check_drops, check_models, covered, supplied
from ucpl.graph.graph import Drawn, Graph, Joint, Lanes, SourceBoxes, TargetBoxes
from ucpl.graph.live import with_live_rows
from ucpl.graph.missing_elements import Box, Filler, MissingBoxes, reject_absent
from ucpl.graph.passes import alike_lines_of, optimise
from ucpl.graph.rows import StoredBoxes, rows_of
from ucpl.graph.side import GraphSide, spaced
from ucpl.layout.by_index import of_sizes
from ucpl.layout.layout import Policy
from ucpl.layout.scales import scales_of
from ucpl.layout.scope import at
from ucpl.placement import Part, Placement
from ucpl.placement.families import apart
from ucpl.records import define, frozen
from ucpl.tables import I64, distinct, each
from ucpl.tables.operations import Fill, Read, Write

__all__ = ["RankShare", "build", "in_step"]

DtypeOf = Callable[[str, Key], str | None]


@frozen(eq=False)
class RankShare:
    """Share of one rank of the target in a graph.

    `whole`: both sides as all ranks have them, if both have live rows.
    """

    whole: tuple[Placement, Placement] | None = None


def build(
    source: Placement,
    target: Placement,
    *,
    drop: tuple[str, ...] = (),
    freeze: frozenset[str] = frozenset(),
    dtype_of: DtypeOf | None = None,
    share: RankShare | None = None,
) -> Graph:
    """Join source and target, and apply all passes.

    drop:     names of tensors and states that the target may leave out.
    freeze:   tensors of whose states it may leave out all but the weight.
    dtype_of: the dtype that a checkpoint states for a stored tensor of the source, if the spec has none.
    share:    the target is the part of one rank, the source at least all elements of it: each element of the part is proved
              to have one place in the source. Other elements of the source are left to other ranks.

    Raises UcplError E30x: a hole, an overlap, a tensor without a place, a lossy cast.
    """
    return optimise(drawn(source, target, drop=drop, freeze=freeze, dtype_of=dtype_of, share=share))


def drawn(
    source: Placement,
    target: Placement,
    *,
    drop: tuple[str, ...] = (),
    freeze: frozenset[str] = frozenset(),
    dtype_of: DtypeOf | None = None,
    share: RankShare | None = None,
) -> Graph:
    """The graph before any pass, in logical elements.

    It has all reads, extracts, merges, splits and writes.
    """
    check_drops(source, drop)
    source, target = in_step(source, target, apart_all=bool(drop or freeze))
    left_out = of_sizes(drop, [*source.tensors, *target.tensors])
    check_models(source, target, left_out)
    here, there, said = with_live_rows(source, target, share.whole if share is not None else None)
    return _Drawing(
        here, there, of_sizes(left_out, here.tensors), freeze, dtype_of, share is not None, dropped=[*said]
    ).run()


def in_step(source: Placement, target: Placement, *, apart_all: bool = False) -> tuple[Placement, Placement]:
    """Both sides with the families that both have.

    If something is dropped, filled or live, there is none.
    """
    ours, theirs = source.layout.families, target.layout.families
    if not ours and not theirs:
        return source, target
    apart_all |= bool(target.layout.fillings) or any(p.live is not None for p in (*source.parts, *target.parts))
    both = set() if apart_all else {p for p, one in ours.items() if p in theirs and theirs[p].names == one.names}
    here = apart(source, both)
    return here, here if target is source else apart(target, both)


@frozen
class Route:
    """Tensors of one target state, and the source's state for them."""

    lanes: Lanes
    wanted: frozenset[str]
    is_derived: bool
    # filled elements of these tensors, which the source lacks
    gaps: dict[str, list[Box]] = field(factory=dict, eq=False)
    scales: tuple[int, ...] | None = (
        None  # parts of the source that the scales of their blocks are in; None: not scaled
    )


@define(slots=False)
class _Drawing:
    source: Placement
    target: Placement
    drop: set[str]
    freeze: frozenset[str]
    dtype_of: DtypeOf | None
    is_share: bool  # the target is one rank's
    net: nx.DiGraph[Drawn] = field(factory=nx.DiGraph)
    used: set[tuple[str, str]] = field(factory=set)  # (tensor, state) that went somewhere
    derived: list[str] = field(factory=list)
    dropped: list[str] = field(factory=list)
    absent: list[tuple[str, list[int], set[str]]] = field(factory=list)  # (state, parts of the target, tensors)

    @cached_property
    def filler(self) -> Filler:
        return Filler(self.source, self.target)

    def run(self) -> Graph:
        there = GraphSide(self.target, self.target.tensors, self.target.layout)
        for number in range(len(self.target.parts)):
            there.place(number)
        for part in self.target.parts:
            self.reject_addends(part)
        here = GraphSide(self.source, self.target.tensors, self.target.layout)
        routes = [r for state in dict.fromkeys(p.state for p in self.target.parts) for r in self.routes(state, there)]
        for route in routes:
            for number in (*route.lanes.sources, *(route.scales or ())):
                here.place(number)
        spaced(here, there)
        reads = {n: Read(self.source.parts[n].label, self.source.parts[n].state, *here.range(n)) for n in here.first}
        writes = {n: Write(p.label, p.state, *there.range(n)) for n, p in enumerate(self.target.parts)}
        self.net.add_nodes_from(reads.values())
        for alike in _alike(self.filled(routes, (here, there), writes), here, there):
            self.join(alike, here, there, reads, writes)
        for n, part in enumerate(self.target.parts):
            if part.homes.padding and not there.is_shared(n):
                self.net.add_edge(Fill(part.label, part.state, part.homes.padding), writes[n])
        used = frozenset(self.used)
        if not self.is_share:
            self.leftovers()
        return self.graph(used, here, there, reads, writes)

    def graph(
        self,
        used: frozenset[tuple[str, str]],
        here: GraphSide,
        there: GraphSide,
        reads: dict[int, Read],
        writes: dict[int, Write],
    ) -> Graph:
        return Graph(
            self.source,
            self.target,
            self.net,
            here.shelves(self.dtype_of, sharing=False),
            there.shelves(None),
            (here.space, there.space),
            reads,
            writes,
            tuple(self.derived),
            tuple(self.dropped),
            used,
            self.filler.lines_of_fills(),
        )

    # ---- sources of states -------------------------------------------------------------------------------------------

    def routes(self, state: str, there: GraphSide) -> list[Route]:
        """Sources of a state's tensors.

        A source is the same state, or the one that it is derived from.
        """
        parts = [
            n for n, p in enumerate(self.target.parts) if p.state == state and len(p.homes) and not there.is_shared(n)
        ]
        out: list[Route] = []
        # tensors that are stored as they are, and tensors that are stored times their scales
        for scaled in (False, True):
            mine = [n for n in parts if self.target.parts[n].scaled == scaled]
            if mine:
                out += self.routes_to(state, mine, scaled)
        return out

    def routes_to(self, state: str, parts: list[int], scaled: bool) -> list[Route]:
        wanted = _tensors(self.target, parts)
        alike, other = (
            _tensors(self.source, [n for n, p in enumerate(self.source.parts) if p.state == state and p.scaled == s])
            for s in (scaled, not scaled)
        )
        direct, rest = wanted & alike, wanted - alike
        out = [self.route(state, state, parts, (direct, scaled), False)] if direct else []
        turned = rest & other
        if turned and not scaled:
            from ucpl.graph.scales import reject_quantising

            reject_quantising(self.source, self.target, min(turned))
        if turned:
            rest -= turned
            self.derived.append(
                f"{state} of {self.counted(turned)} is the product with the scales of its blocks,"
                " in fp32, rounded once to nearest even"
            )
            made = self.route(state, state, parts, (turned, False), True)
            out.append(evolve(made, scales=self.scale_parts(turned)))
        origin, derived = self.derivation(state, rest)
        if derived:
            self.derived.append(
                f"{state} of {self.counted(derived)} is derived from {origin},"
                " rounded to nearest even where it is narrower"
            )
            out.append(self.route(state, origin, parts, (derived, False), True))
        rest -= derived
        masters = self.filler.of_weight(state, rest & self.stored("weight"))
        if masters:
            self.derived.append(f"{state} of {self.counted(masters)} is made of the weight: the source has none")
            out.append(self.route(state, "weight", parts, (masters, False), True))
        if rest - masters:
            self.absent.append((state, parts, rest - masters))
        return out

    def stored(self, state: str) -> set[str]:
        """Tensors whose state the source stores as it is."""
        return _tensors(self.source, [n for n, p in enumerate(self.source.parts) if p.state == state and not p.scaled])

    def route(
        self, state: str, origin: str, targets: list[int], wanted: tuple[set[str], bool], is_derived: bool
    ) -> Route:
        """Route of a state.

        `wanted`: tensors, and a flag for those that the source stores times their scales.
        """
        paths, scaled = wanted
        self.used |= {(path, origin) for path in paths}
        sources = [
            n
            for n, p in enumerate(self.source.parts)
            if (p.state, p.scaled) == (origin, scaled)
            and len(p.homes)
            and not paths.isdisjoint(_tensors(self.source, [n]))
        ]
        return Route(Lanes(state, origin, tuple(sources), tuple(targets)), frozenset(paths), is_derived)

    def scale_parts(self, tensors: set[str]) -> tuple[int, ...]:
        """Parts of the source that the scales of these tensors are in."""
        scales = scales_of(self.target.layout.placed)
        wanted = {scales[path] for path in tensors}
        self.used |= {(path, "weight") for path in wanted}
        return tuple(
            n
            for n, p in enumerate(self.source.parts)
            if p.state == "weight" and len(p.homes) and not wanted.isdisjoint(_tensors(self.source, [n]))
        )

    def derivation(self, state: str, tensors: set[str]) -> tuple[str, set[str]]:
        """The state that a missing one is derived from, with its tensors.

        The source's layout has the derivation.
        """
        for d in self.source.layout.derived:
            if d.state == state and (made := tensors & self.held(d.source)):
                return d.source, made
        return "", set()

    def held(self, state: str) -> set[str]:
        return _tensors(self.source, [n for n, p in enumerate(self.source.parts) if p.state == state])

    def filled(self, routes: list[Route], sides: tuple[GraphSide, GraphSide], writes: dict[int, Write]) -> list[Route]:
        """Routes with the tensors that the source lacks a part of apart.

        Missing elements are filled, or are an error.
        """
        for state, parts, tensors in self.absent:
            k = max(1, sides[0].width, sides[1].width)
            open_ = self.fill(self.filler.whole(state, parts, tensors, k), sides, writes)
            if open_:
                reject_absent(self.source, self.target, state, open_)
        if not self.filler.lines:
            return routes
        out = []
        for route in routes:
            lanes = route.lanes
            gaps = self.filler.lacking(lanes.state, lanes.sources, route.wanted, sides)
            if gaps and route.scales is None:
                open_ = self.fill(MissingBoxes(lanes.state, lanes.targets, gaps), sides, writes)
                gaps = {path: boxes for path, boxes in gaps.items() if path not in open_}
                out.append(evolve(route, wanted=frozenset(gaps), gaps=gaps))
                route = evolve(route, wanted=frozenset(route.wanted - gaps.keys()))
            out += [route] if route.wanted else []
        return [route for route in out if route.wanted]

    def fill(self, gap: MissingBoxes, sides: tuple[GraphSide, GraphSide], writes: dict[int, Write]) -> list[str]:
        """Fill missing elements.

        Returns the tensors that keep a hole, in the model's order.
        """
        fills, open_ = self.filler.filled(gap, sides)
        self.net.add_edges_from((node, writes[n]) for node, n in fills)
        return list(open_)

    # ---- boxes of both sides -------------------------------------------------------------------------------------------

    def join(
        self, routes: list[Route], here: GraphSide, there: GraphSide, reads: dict[int, Read], writes: dict[int, Write]
    ) -> None:
        """Join states that are stored alike.

        Boxes of the first one are proved to be every element once on each side.
        """
        route = routes[0]
        lanes = tuple(r.lanes for r in routes)
        k = max(1, here.width, there.width)
        common = {path: i for i, path in enumerate(self.target.tensors)}
        alike = () if route.gaps else alike_lines_of(lanes[0], self.source, self.target, common)
        # Of tensors that are stored alike, the first one is joined: the others follow from it.
        rest = {t for one in alike for t in one.tensors[1:].tolist()}
        wanted = frozenset(p for p in route.wanted if common[p] not in rest)
        sources = _without(lanes[0].sources, [n for one in alike for n in one.sources[1:].tolist()])
        targets = _without(lanes[0].targets, [n for one in alike for n in one.targets[1:].tolist()])
        rows = rows_of(here.numbered(sources), here.space, self.renumber(self.source, common, wanted), k)
        kept = rows_of(there.numbered(targets), there.space, self.renumber(self.target, common, wanted), k)
        chosen = choose(rows, here.is_alias, here)
        # A later merge of the target's own copies does not matter for the values written now: all copies get the same.
        firsts = choose(kept.replace(policy=np.zeros_like(kept.policy)), there.is_alias, there)
        if self.is_share:
            supplied(route.lanes.state, (rows, chosen), firsts.primary, here, route.gaps)
        else:
            covered(route.lanes.state, wanted, (rows, chosen), here, "E308", "source", route.gaps)
            covered(route.lanes.state, wanted, (kept, firsts), there, "E309", "target")
        once = firsts.primary  # of a box that others cover in part, the rest
        splits = []
        for n in targets:
            node = TargetBoxes(n, self.target.parts[n].label, kept.take(kept.part == n), once.take(once.part == n))
            splits.append(node)
            i = lanes[0].of_target[n]
            self.net.add_edges_from((node, writes[lane.targets[i]]) for lane in lanes)
        for kind, over, boxes in self.by_value(_kinds(chosen), lanes[0]):
            digits = self.source.digits(over)
            joint = Joint(kind, lanes, route.is_derived, alike, digits, scaled=route.scales is not None)
            self.net.add_edges_from((joint, node) for node in splits)
            for n in sources:
                mine = boxes.part == n
                if mine.any():
                    taken = SourceBoxes(n, self.source.parts[n].label, boxes.take(mine))
                    i = lanes[0].of_source[n]
                    self.net.add_edges_from((reads[lane.sources[i]], taken) for lane in lanes)
                    self.net.add_edge(taken, joint)
        if route.scales is not None:
            self.scale(route, route.scales, (here, there), reads, writes)

    def scale(
        self,
        route: Route,
        parts: tuple[int, ...],
        sides: tuple[GraphSide, GraphSide],
        reads: dict[int, Read],
        writes: dict[int, Write],
    ) -> None:
        """Join the boxes of scales with the boxes of their tensors.

        Every scale is proved to be there once.
        """
        from ucpl.graph.scales import blockwise

        here, there = sides
        lanes = evolve(route.lanes, sources=parts)
        common = {path: i for i, path in enumerate(self.target.tensors)}
        scales = scales_of(self.target.layout.placed)
        wanted = frozenset(scales[path] for path in route.wanted)
        k = max(1, here.width, there.width)
        rows = rows_of(here.numbered(parts), here.space, self.renumber(self.source, common, wanted), k)
        chosen = choose(rows, here.is_alias, here)
        covered("weight", wanted, (rows, chosen), here, "E308", "source")
        kept = rows_of(there.numbered(lanes.targets), there.space, self.renumber(self.target, common, route.wanted), k)
        joint = Joint("scale", (lanes,), True, moves=blockwise(self.target, chosen, kept))
        self.net.add_edges_from((reads[n], joint) for n in parts)
        self.net.add_edges_from((joint, writes[n]) for n in lanes.targets)

    def by_value(
        self, kinds: list[tuple[str, int, StoredBoxes]], lanes: Lanes
    ) -> Iterator[tuple[str, int, StoredBoxes]]:
        """Lanes by stored value.

        Tensors that share a stored tensor but have other values are apart: their runs must not join.
        """
        parts = [self.source.parts[n] for n in lanes.sources] + [self.target.parts[n] for n in lanes.targets]
        held = [p.values for p in parts if p.values]
        alike: dict[object, int] = {}
        stored = [alike.setdefault(tuple(v.get(path) for v in held), len(alike)) for path in self.target.tensors]
        for kind, over, boxes in kinds:
            if len(alike) < 2:
                yield kind, over, boxes
                continue
            of_row = np.array(stored, dtype=np.int64)[boxes.tensor]
            for n in each(of_row):
                yield kind, over, boxes.take(of_row == n)

    @staticmethod
    def renumber(placement: Placement, common: dict[str, int], wanted: frozenset[str]) -> I64:
        return np.array([common[p] if p in wanted else -1 for p in placement.tensors] or [-1], dtype=np.int64)

    # ---- data without a place
    # -----------------------------------------------------------------------------------------------

    def reject_addends(self, part: Part) -> None:
        """Refuse to write partial sums, E311.

        They can be read, but no rule divides a value into addends.
        """
        if self.source.located.layout is self.target.located.layout:  # a checkpoint against itself: nothing is written
            return
        p = part.folded.take(part.folded.policy == Policy.SUM)
        if not len(p):
            return
        rank = part.homes.rank(p.home)
        axes = {axis for over in set(p.over.tolist()) for axis in self.target.digits(over)}
        box = [p.tensor, *p.low.T, *p.high.T]
        addends = [rank // divisor % degree for divisor, degree in sorted(axes)]
        if len(distinct(box)) < len(distinct([*box, *addends])):
            fail(
                "E311",
                f"{part.state} of `{part.label}` would be written as partial sums",
                at(part.span, "a sum, in the target")
                if part.span.line
                else Label(self.target.layout.call, where=part.label),
                remedy="write a target whose copies are `same` or `mean`",
            )

    def leftovers(self) -> None:
        """Check that every tensor and state of the source has a place.

        It is in the target, is derived there, or is dropped by name. E310.
        """
        derived = self.target.layout.derived
        taken_back = self.target_says_none()
        for part in self.source.parts:
            for stored, path in self.names_in(part):
                if (path, part.state) in self.used:
                    continue
                self.used.add((path, part.state))
                text = f"{part.state} of {path}"
                made_of = [d.source for d in derived if d.state == part.state and (stored, d.source) in self.used]
                if part.state in self.drop or path in self.drop:
                    self.dropped.append(f"{text}: dropped by name")
                elif path in self.freeze and part.state != "weight":
                    self.dropped.append(f"{text}: frozen by name")
                elif made_of:
                    self.dropped.append(f"{text}: {_remade(part.state, made_of[0])}")
                elif part.state in taken_back:
                    self.dropped.append(f"{text}: the target stores no {part.state}")
                else:
                    fail(
                        "E310",
                        f"{text} has no place in the target",
                        Label(self.source.layout.call, "source", where=f"{path}/{part.state}"),
                        Label(self.target.layout.call, "target"),
                        remedy=self.how_to_leave_out(path, part.state),
                    )

    def names_in(self, part: Part) -> Iterator[tuple[str, str]]:
        """Unused tensors of a part, by name.

        Each has the name that the part stores, its own or a family's, and its own name.
        """
        for t in part.tensors:
            path = self.source.tensors[t]
            if (path, part.state) not in self.used:
                yield from ((path, name) for name in self.source.layout.members(path))

    def counted(self, paths: set[str]) -> str:
        return _count(sum(len(self.target.layout.members(path)) for path in paths), "tensor")

    def how_to_leave_out(self, path: str, state: str) -> str:
        tensor = self.target.layout.tensors.get(path)
        if tensor is not None and tensor.kind == "frozen" and state != "weight":
            return f"the target's model has {path} frozen: --freeze {path} leaves out its optimizer states"
        return f"--drop {state} leaves it out, --drop {path} the tensor"

    def target_says_none(self) -> set[str]:
        out = self.target.layout.not_kept
        states = {p.state for p in self.source.parts} - {"weight"}
        return set(out) | (states if "*" in out else set())


def _remade(state: str, source: str) -> str:
    """Reason to leave out a state that the target remakes.

    Masters made of bf16 weights are not those of the run.
    """
    if source == "weight":
        return f"the target stores no {state}; a copy that is made of its weights later has their precision"
    return f"the target stores no {state}, and makes it of {source}"


def _alike(routes: list[Route], here: GraphSide, there: GraphSide) -> list[list[Route]]:
    """Routes with the same boxes on both sides.

    Boxes are the same objects, and stored tensors follow in one order.
    """
    found: dict[object, list[Route]] = {}
    for route in routes:
        lanes = route.lanes
        mark = (
            tuple(here.mark(n) for n in lanes.sources),
            tuple(here.first[n] - here.first[lanes.sources[0]] for n in lanes.sources),
            tuple(there.mark(n) for n in lanes.targets),
            route.wanted,
            route.is_derived,
            route.scales,
            bool(route.gaps),
        )
        found.setdefault(mark, []).append(route)
    return list(found.values())


def _kinds(chosen: Chosen) -> list[tuple[str, int, StoredBoxes]]:
    """Kinds of nodes on boxes of the source, with their axes.

    They are in the order in which a tile needs them.
    """
    out = [("copy", 0, chosen.primary)]
    reduced = chosen.reduced
    for row in distinct([reduced.policy, reduced.over]).tolist() if len(reduced) else ():
        policy, over = int(reduced.policy[row]), int(reduced.over[row])
        out.append((Policy(policy).word, over, reduced.take((reduced.policy == policy) & (reduced.over == over))))
    if len(chosen.copies):
        out.append(("check", 0, chosen.copies))
    return out


def _without(parts: tuple[int, ...], others: list[int]) -> tuple[int, ...]:
    left_out = set(others)
    return tuple(n for n in parts if n not in left_out)


def _tensors(placement: Placement, parts: list[int]) -> set[str]:
    return {placement.tensors[t] for n in parts for t in placement.parts[n].tensors}


def _count(n: int, word: str) -> str:
    return f"{n} {word}{'' if n == 1 else 's'}"
