"""Boxes that one rank needs from others for its share.

Each comes from one rank that holds it. A box that the rank holds itself, in any copy, is not sent. Missing boxes are
requested from the holders of copies in turn, so that no one rank sends everything.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Literal

from attrs import evolve

from ucpl.errors import Label, fail
from ucpl.extents import Key, key_text
from ucpl.planning import Plan, Runs
from ucpl.records import frozen
from ucpl.tables.operations import Derive, Merge

__all__ = ["RemoteBox", "Held", "Name", "Piece", "Transfer", "box_of", "pieces_of"]

Name = tuple[str, Key]
Ints = tuple[int, ...]


@frozen
class RemoteBox:
    """Elements of one stored tensor, by row-major positions.

    The first one, and the step of each dim. No dim has size 1.
    """

    name: Name
    dtype: str
    shape: Ints
    offset: int
    stride: Ints

    @property
    def elements(self) -> int:
        return prod(self.shape)

    @property
    def end(self) -> int:
        """Behind its last element."""
        return 1 + self.offset + sum((n - 1) * s for n, s in zip(self.shape, self.stride, strict=True))

    @property
    def is_run(self) -> bool:
        """True if its elements are one after the other."""
        return self.stride in ((), (1,))

    def run(self, low: int, high: int) -> RemoteBox:
        """Elements [low, high) of a run."""
        if (low, high) == (0, self.elements):
            return self
        many = high - low > 1
        return evolve(self, shape=(high - low,) if many else (), stride=(1,) if many else (), offset=self.offset + low)

    def rows(self, low: int, high: int) -> RemoteBox:
        """Some of its first dim, which goes where that is one."""
        own = slice(1 if high - low == 1 else 0, None)
        shape, stride = (high - low, *self.shape[1:])[own], self.stride[own]
        return evolve(self, shape=shape, stride=stride, offset=self.offset + low * self.stride[0])


@frozen
class Transfer:
    """The subject of a piece, and its treatment on the way.

    The plan's node, of one state.
    """

    label: str
    state: str
    origin: str  # the state that it is made of
    derives: bool = False
    exact: bool = False  # of a derived tensor: nothing is rounded
    lossy: bool = False  # a cast that rounds was asked for

    @property
    def may_round(self) -> bool:
        return self.lossy or (self.derives and not self.exact)


@frozen
class Piece:
    """A box of the source, its rank, and its target box.

    Both have one shape.
    """

    peer: int
    source: RemoteBox
    target: RemoteBox
    way: Transfer


Held = Mapping[Name, Sequence[int]]  # stored tensors of the source, and the ranks that hold each, in order
Copies = Mapping[RemoteBox, Sequence[RemoteBox]]  # boxes of the source that are copies of a target place's value


def pieces_of(plan: Plan, held: Held, rank: int) -> list[Piece]:
    """Every piece of a rank's share, in the order of the plan.

    Raises: UcplError E642 for a value computed from several values, E643 if no rank holds a box.
    """
    found: list[Piece] = []
    for runs in plan.moves:
        if runs.kind == "check":
            continue
        _demand_moved(plan, runs)
        copies = _copies(plan, runs.state)
        near = _near(copies, held, rank)
        ways: dict[int, Transfer] = {}
        for row in range(len(runs)):
            if runs.shape[row].all():
                number = int(runs.node[row])
                way = ways.get(number) or ways.setdefault(number, _way(plan, runs, number))
                piece = Piece(*_piece(plan, runs, row, copies, (held, rank)), way)
                found += _apart(piece, near, rank)
    return found


def _way(plan: Plan, runs: Runs, number: int) -> Transfer:
    node = plan.nodes[number]
    assert isinstance(node, Merge | Derive)
    origin = next(lane.origin for lane in node.lanes if lane.state == runs.state)
    exact = isinstance(node, Derive) and node.exact
    rounds = isinstance(node, Derive) and not exact
    return Transfer(node.label, runs.state, origin, isinstance(node, Derive), exact, runs.lossy and not rounds)


def _demand_moved(plan: Plan, runs: Runs) -> None:
    if not len(runs) or (runs.kind == "copy" and runs.source_value == runs.target_value):
        return
    of = {"copy": "is stored by another `value`", "scale": "is a product with scales"}
    what = of.get(runs.kind, f"is a {runs.kind} of copies")
    one = plan.targets[int(runs.target[0])]
    fail(
        "E642", f"{runs.state} of {one.label} {what}: that is not made between ranks",
        Label(one.file, where=key_text(one.key)),
    )  # fmt: skip


def _piece(
    plan: Plan, runs: Runs, row: int, copies: Copies, holders: tuple[Held, int]
) -> tuple[int, RemoteBox, RemoteBox]:
    """The giver of a row, its box, and the filled box."""
    held, rank = holders
    target, first = box_of(plan, runs, row, "target"), box_of(plan, runs, row, "source")
    givers = [(peer, box) for box in (first, *copies.get(target, ())) for peer in held.get(box.name, ())]
    if not givers:
        file, key = first.name
        fail("E643", f"no rank holds {key_text(key)} of {file}", Label(file, where=key_text(key)))
    mine = [one for one in givers if one[0] == rank]
    peer, source = mine[0] if mine else givers[rank % len(givers)]
    return peer, source, target


def _copies(plan: Plan, state: str) -> Copies:
    """Boxes of copies by the place of the target to compare with."""
    out: dict[RemoteBox, list[RemoteBox]] = {}
    for runs in plan.moves:
        if runs.kind == "check" and runs.state == state and runs.source_value == runs.target_value:
            for row in range(len(runs)):
                out.setdefault(box_of(plan, runs, row, "target"), []).append(box_of(plan, runs, row, "source"))
    return out


def _near(copies: Copies, held: Held, rank: int) -> dict[Name, list[tuple[RemoteBox, RemoteBox]]]:
    """Runs of the target with copies on this rank.

    By tensor and in order, each with the copy.
    """
    out: dict[Name, list[tuple[RemoteBox, RemoteBox]]] = {}
    for target, among in copies.items():
        mine = next((box for box in among if rank in held.get(box.name, ()) and box.is_run), None)
        if mine is not None and target.is_run:
            out.setdefault(target.name, []).append((target, mine))
    for some in out.values():
        some.sort(key=lambda pair: pair[0].offset)
    return out


def _apart(piece: Piece, near: Mapping[Name, Sequence[tuple[RemoteBox, RemoteBox]]], rank: int) -> Iterator[Piece]:
    """A piece of another rank, without this rank's copies.

    It takes these from itself.
    """
    some = near.get(piece.target.name, ())
    if piece.peer == rank or not some or not (piece.source.is_run and piece.target.is_run):
        yield piece
        return
    begin, end = piece.target.offset, piece.target.offset + piece.target.elements
    at = begin

    def part(low: int, high: int) -> Piece:
        return evolve(
            piece,
            source=piece.source.run(low - begin, high - begin),
            target=piece.target.run(low - begin, high - begin),
        )

    for target, mine in some:
        low, high = max(at, target.offset), min(end, target.offset + target.elements)
        if low >= high:
            continue
        if at < low:
            yield part(at, low)
        own = part(low, high)
        yield evolve(own, peer=rank, source=mine.run(low - target.offset, high - target.offset))
        at = high
    if at < end:
        yield part(at, end)


def box_of(plan: Plan, runs: Runs, row: int, side: Literal["source", "target"]) -> RemoteBox:
    """The box of a row of a plan, on one side."""
    if side == "source":
        which, offset, stride, tensors = runs.source, runs.source_offset, runs.source_stride, plan.sources
    else:
        which, offset, stride, tensors = runs.target, runs.target_offset, runs.target_stride, plan.targets
    tensor = tensors[int(which[row])]
    kept = [(n, s) for n, s in zip(runs.shape[row].tolist(), stride[row].tolist(), strict=True) if n > 1]
    shape, steps = tuple(n for n, _ in kept), tuple(s for _, s in kept)
    return RemoteBox((tensor.file, tensor.key), tensor.dtype, shape, int(offset[row]), steps)
