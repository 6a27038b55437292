"""Move tensors of a running job to another layout, without a disk.

Each rank plans its own share, proved as any plan is, and requests the missing elements from other ranks. Local data,
in any copy, is not sent, and each element that a rank lacks is sent to it once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict, Unpack, cast

import torch
import torch.distributed as dist
import xxhash
from attrs import evolve, field

from ucpl.conversion.keywords import given_from
from ucpl.conversion.planning import Asked, closed_text
from ucpl.conversion.requests import model_named
from ucpl.conversion.share import shares_of
from ucpl.errors import Label, fail
from ucpl.extents import DTYPES, Key, key_text
from ucpl.live.agreement import JobRanks
from ucpl.live.tensors import Goal, flat_of, memory_of, overlap, part_of, tensor_of, unreadable, unwritable
from ucpl.planning import Plan, Runs
from ucpl.ranks.exchange import Exchange, Tensors, dtype_of, global_rank, seen
from ucpl.ranks.rank_graph import Message, MessagePart, RankGraph, parse_request, rank_graph, request
from ucpl.ranks.remote_boxes import Held, Name, Piece, RemoteBox, Transfer, box_of, pieces_of
from ucpl.records import define
from ucpl.tables.operations import Fill, net_text

if TYPE_CHECKING:
    from ucpl.conversion.requests import Given
    from ucpl.layout.scope import Value
    from ucpl.planning import Plan
    from ucpl.texts import Json

__all__ = ["Resharded", "ToReshard", "reshard", "DIGEST", "Digests", "copies_of", "compare_copies"]

MEMORY = 256 << 20


class ToReshard(TypedDict, total=False):
    """The options next to the two layouts."""

    out: Mapping[str, torch.Tensor]  # existing tensors of the target to fill, plain or DTensors
    memory: int  # bytes of staging buffers of each rank (default 256 MiB)
    model: str | None  # FILE:NAME, if both layouts are of any model
    config: Mapping[str, Json] | str | Path | None  # a config.json, as `config.x`
    sizes: Mapping[str, Value] | None  # of model or layout, by name


class Resharded(dict[str, torch.Tensor]):
    """The tensors of a rank in the target's layout, by key.

    Empty for a rank that has no part in it.
    """

    sent: int = 0  # bytes of elements, to other ranks
    received: int = 0
    kept: int = 0  # that were on this rank already
    staging: int = 0  # the most bytes of messages at once
    graph: str = ""  # the nodes of this rank, a line each: reads, sends, receives


def reshard(
    state: Mapping[str, torch.Tensor],
    source: str,
    target: str,
    group: dist.ProcessGroup | None = None,
    **beside: Unpack[ToReshard],
) -> Resharded:
    """The tensors of a job in another layout.

    Every rank of the group calls it, with the same layouts.

    state: the tensors of this rank, by the keys of the source's layout; a DTensor counts as its local tensor.
    Nothing, if the rank has no part in the source.

    source, target: calls of layouts, as in FILE.ucpl:NAME(tp=2), which are equal on all ranks. Their ranks are the
    first of the group.

    Returns this rank's tensors of the target, by key. Raises: UcplError E613 and E640-E644 on all ranks, E622 if they
    got different arguments, E30x if the layouts do not fit. Any other error of one rank is E644 on the others.
    """
    memory = beside.get("memory", MEMORY)
    ranks = JobRanks.of(group)
    with ranks.agreeing():
        _demand_known(beside)
        work = _Work.of(state, (source, target), beside, (ranks.rank, ranks.size))
    ranks.demand_same({**work.marks, "memory": memory}, "reshard")
    told = ranks.all(sorted(work.sources))
    held: dict[Name, list[int]] = {}
    for peer, names in enumerate(cast("list[list[Name]]", told)):
        for file, key in names:
            held.setdefault((file, tuple(key)), []).append(peer)
    with ranks.agreeing():
        pieces = pieces_of(work.plan, held, ranks.rank) if work.plan is not None else []
        copies = copies_of(work.plan, held, pieces) if work.plan is not None else []
    device = _device(group)
    with ranks.together():
        asked = _asked(pieces, group, device)
    exchange = Exchange(group, work.sources, work.targets, device, memory // (2 * max(1, ranks.size - 1)))
    with ranks.agreeing():
        graph = rank_graph(pieces, asked, ranks.rank)
        work.demand_types(graph)
        exchange.keep(graph)
    with ranks.agreeing(), ranks.together():
        exchange.run(graph)
    _compare(ranks, work, pieces, copies, memory, device)
    with ranks.agreeing():
        work.put()
    made = Resharded(work.result)
    made.graph = net_text(graph.net)
    made.sent, made.received, made.kept = exchange.sent, exchange.received, exchange.kept
    made.staging = exchange.staging
    return made


class _Work:
    """The tensors of one rank, and its targets."""

    def __init__(self, plan: Plan | None, sources: dict[Name, torch.Tensor], marks: dict[str, object]) -> None:
        self.plan, self.sources, self.marks = plan, sources, marks  # marks: values that must be the same on all ranks
        self.targets: dict[Name, torch.Tensor] = {}
        self._goals: list[Goal] = []
        self.result: dict[str, torch.Tensor] = {}

    @classmethod
    def of(
        cls, state: Mapping[str, torch.Tensor], calls: tuple[str, str], beside: ToReshard, place: tuple[int, int]
    ) -> _Work:
        """Plan the share of this rank.

        Raises: UcplError E640, E641, and the errors of planning.
        """
        from ucpl.placement import locate

        rank, size = place
        model = beside.get("model")
        given: Given = given_from(
            {"config": beside.get("config"), "sizes": beside.get("sizes")}, model_named(model) if model else None
        )
        shares = shares_of(Asked(*calls), given, checked=True)
        here, there = shares.source, shares.target
        marks: dict[str, object] = {
            "layout of the source": sha256(closed_text(here).encode()).hexdigest(),
            "layout of the target": sha256(closed_text(there).encode()).hexdigest(),
        }
        for side in (here, there):
            if side.layout.ranks > size:
                fail(
                    "E641",
                    f"{side.layout.call} has {side.layout.ranks} ranks, the group has {size}",
                    Label(side.layout.call),
                )
        holds: dict[str, tuple[Name, tuple[int, ...]]] = {}
        if rank < max(1, here.layout.ranks):
            holds = _names(
                (h.file, h.key, h.shape) for part in locate(here.layout, rank=rank).parts for h in part.homes
            )
        sources = _given(state, holds, here.layout.call)
        if rank >= max(1, there.layout.ranks):
            return cls(None, sources, marks)
        plan = shares.of(rank).plan
        work = cls(plan, sources, marks)
        device = next((t.device for t in sources.values()), torch.device("cpu"))
        # No move shows the type of a tensor without elements on this rank.
        dtypes = {
            (t.file, t.key): t.dtype or (known.dtype if (known := there.layout.tensors.get(t.label)) else None) or "f32"
            for t in plan.targets
        }
        out = beside.get("out")
        if out is not None:
            work._take(out, dtypes, state)
        else:
            work._make(dtypes, device)
        work._fill()
        return work

    def _take(
        self, out: Mapping[str, torch.Tensor], dtypes: Mapping[Name, str], state: Mapping[str, torch.Tensor]
    ) -> None:
        """Take existing tensors that share no memory with the source.

        Otherwise the source would be overwritten before it is read.
        """
        assert self.plan is not None
        names = _names((t.file, t.key, t.shape) for t in self.plan.targets)
        _demand_given(out, names, f"out, of {self.plan.target_call}")
        for text, (name, _) in names.items():
            one, place = out[text], Label(name[0], where=text)
            if one.numel() and one.dtype != dtype_of(dtypes[name]):
                fail("E640", f"out[{text!r}] is {one.dtype}, the layout says {dtypes[name]}", place)
            if why := unwritable(one):
                fail("E640", f"out[{text!r}] is {why}", place)
        read = [(f"state[{text!r}]", one) for text, one in state.items()]
        if (pair := overlap([(f"out[{text!r}]", out[text]) for text in names], read)) is not None:
            filled, other = pair
            what = f"{filled} shares memory with {other}, which would be overwritten" + " before it is read" * (
                other in dict(read)
            )
            place, remedy = Label(self.plan.target_call), "give tensors of their own, or none: they are made"
            fail("E640", what, place, remedy=remedy)
        for text, (name, _) in names.items():
            goal = Goal.of(out[text])
            self._goals.append(goal)
            self.targets[name], self.result[text] = goal.flat, out[text]

    def put(self) -> None:
        """Copy elements that could not be received in place."""
        for goal in self._goals:
            goal.put()

    def _make(self, dtypes: Mapping[Name, str], device: torch.device) -> None:
        assert self.plan is not None
        names = _names((t.file, t.key, t.shape) for t in self.plan.targets)
        for text, (name, shape) in names.items():
            self.result[text] = torch.zeros(shape, dtype=dtype_of(dtypes[name]), device=device)
            self.targets[name] = flat_of(self.result[text])

    def _fill(self) -> None:
        """Fill elements with numbers other than zero, and padding of existing tensors."""
        assert self.plan is not None
        for tensor in self.plan.targets:
            if tensor.padding and tensor.padding_kind == "zero":
                self.targets[tensor.file, tensor.key].zero_()
        for node in self.plan.nodes:
            if isinstance(node, Fill) and node.lacking:
                fail(
                    "E642",
                    f"{node.state} of {node.label} has {node.elements:,} elements that the source lacks, to be filled with"
                    f" {node.value:g}: that is not done between ranks",
                    Label(self.plan.target_call, where=node.label),
                    remedy="leave it out of the target's layout and make it in the job, or save and convert, which fills",
                )

    def demand_types(self, graph: RankGraph) -> None:
        """Check the types of tensors.

        Raises: UcplError E640 if a tensor has another type than in its layout.
        """
        for one in graph.sources:
            if isinstance(one, Message):
                continue
            name, dtype = one
            found = self.sources[name].dtype
            if found != dtype_of(dtype):
                text = key_text(name[1])
                fail("E640", f"{text} is {found}, the layout says {dtype}", Label(name[0], where=text))


def _names(homes: Iterable[tuple[str, Key, tuple[int, ...]]]) -> dict[str, tuple[Name, tuple[int, ...]]]:
    """Keys as people write them.

    Raises: UcplError E640 if two stored tensors of a rank have one key.
    """
    found: dict[str, tuple[Name, tuple[int, ...]]] = {}
    for file, key, shape in homes:
        text = key_text(key)
        if text in found and found[text][0] != (file, key):
            fail(
                "E640",
                f"two tensors of a rank have the key {text}, in {found[text][0][0]} and {file}",
                Label(file, where=text),
            )
        found[text] = (file, key), shape
    return found


def _demand_given(
    tensors: Mapping[str, torch.Tensor], wanted: Mapping[str, tuple[Name, tuple[int, ...]]], call: str
) -> None:
    """Check tensors against the layout: names, elements, shapes.

    Raises: UcplError E640.
    """
    if not isinstance(tensors, Mapping):
        fail(
            "E640", f"{call} is given a {type(tensors).__name__}, where a dict of tensors by key is meant", Label(call)
        )
    for text in sorted(wanted.keys() ^ tensors.keys()):
        what = "it is missing" if text in wanted else "the layout has no such tensor on this rank"
        fail("E640", f"{text} of {call}: {what}", Label(call, where=text))
    for text, (name, shape) in wanted.items():
        if why := unreadable(tensors[text]):
            fail("E640", f"{text} of {call} is {why}", Label(name[0], where=text))
        here = tuple(part_of(tensors[text]).shape)
        if here != shape:
            fail("E640", f"{text} is {list(here)}, the layout says {list(shape)}", Label(name[0], where=text))


def _given(
    tensors: Mapping[str, torch.Tensor], wanted: Mapping[str, tuple[Name, tuple[int, ...]]], call: str
) -> dict[Name, torch.Tensor]:
    """Tensors by name, flat. Raises: UcplError E640."""
    _demand_given(tensors, wanted, call)
    return {name: flat_of(tensors[text]) for text, (name, _) in wanted.items()}


def _device(group: dist.ProcessGroup | None) -> torch.device:
    """The device of messages.

    The host if the group has a backend for it (gloo), else the current GPU (nccl).
    """
    backends = dist.get_backend_config(group).split(",")  # as in cpu:gloo,cuda:nccl
    if any(one.startswith("cpu:") for one in backends):
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def _compare(
    ranks: JobRanks, work: _Work, pieces: Sequence[Piece], copies: Sequence[Piece], memory: int, device: torch.device
) -> None:
    """Compare this rank's elements with all other copies.

    Raises: UcplError E613.
    """
    if ranks.all_agree(not copies):
        return
    with ranks.together():
        asked = _asked(copies, ranks.group, device)
    asked[ranks.rank] = [copy for copy in copies if copy.peer == ranks.rank]
    with ranks.agreeing():
        here = Digests(work.sources, memory)
        mine = {peer: b"".join(here.of(copy.source) for copy in some) for peer, some in asked.items()}
    with ranks.together():
        told = _swapped({peer: raw for peer, raw in mine.items() if peer != ranks.rank}, ranks.group, device)
    with ranks.agreeing():
        compare_copies(copies, {**told, ranks.rank: mine[ranks.rank]}, pieces, Digests(work.targets, memory))


def _asked(pieces: Sequence[Piece], group: dist.ProcessGroup | None, device: torch.device) -> dict[int, list[Piece]]:
    """Requests of each other rank to this one.

    Each sends its requests to the ranks that hold the data.
    """
    wanted: dict[int, list[Piece]] = {}
    for piece in pieces:
        if piece.peer != dist.get_rank(group):
            wanted.setdefault(piece.peer, []).append(piece)
    told = _swapped({peer: request(some) for peer, some in wanted.items()}, group, device)
    return {peer: parse_request(raw, peer) for peer, raw in told.items()}


def _swapped(given: Mapping[int, bytes], group: dist.ProcessGroup | None, device: torch.device) -> dict[int, bytes]:
    """Swap bytes with each other rank.

    Returns theirs for this rank.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    mine = {peer: tensor_of(bytearray(raw), torch.uint8, (len(raw),)).to(device) for peer, raw in given.items() if raw}
    sizes = torch.tensor([len(mine.get(peer, ())) for peer in range(size)], device=device)
    every = [torch.empty_like(sizes) for _ in range(size)]
    dist.all_gather(every, sizes, group=group)
    told = {p: int(row[rank]) for p, row in enumerate(every) if int(row[rank])}
    theirs = {peer: torch.empty(count, dtype=torch.uint8, device=device) for peer, count in told.items()}
    calls = [dist.P2POp(dist.isend, raw, global_rank(peer, group), group) for peer, raw in mine.items()]
    calls += [dist.P2POp(dist.irecv, raw, global_rank(peer, group), group) for peer, raw in theirs.items()]
    for work in dist.batch_isend_irecv(calls) if calls else ():
        work.wait()
    return {peer: memory_of(raw).tobytes() for peer, raw in theirs.items()}


