"""Tensors of a running job from one layout to another, without a disk: each rank gets what it lacks from who holds it.

Each rank plans its own share, proved as any plan is, and asks the others for what it does not hold. Nothing is sent that is
in place already, in whatever copy, and each element that a rank lacks is sent to it once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict, Unpack

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from ucpl.columns.operations import Fill, net_text
from ucpl.conversion.given import model_named
from ucpl.conversion.keywords import given_from
from ucpl.conversion.planning import Asked, closed_text, described
from ucpl.conversion.share import share_of
from ucpl.errors import Diagnostic, Label, UcplError, fail
from ucpl.errors import catalogue as codes
from ucpl.extents import Key, key_text
from ucpl.ranks.dealing import Dealt, Message, asked_of, dealt, request
from ucpl.ranks.messages import Exchange, dtype_of, global_rank
from ucpl.ranks.pieces import Name, Piece, pieces_of

if TYPE_CHECKING:
    from ucpl.conversion.given import Given
    from ucpl.layout.scope import Value
    from ucpl.schedule import Plan
    from ucpl.texts import Json

__all__ = ["Resharded", "ToReshard", "reshard"]

MEMORY = 256 << 20


class ToReshard(TypedDict, total=False):
    """What is said beside the two layouts."""

    out: Mapping[str, torch.Tensor]  # tensors of the target that are there already, plain or DTensors: they are filled
    memory: int  # bytes of staging buffers of each rank (default 256 MiB)
    model: str | None  # FILE:NAME, where both layouts are of any model
    config: Mapping[str, Json] | str | Path | None  # a config.json, as `config.x`
    sizes: Mapping[str, Value] | None  # of model or layout, by name


class Resharded(dict[str, torch.Tensor]):
    """What a rank holds in the target's layout, by key. Empty for a rank that has no part in it."""

    sent: int = 0  # bytes of elements, to other ranks
    received: int = 0
    kept: int = 0  # that were on this rank already
    staging: int = 0  # the most bytes of messages at once
    graph: str = ""  # what this rank did, a node a line: what it read here, sent to whom, received from whom


