"""Dtypes that no spec states, and lossy casts, which are refused.

A dtype is filled in from the other side. Casts that a spec allows may lose.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from typing import NoReturn

from attrs import evolve

from ucpl.errors import Label, fail
from ucpl.extents import AS_U8, EXACT, PAIRED, StoredTensor, bits_of, holds, wide
from ucpl.graph.graph import Graph, JoinedMoves, Joint
from ucpl.layout.scope import at
from ucpl.placement import Part, Placement
from ucpl.placement.bytes_of_two import dim_of_pairs
from ucpl.records import define
from ucpl.tables import distinct, each, expanded
from ucpl.tables.operations import Fill, Node, Read, Write

__all__ = ["settle"]

_FLOATS = ("bf16", "f16", "f32", "f64")


def settle(graph: Graph) -> Graph:
    """Give every stored tensor a dtype, and refuse lossy casts.

    A cast may lose if the spec allows it. E305, E306.
    """
    settler = _Settler(graph)
    for joint in sorted(graph.joints, key=lambda j: j.kind == "scale"):  # products are of types that are known
        if joint.kind == "scale" and joint.moves is not None:
            settler.product(joint.moves)
        elif joint.kind != "check" and joint.moves is not None:
            for lane in range(len(joint.lanes)):
                settler.lane(joint, joint.moves, lane)
    for fill, write in graph.net.edges:
        if isinstance(fill, Fill) and fill.lacking:
            settler.fill(fill, write)
    settler.pad()
    settler.share()
    return evolve(
        graph,
        sources=graph.sources.with_dtypes(settler.sources.shelves()),
        targets=graph.targets.with_dtypes(settler.targets.shelves()),
    )


@define
class _Known:
    """Dtypes of one side, by number of the stored tensor.

    A shelf whose tensors have one dtype is one value.
    """

    starts: list[int]
    dtypes: list[list[str]]

    @classmethod
    def of(cls, shelves: tuple[tuple[str, ...], ...], starts: list[int]) -> _Known:
        return cls(starts, [list(d) for d in shelves])

    def shelf_of(self, home: int) -> int:
        return bisect_right(self.starts, home) - 1

    def get(self, home: int) -> str:
        shelf = self.shelf_of(home)
        known = self.dtypes[shelf]
        return known[home - self.starts[shelf]] if len(known) > 1 else known[0]

    def set(self, home: int, dtype: str) -> None:
        shelf = self.shelf_of(home)
        if len(self.dtypes[shelf]) == 1:
            self.dtypes[shelf] = self.dtypes[shelf] * (self.starts[shelf + 1] - self.starts[shelf])
        self.dtypes[shelf][home - self.starts[shelf]] = dtype

    def one(self, first: int, last: int) -> str | None:
        """The dtype of these tensors, if it is one."""
        found = {d for s in range(self.shelf_of(first), self.shelf_of(last - 1) + 1) for d in self.dtypes[s]}
        return found.pop() if len(found) == 1 else None

    def fill(self, first: int, last: int, dtype: str) -> None:
        for s in range(self.shelf_of(first), self.shelf_of(last - 1) + 1):
            self.dtypes[s] = [dtype]

    def shelves(self) -> list[tuple[str, ...]]:
        return [tuple(d) if len(set(d)) > 1 else tuple(d[:1]) for d in self.dtypes]


class _Settler:
    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.sources = _Known.of(tuple(s.dtypes for s in graph.sources.shelves), graph.sources.starts.tolist())
        self.targets = _Known.of(tuple(s.dtypes for s in graph.targets.shelves), graph.targets.starts.tolist())
        self.stated = _Known.of(tuple(s.dtypes for s in graph.targets.shelves), graph.targets.starts.tolist())

    def lane(self, joint: Joint, moves: JoinedMoves, number: int) -> None:
        first, lane = joint.lanes[0], joint.lanes[number]
        pairs = distinct([moves.source_part, moves.target_part])
        for s, t in zip(moves.source_part[pairs].tolist(), moves.target_part[pairs].tolist(), strict=True):
            read = self.graph.reads[lane.sources[first.of_source[s]]]
            target = lane.targets[first.of_target[t]]
            write = self.graph.writes[target]
            a, b = self.sources.one(read.first, read.last), self.targets.one(write.first, write.last)
            if joint.scaled:
                self.check_factor(read.first, write.first, target)
            if a is not None and b is not None:
                self.pair(lane.state, read.first, write.first, target, joint.derived, (read, write))
                self.keep_bits(joint.kind, (lane.sources[first.of_source[s]], target), (read.first, write.first))
                continue
            mine = moves.take((moves.source_part == s) & (moves.target_part == t))
            shifts = (
                read.first - self.graph.reads[s].first,
                write.first - self.graph.writes[t].first,
            )
            for source, goal in self.homes(mine):
                self.pair(lane.state, source + shifts[0], goal + shifts[1], target, joint.derived)
                self.keep_bits(
                    joint.kind,
                    (lane.sources[first.of_source[s]], target),
                    (source + shifts[0], goal + shifts[1]),
                )

    def share(self) -> None:
        """Second names of a storage are of its dtype."""
        for shelf, first in zip(self.graph.targets.shelves, self.targets.starts, strict=False):
            for i, owner in enumerate([] if shelf.shares is None else shelf.shares.tolist()):
                if owner >= 0 and not self.targets.get(first + i):
                    self.targets.set(first + i, self.targets.get(owner))

    def keep_bits(self, kind: str, parts: tuple[int, int], homes: tuple[int, int]) -> None:
        """Move the bits of types without casts, in pairs of elements.

        E324, E325.
        """
        dtypes = self.sources.get(homes[0]), self.targets.get(homes[1])
        if bits_of(dtypes[1]) not in AS_U8:
            return
        sides = self.graph.source, self.graph.target
        both = sides[0].parts[parts[0]], sides[1].parts[parts[1]]
        _check_bits((self.graph.sources[homes[0]], self.graph.targets[homes[1]]), dtypes, both, kind)
        _check_one_order(sides, both, dtypes)

    def product(self, moves: JoinedMoves) -> None:
        """Scales are floating numbers. E305, E317."""
        for s in each(moves.source_part):
            read = self.graph.reads[s]
            scale = self.graph.sources[read.first]
            for dtype in {self.sources.get(home) for home in range(read.first, read.last)}:
                if bits_of(dtype) not in (*_FLOATS, "f8_e8m0fnu"):
                    code, said = ("E317", f"is {dtype}") if dtype else ("E305", "has no known dtype")
                    fail(
                        code,
                        f"`{scale.label}`, a scale, {said}",
                        Label(scale.file, dtype, where="/".join(map(str, scale.key))),
                        remedy=self.type_to_write(scale.label, dtype),
                    )

    def type_to_write(self, path: str, dtype: str) -> str:
        """Remedy with the type of a scale."""
        if not dtype:
            return "write `dtype f32` in the model"
        tensor = self.graph.source.layout.placed.get(path)
        if dtype == "u8" and tensor is not None:
            known = "" if tensor.dtype in AS_U8 else "`dtype f8_e8m0fnu` in the model, and "
            return f"if its bytes are exponents, write {known}`dtype u8` on its entry: its bits are kept so"
        return ""

    def check_factor(self, source: int, target: int, part: int) -> None:
        """Check that a floating type holds the scaled values exactly, E317.

        It is the product's type.
        """
        a, b = self.sources.get(source), self.targets.get(target)
        if self.graph.target.parts[part].exact:
            here, there = self.graph.sources[source], self.graph.targets[target]
            fail(
                "E306",
                f"`{there.label}` is to be exact, and a product with scales is rounded",
                Label(here.file, a, where="/".join(map(str, here.key))),
                Label(there.file, b, where="/".join(map(str, there.key))),
                remedy="take `exact` off the entry: `value x * scale` rounds once, to nearest even",
            )
        if b in _FLOATS and (not a or a == b or (bits_of(a), b) in EXACT):
            return
        span = self.graph.target.parts[part].span
        here, there = self.graph.sources[source], self.graph.targets[target]
        fail(
            "E317",
            f"`{there.label}` is {a} in the source, and its product with the scales {b} in the target",
            Label(here.file, a, where="/".join(map(str, here.key))),
            at(span, b) if span.line else Label(there.file, b, where="/".join(map(str, there.key))),
        )

    def is_wanted(self, part: int) -> bool:
        """True if the target asks for a cast that could lose.

        The cast rounds, or tests each value.
        """
        return self.graph.target.parts[part].lossy or self.graph.target.parts[part].exact

    def homes(self, moves: JoinedMoves) -> Iterator[tuple[int, int]]:
        """Pairs of stored tensors between which elements move."""
        source, target = self.graph.spaces
        each = expanded(moves, source, target)
        homes = source.home(each.source), target.home(each.target)
        pairs = distinct(homes)
        yield from zip(homes[0][pairs].tolist(), homes[1][pairs].tolist(), strict=True)

    def pair(
        self, state: str, source: int, target: int, part: int, derived: bool, whole: tuple[Read, Write] | None = None
    ) -> None:
        """Two stored tensors, or (`whole`) all of two parts, which are alike."""
        a, b = self.sources.get(source), self.targets.get(target)
        if not b:
            if not a:
                label = self.graph.sources[source].label
                fail(
                    "E305",
                    f"no dtype is known for {state} of `{label}`",
                    Label(self.graph.source.layout.call, where=label),
                    remedy="write `dtype bf16` in the model, or give a checkpoint",
                )
            self.give(self.targets, target, a, whole and whole[1])
            return
        if not a:
            self.give(self.sources, source, b, whole and whole[0])
            return
        if bits_of(a) != bits_of(b) and not self.stated.get(target):  # a flat buffer of tensors of several dtypes
            if not (both := wide(b, a)):
                self.share_no_type(state, self.graph.sources[source], self.graph.targets[target], (a, b))
            b = both
            self.give(self.targets, target, b, whole and whole[1])
        if bits_of(a) == bits_of(b) or bits_of(b) in AS_U8:  # keep_bits reports the fate of the latter
            return
        if (bits_of(a), bits_of(b)) not in EXACT and not derived and not self.is_wanted(part):
            self.loses(state, self.graph.sources[source], self.graph.targets[target], (a, b), part)

    @staticmethod
    def give(known: _Known, home: int, dtype: str, whole: Read | Write | None) -> None:
        if whole is not None:
            known.fill(whole.first, whole.last, dtype)
        else:
            known.set(home, dtype)

    def loses(self, state: str, a: StoredTensor, b: StoredTensor, dtypes: tuple[str, str], part: int) -> None:
        span = self.graph.target.parts[part].span
        fail(
            "E306",
            f"{state} of `{b.label}` would lose: {dtypes[0]} in the source, {dtypes[1]} in the target",
            Label(a.file, dtypes[0], where="/".join(map(str, a.key))),
            at(span, dtypes[1]) if span.line else Label(b.file, dtypes[1], where="/".join(map(str, b.key))),
            remedy=f"keep {dtypes[0]}, or write `dtype {dtypes[1]} lossy` on the entry",
        )

    def share_no_type(self, state: str, a: StoredTensor, b: StoredTensor, dtypes: tuple[str, str]) -> NoReturn:
        fail(
            "E306",
            f"{state} of `{b.label}` is one buffer of {dtypes[0]} and {dtypes[1]}, and no type holds the values of both",
            Label(a.file, dtypes[0], where="/".join(map(str, a.key))),
            Label(b.file, dtypes[1], where="/".join(map(str, b.key))),
            remedy="freeze or drop the parameters of one of these types, or take a target that stores each tensor apart",
        )

    def fill(self, fill: Fill, write: Node) -> None:
        """Give a fill a dtype that holds the number. E305, E315."""
        assert isinstance(write, Write)
        space = self.graph.spaces[1]
        first = space.home(fill.boxes.offset)
        last = space.home(fill.boxes.offset + ((fill.boxes.shape - 1) * fill.boxes.stride).sum(axis=1))
        for home in {*first.tolist(), *last.tolist()}:
            dtype, there = self.targets.get(home), self.graph.targets[home]
            part = next(n for n, w in self.graph.writes.items() if w is write)
            span = self.graph.target.parts[part].span
            here = at(span) if span.line else Label(there.file, where="/".join(map(str, there.key)))
            if not dtype:
                fail(
                    "E305",
                    f"no dtype is known for {fill.state} of `{fill.label}`, which is filled",
                    here,
                    remedy="write `dtype bf16` in the model, or in the entry",
                )
            if not holds(dtype, fill.value):
                fail("E315", f"{fill.state} of `{fill.label}` is {dtype}, which has no {fill.value:g}", here)

    def pad(self) -> None:
        """Give a target of padding alone the dtype of its part.

        An example is a rank beyond the end of the vocabulary.
        """
        for write in self.graph.writes.values():
            if write.first == write.last:
                continue
            of_part = range(self.targets.shelf_of(write.first), self.targets.shelf_of(write.last - 1) + 1)
            known = next((d for s in of_part for d in self.targets.dtypes[s] if d), "")
            for s in of_part:
                self.targets.dtypes[s] = [d or known for d in self.targets.dtypes[s]]


# --- Types whose bits are moved and never made: f4_e2m1fn and f8_e8m0fnu --------------------------------------------

Ends = tuple[StoredTensor, StoredTensor]


def _check_bits(ends: Ends, dtypes: tuple[str, str], parts: tuple[Part, Part], kind: str) -> None:
    """Check that targets of such a type have a source of it.

    The bits are unchanged.

    Raises E324.
    """
    a, b = dtypes
    if bits_of(b) not in AS_U8:
        return
    how = ""
    if bits_of(a) != bits_of(b):
        how = f"{a} in the source"
    elif kind in ("mean", "sum", "max"):
        how = f"a {kind} of its copies"
    elif parts[0].value != parts[1].value:
        how = "stored with another value"
    if not how:
        return
    here, there = ends
    raw = a == "u8"
    fail(
        "E324",
        f"`{there.label}` is {how}, and {b} in the target: nothing is turned into that type",
        Label(here.file, a, where="/".join(map(str, here.key))),
        at(parts[1].span, b) if parts[1].span.line else Label(there.file, b, where="/".join(map(str, there.key))),
        remedy=f"write `dtype u8` on the source's entry, too: its bytes are {bits_of(b)}" if raw else "",
    )


def _check_one_order(sides: tuple[Placement, Placement], parts: tuple[Part, Part], dtypes: tuple[str, str]) -> None:
    """Check that elements that share a byte do so on both sides.

    Pairs move as they are. Raises E325.
    """
    if not {*dtypes} <= PAIRED:
        return
    dims = [dim_of_pairs(side, part) for side, part in zip(sides, parts, strict=True)]
    if dims[0] == dims[1]:
        return
    fail(
        "E325",
        f"two elements of `{parts[1].label}` share a byte, along {dims[0]} in the source and along {dims[1]} in the target",
        *(
            at(part.span, f"pairs along {dim}") if part.span.line else Label(side.layout.call, f"pairs along {dim}")
            for side, part, dim in zip(sides, parts, dims, strict=True)
        ),
        remedy=f"end the target's pattern with {dims[0]}, too; or"
        " store numbers there: `dtype bf16`, and `value x * scale` if it has scales",
    )