def _demand_known(beside: ToReshard) -> None:
    """Raises: TypeError, UcplError E173."""
    unknown = next((name for name in beside if name not in ToReshard.__annotations__), None)
    if unknown is not None:
        raise TypeError(f"reshard() got an unexpected keyword argument {unknown!r}")
    memory: object = beside.get("memory", MEMORY)
    if type(memory) is not int or memory < 1:
        fail("E173", f"memory = {memory!r}: a number of bytes is needed, from 1 on", Label("reshard", where="memory"))


# ---- copies of one value ---------------------------------------------------------------------------------------------


DIGEST = 16  # bytes
REMEDY = (
    "find out which copy is right and broadcast it first; if copies may differ, give each rank a file (its axis in the name)"
    " and write `any @AXIS` on the line"
)


def copies_of(plan: Plan, held: Held, pieces: Sequence[Piece]) -> list[Piece]:
    """Copies of a rank's share that `pieces` do not read, as pieces.

    `source` has the dtype of the target.
    """
    read = {(piece.peer, piece.source, piece.target) for piece in pieces}
    found = []
    for runs in plan.moves:
        if runs.kind not in ("copy", "check") or runs.source_value != runs.target_value or runs.half:
            continue
        for row in _rows(runs, plan, held):
            way = Transfer(plan.targets[int(runs.target[row])].label, runs.state, runs.state)
            source, target = box_of(plan, runs, row, "source"), box_of(plan, runs, row, "target")
            for peer in held.get(source.name, ()):
                if (peer, source, target) not in read:
                    found.append(Piece(peer, evolve(source, dtype=target.dtype), target, way))
    return found