def reshard(
    state: Mapping[str, torch.Tensor],
    source: str,
    target: str,
    group: dist.ProcessGroup | None = None,
    **beside: Unpack[ToReshard],
) -> Resharded:
    """The tensors of a job in another layout. Every rank of the group calls it, with the same layouts.

    state:  what this rank holds, by the keys of the source's layout; a DTensor counts as its local tensor. Nothing, where
            the rank has no part in the source.
    source, target: calls of layouts, as in FILE.ucpl:NAME(tp=2), which say the same on all ranks. Their ranks are the first
            of the group.

    Returns this rank's tensors of the target, by key. Raises: UcplError E640-E644 on all ranks, E622 where they were given
    different things, E30x where the layouts do not fit. Whatever else is raised on one rank is E644 on the others.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    memory = beside.get("memory", MEMORY)
    error: Exception | None = None
    work: _Work | None = None
    try:
        _demand_known(beside)
        work = _Work.of(state, (source, target), beside, (rank, size))
    except Exception as caught:
        error = caught
    _agree(group, error, {**work.marks, "memory": memory} if work is not None else {})
    assert work is not None
    told: list[list[Name]] = [[] for _ in range(size)]
    dist.all_gather_object(told, sorted(work.sources), group=group)
    held: dict[Name, list[int]] = {}
    for peer, names in enumerate(told):
        for file, key in names:
            held.setdefault((file, tuple(key)), []).append(peer)
    pieces: list[Piece] = []
    try:
        pieces = pieces_of(work.plan, held, rank) if work.plan is not None else []
    except Exception as caught:
        error = caught
    _agree(group, error)
    device = _device(group)
    graph = dealt(pieces, _asked(pieces, group, device), rank)
    exchange = Exchange(group, work.sources, work.targets, device, memory // (2 * max(1, size - 1)))
    try:
        work.demand_types(graph)
        exchange.keep(graph)
    except Exception as caught:
        error = caught
    _agree(group, error)
    try:
        exchange.run(graph)
    except Exception as caught:
        error = caught
    _agree(group, error)
    made = Resharded(work.result)
    made.graph = net_text(graph.net)
    made.sent, made.received, made.kept = exchange.sent, exchange.received, exchange.kept
    made.staging = exchange.staging
    return made


class _Work:
    """What one rank has, and what it is to have."""

    def __init__(self, plan: Plan | None, sources: dict[Name, torch.Tensor], marks: dict[str, object]) -> None:
        self.plan, self.sources, self.marks = plan, sources, marks  # marks: what must be the same on all ranks
        self.targets: dict[Name, torch.Tensor] = {}
        self.result: dict[str, torch.Tensor] = {}

    @classmethod
    def of(
        cls, state: Mapping[str, torch.Tensor], calls: tuple[str, str], beside: ToReshard, place: tuple[int, int]
    ) -> _Work:
        """Raises: UcplError E640, E641, and what planning raises."""
        from ucpl.regions import locate

        rank, size = place
        model = beside.get("model")
        given: Given = given_from(
            {"config": beside.get("config"), "sizes": beside.get("sizes")}, model_named(model) if model else None
        )
        asked = Asked(*calls)
        here, there, _ = described(asked, given)
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
        plan = share_of(asked, given, rank).plan
        work = cls(plan, sources, marks)
        device = next((t.device for t in sources.values()), torch.device("cpu"))
        # What has no elements on this rank is moved by nothing, which tells its type elsewhere.
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
        """Tensors that are there, and nowhere where the source lies: it would be written over before it is read."""
        assert self.plan is not None
        names = _names((t.file, t.key, t.shape) for t in self.plan.targets)
        given = _given(out, names, f"out, of {self.plan.target_call}")
        read = sorted((*_span(_local(one)), text) for text, one in state.items())
        for text, (name, _) in names.items():
            local, place = _local(out[text]), Label(name[0], where=text)
            if local.numel() and local.dtype != dtype_of(dtypes[name]):
                fail("E640", f"out[{text!r}] is {local.dtype}, the layout says {dtypes[name]}", place)
            if not local.is_contiguous():
                fail("E640", f"out[{text!r}] is not contiguous, and cannot be filled", place)
            low, high = _span(local)
            over = next((other for a, b, other in read if max(a, low) < min(b, high)), None)
            if over is not None:
                what = f"out[{text!r}] lies where state[{over!r}] does, which would be written over before it is read"
                fail("E640", what, place, remedy="give tensors of their own, or none: they are made")
            self.targets[name], self.result[text] = given[name], out[text]

    def _make(self, dtypes: Mapping[Name, str], device: torch.device) -> None:
        assert self.plan is not None
        names = _names((t.file, t.key, t.shape) for t in self.plan.targets)
        for text, (name, shape) in names.items():
            self.result[text] = torch.zeros(shape, dtype=dtype_of(dtypes[name]), device=device)
            self.targets[name] = self.result[text].view(-1)

    def _fill(self) -> None:
        """What is filled with another number than zero, and padding of tensors that were there before."""
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

    def demand_types(self, graph: Dealt) -> None:
        """Raises: UcplError E640 where a tensor has another type than its layout says."""
        for one in graph.sources:
            if isinstance(one, Message):
                continue
            name, dtype = one
            found = self.sources[name].dtype
            if found != dtype_of(dtype):
                text = key_text(name[1])
                fail("E640", f"{text} is {found}, the layout says {dtype}", Label(name[0], where=text))


def _names(homes: Iterable[tuple[str, Key, tuple[int, ...]]]) -> dict[str, tuple[Name, tuple[int, ...]]]:
    """Keys as people write them. Raises: UcplError E640 where two stored tensors of a rank have one key."""
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


def _given(
    tensors: Mapping[str, torch.Tensor], wanted: Mapping[str, tuple[Name, tuple[int, ...]]], call: str
) -> dict[Name, torch.Tensor]:
    """Tensors by name, flat. Raises: UcplError E640."""
    found: dict[Name, torch.Tensor] = {}
    if not isinstance(tensors, Mapping):
        fail(
            "E640", f"{call} is given a {type(tensors).__name__}, where a dict of tensors by key is meant", Label(call)
        )
    for text in sorted(wanted.keys() ^ tensors.keys()):
        what = "it is not given" if text in wanted else "the layout has no such tensor on this rank"
        fail("E640", f"{text} of {call}: {what}", Label(call, where=text))
    for text, (name, shape) in wanted.items():
        one: object = tensors[text]
        if not isinstance(one, torch.Tensor) or one.is_meta:
            kind = "a tensor on no device (meta)" if isinstance(one, torch.Tensor) else f"a {type(one).__name__}"
            what = f"{kind}, and no tensor with bytes"
            fail("E640", f"{text} of {call} is {what}", Label(name[0], where=text))
        local = _local(one)
        if tuple(local.shape) != shape:
            fail("E640", f"{text} is {list(local.shape)}, the layout says {list(shape)}", Label(name[0], where=text))
        found[name] = local.reshape(-1)
    return found


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """Where a tensor lies: the address of its first byte, and the one behind its last."""
    begin = tensor.data_ptr()
    if not tensor.numel():
        return begin, begin
    steps = ((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return begin, begin + (1 + sum(steps)) * tensor.element_size()


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def _device(group: dist.ProcessGroup | None) -> torch.device:
    """gloo sends what lies in the memory of the host, nccl what lies on a GPU."""
    if dist.get_backend(group) == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _asked(pieces: Sequence[Piece], group: dist.ProcessGroup | None, device: torch.device) -> dict[int, list[Piece]]:
    """What each other rank wants of this one: each says it to those whom it concerns."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    wanted: dict[int, list[Piece]] = {}
    for piece in pieces:
        if piece.peer != rank:
            wanted.setdefault(piece.peer, []).append(piece)
    mine = {
        peer: torch.frombuffer(bytearray(request(some)), dtype=torch.uint8).to(device) for peer, some in wanted.items()
    }
    sizes = torch.tensor([len(mine.get(peer, ())) for peer in range(size)], device=device)
    every = [torch.empty_like(sizes) for _ in range(size)]
    dist.all_gather(every, sizes, group=group)
    told = {p: int(row[rank]) for p, row in enumerate(every) if int(row[rank])}
    theirs = {peer: torch.empty(count, dtype=torch.uint8, device=device) for peer, count in told.items()}
    calls = [dist.P2POp(dist.isend, raw, global_rank(peer, group), group) for peer, raw in mine.items()]
    calls += [dist.P2POp(dist.irecv, raw, global_rank(peer, group), group) for peer, raw in theirs.items()]
    for work in dist.batch_isend_irecv(calls) if calls else ():
        work.wait()
    return {peer: asked_of(raw.cpu().numpy().tobytes(), peer) for peer, raw in theirs.items()}


