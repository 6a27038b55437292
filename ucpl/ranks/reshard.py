"""Tensors of a running job from one layout to another, without a disk: each rank gets what it lacks from who holds it.

Each rank plans its own share, proved as any plan is, and asks the others for what it does not hold. Nothing is sent that is
in place already, in whatever copy, and each element that a rank lacks is sent to it once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict, Unpack

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from ucpl.columns.operations import Fill, net_text
from ucpl.conversion.given import model_named
from ucpl.conversion.keywords import given_from
from ucpl.conversion.planning import Asked, described
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
    source, target: calls of layouts, as in FILE.ucpl:NAME(tp=2). Their ranks are the first of the group.

    Returns this rank's tensors of the target, by key. Raises: UcplError E640-E644 on all ranks, E30x where the layouts do not
    fit.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    memory = beside.get("memory", MEMORY)
    error: UcplError | None = None
    work: _Work | None = None
    try:
        work = _Work.of(state, (source, target), beside, (rank, size))
    except UcplError as caught:
        error = caught
    _agree(group, error)
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
    except UcplError as caught:
        error = caught
    _agree(group, error)
    device = _device(group)
    graph = dealt(pieces, _asked(pieces, group, device), rank)
    exchange = Exchange(group, work.sources, work.targets, device, memory // (2 * max(1, size - 1)))
    try:
        work.demand_types(graph)
        exchange.keep(graph)
    except UcplError as caught:
        error = caught
    _agree(group, error)
    try:
        exchange.run(graph)
    except UcplError as caught:
        error = caught
    _agree(group, error)
    made = Resharded(work.result)
    made.graph = net_text(graph.net)
    made.sent, made.received, made.kept = exchange.sent, exchange.received, exchange.kept
    made.staging = exchange.staging
    return made


class _Work:
    """What one rank has, and what it is to have."""

    def __init__(self, plan: Plan | None, sources: dict[Name, torch.Tensor], targets: dict[Name, torch.Tensor]) -> None:
        self.plan, self.sources, self.targets = plan, sources, targets
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
            return cls(None, sources, {})
        plan = share_of(asked, given, rank).plan
        work = cls(plan, sources, {})
        device = next((t.device for t in sources.values()), torch.device("cpu"))
        work._make(beside.get("out"), device)
        work._fill()
        return work

    def _make(self, out: Mapping[str, torch.Tensor] | None, device: torch.device) -> None:
        assert self.plan is not None
        names = _names((t.file, t.key, t.shape) for t in self.plan.targets)
        dtypes = {(t.file, t.key): t.dtype for t in self.plan.targets}
        if out is not None:
            given = _given(out, names, self.plan.target_call)
            for text, (name, _) in names.items():
                if (
                    given[name].dtype != dtype_of(dtypes[name])
                    or given[name].data_ptr() != _local(out[text]).data_ptr()
                ):
                    what = f"{given[name].dtype}, the layout says {dtypes[name]}"
                    fail(
                        "E640",
                        f"out[{text!r}] cannot be filled: it is {what}, or not contiguous",
                        Label(name[0], where=text),
                    )
                self.targets[name], self.result[text] = given[name], out[text]
            return
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
    for text in sorted(wanted.keys() ^ tensors.keys()):
        what = "it is not given" if text in wanted else "the layout has no such tensor on this rank"
        fail("E640", f"{text} of {call}: {what}", Label(call, where=text))
    for text, (name, shape) in wanted.items():
        local = _local(tensors[text])
        if tuple(local.shape) != shape:
            fail("E640", f"{text} is {list(local.shape)}, the layout says {list(shape)}", Label(name[0], where=text))
        found[name] = local.reshape(-1)
    return found


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


def _agree(group: dist.ProcessGroup | None, error: UcplError | None) -> None:
    """All go on, or none does. Raises: the error, or UcplError E644 where another rank has one."""
    told: list[tuple[str, str] | None] = [None] * dist.get_world_size(group)
    first = error.diagnostics[0] if error is not None else None
    dist.all_gather_object(told, None if first is None else (first.code, first.message), group=group)
    if error is not None:
        raise error
    for peer, one in enumerate(told):
        if one is not None:
            raise UcplError(
                Diagnostic("E644", f"rank {peer} failed: {one[1]}", (Label(f"rank {peer}", f"it ended with {one[0]}"),),
                           remedy=codes()["E644"].remedy)
            )  # fmt: skip