def _rows(runs: Runs, plan: Plan, held: Held) -> Iterator[int]:
    """Rows with elements, of stored tensors that may have another copy."""
    several = [runs.kind == "check" or len(held.get((t.file, t.key), ())) > 1 for t in plan.sources]
    return (row for row in range(len(runs)) if several[int(runs.source[row])] and runs.shape[row].all())


@define(eq=False)
class Digests:
    """Digests of boxes of some tensors, each made once.

    `most`: bytes that are copied at a time.
    """

    tensors: Tensors
    most: int
    _known: dict[RemoteBox, bytes] = field(factory=dict)

    def of(self, box: RemoteBox) -> bytes:
        """The digest of a box's elements in row-major order, after a cast."""
        if box not in self._known:
            found = xxhash.xxh3_128()
            room = max(1, self.most // DTYPES[box.dtype].itemsize)
            for part in MessagePart(Message(0, box.dtype, box.elements), 0, box).split(room):
                values = seen(self.tensors[box.name], part.box)
                found.update(memory_of(values.to(dtype_of(box.dtype))))
            self._known[box] = found.digest()
        return self._known[box]


def compare_copies(
    copies: Sequence[Piece], told: Mapping[int, bytes], pieces: Sequence[Piece], targets: Digests
) -> None:
    """Compare the copies with this rank's elements.

    `told`: the digests of each rank, in the order of `copies`. Raises: UcplError E613 if a copy differs.
    """
    at: dict[int, int] = {}
    other = []
    for copy in copies:
        begin = at.get(copy.peer, 0)
        at[copy.peer] = begin + DIGEST
        if told[copy.peer][begin : begin + DIGEST] != targets.of(copy.target):
            other.append(copy)
    if not other:
        return
    one = other[0]
    taken = next((p for p in pieces if p.target.name == one.target.name and p.target.end > one.target.offset), None)
    more = f", and {len(other) - 1:,} more" if len(other) > 1 else ""
    label = Label(_where(one.source.name, one.peer), where=key_text(one.source.name[1]))
    labels = (
        [label] if taken is None else [label, Label(_where(taken.source.name, taken.peer), "the copy that was taken")]
    )
    what = f"{one.way.state} of {one.way.label} has other values on rank {one.peer} than the copy that was taken{more}"
    fail("E613", what, *labels, remedy=REMEDY)


def _where(name: Name, rank: int) -> str:
    return f"{name[0]} of rank {rank}"