def _demand_known(beside: ToReshard) -> None:
    """Raises: TypeError, UcplError E173."""
    unknown = next((name for name in beside if name not in ToReshard.__annotations__), None)
    if unknown is not None:
        raise TypeError(f"reshard() got an unexpected keyword argument {unknown!r}")
    memory: object = beside.get("memory", MEMORY)
    if type(memory) is not int or memory < 1:
        fail("E173", f"memory = {memory!r}: a number of bytes is needed, from 1 on", Label("reshard", where="memory"))


def _agree(group: dist.ProcessGroup | None, error: Exception | None, marks: Mapping[str, object] | None = None) -> None:
    """All go on, or none does. Raises: the error, UcplError E644 where another rank has one, E622 where marks differ."""
    told: list[tuple[str, str, dict[str, object]] | None] = [None] * dist.get_world_size(group)
    code, said = "", ""
    if isinstance(error, UcplError):
        code, said = error.diagnostics[0].code, error.diagnostics[0].message
    elif error is not None:
        code, said = type(error).__name__, f"{type(error).__name__}: {error}"
    dist.all_gather_object(told, (code, said, dict(marks or {})), group=group)
    if error is not None:
        raise error
    every = [one for one in told if one is not None]
    for peer, (code, said, _) in enumerate(every):
        if code:
            raise UcplError(
                Diagnostic("E644", f"rank {peer} failed: {said}", (Label(f"rank {peer}", f"it ended with {code}"),),
                           remedy=codes()["E644"].remedy)
            )  # fmt: skip
    for peer, (_, _, theirs) in enumerate(every):
        for name, mark in theirs.items():
            if mark != every[0][2][name]:
                what = f"rank {peer} was given another {name} than rank 0"
                fail(
                    "E622",
                    what,
                    Label("reshard", where=name),
                    remedy="give all ranks the same layouts, sizes and memory",
                )
