"""Run the graph of a rank: Sends and Receives in rounds.

Each round fits into staging buffers of a bounded size. Both ends cut a message into the same windows. The sender
packs bytes, and the receiver puts them in their places; types change there, as the plan demands.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist

from ucpl.errors import Label, fail
from ucpl.extents import DTYPES, key_text
from ucpl.live.tensors import boxed, overflows, survives
from ucpl.ranks.rank_graph import Message, MessagePart, RankGraph
from ucpl.ranks.remote_boxes import Name, RemoteBox
from ucpl.records import define, frozen

__all__ = ["Exchange", "Tensors", "dtype_of", "global_rank"]

Tensors = Mapping[Name, torch.Tensor]  # flat, contiguous


def dtype_of(name: str) -> torch.dtype:
    """torch's type of a dtype by its name in the language."""
    found: torch.dtype = getattr(torch, DTYPES[name].torch)
    return found


def seen(flat: torch.Tensor, box: RemoteBox) -> torch.Tensor:
    """A view of a box of a stored tensor.

    The tensor may be a part of a larger one.
    """
    return boxed(flat, box.shape, box.stride, box.offset)


def put(values: torch.Tensor, there: torch.Tensor, target: RemoteBox, may_round: bool) -> None:
    """Put values into the place of a box, cast as planned.

    Raises: UcplError E605, E607.
    """
    if values.dtype == there.dtype:
        there.copy_(values)
        return
    made = values.to(there.dtype)
    key = key_text(target.name[1])
    place = Label(target.name[0], where=key)
    if not may_round and not survives(values, made):
        fail("E605", f"{key} is {target.dtype}, which cannot hold the received value", place)
    if overflows(values, made):
        fail("E607", f"a finite value for {key} is infinite as {target.dtype}", place)
    there.copy_(made)


@frozen
class MessageWindow:
    """The part of a message in one round."""

    of: Message
    begin: int
    elements: int
    parts: tuple[MessagePart, ...]

    @property
    def size(self) -> int:
        """Bytes."""
        return self.elements * DTYPES[self.of.dtype].itemsize


def windows_of(parts: Iterable[MessagePart], most: int) -> list[MessageWindow]:
    """Parts of messages of one rank, in windows of limited bytes.

    In order, at most `most` bytes each: the same on both sides.
    """
    found: list[MessageWindow] = []
    at: list[MessagePart] = []
    filled = 0

    def close() -> None:
        nonlocal filled
        if at:
            found.append(MessageWindow(at[0].of, at[0].begin, filled, tuple(at)))
        at.clear()
        filled = 0

    for whole in parts:
        room = max(1, most // DTYPES[whole.of.dtype].itemsize)
        for part in whole.split(room):
            if at and (at[0].of != part.of or filled + part.box.elements > room):
                close()
            at.append(part)
            filled += part.box.elements
    close()
    return found


@define(eq=False)
class Exchange:
    """The work of one rank in a job's graph."""

    group: dist.ProcessGroup | None
    sources: Tensors
    targets: Tensors
    device: torch.device  # of the staging buffers
    most: int  # bytes of one message's window
    kept: int = 0  # bytes
    sent: int = 0
    received: int = 0
    staging: int = 0  # the most bytes that were in use at once
    _error: Exception | None = None

    def keep(self, graph: RankGraph) -> None:
        """Copy data that stays on this rank.

        Raises: UcplError E605, E607.
        """
        for source, target, may_round in graph.kept():
            there = seen(self.targets[target.name], target)
            put(seen(self.sources[source.name], source), there, target, may_round)
            self.kept += target.elements * there.element_size()

    def run(self, graph: RankGraph) -> None:
        """Send and receive messages, in rounds.

        No round is skipped, because others wait. Raises: UcplError E605, E607.
        """
        gives = {peer: windows_of(parts, self.most) for peer, parts in graph.given().items()}
        takes = {peer: windows_of(parts, self.most) for peer, parts in graph.taken().items()}
        for i in range(max((len(windows) for windows in (*takes.values(), *gives.values())), default=0)):
            self._round(
                [(peer, windows[i]) for peer, windows in gives.items() if i < len(windows)],
                [(peer, windows[i]) for peer, windows in takes.items() if i < len(windows)],
            )
        if self._error is not None:
            raise self._error

    def _round(self, gives: Sequence[tuple[int, MessageWindow]], takes: Sequence[tuple[int, MessageWindow]]) -> None:
        calls, arriving = [], []
        for peer, window in gives:
            calls.append(dist.P2POp(dist.isend, self._packed(window), global_rank(peer, self.group), self.group))
            self.sent += window.size
        for peer, window in takes:
            raw = torch.empty(window.size, dtype=torch.uint8, device=self.device)
            arriving.append((window, raw))
            calls.append(dist.P2POp(dist.irecv, raw, global_rank(peer, self.group), self.group))
        self.staging = max(self.staging, sum(window.size for _, window in (*gives, *takes)))
        for work in dist.batch_isend_irecv(calls) if calls else ():
            work.wait()
        try:
            for window, raw in arriving if self._error is None else ():
                self._unpacked(window, raw)
        except Exception as error:
            self._error = error

    def _packed(self, window: MessageWindow) -> torch.Tensor:
        raw = torch.empty(window.size, dtype=torch.uint8, device=self.device)
        values = raw.view(dtype_of(window.of.dtype))
        for part in window.parts:
            begin = part.begin - window.begin
            there = values[begin : begin + part.box.elements].view(part.box.shape)
            there.copy_(seen(self.sources[part.box.name], part.box))
        return raw

    def _unpacked(self, window: MessageWindow, raw: torch.Tensor) -> None:
        values = raw.view(dtype_of(window.of.dtype))
        for part in window.parts:
            begin, there = part.begin - window.begin, self.targets[part.box.name]
            found = values[begin : begin + part.box.elements].view(part.box.shape)
            put(found.to(there.device), seen(there, part.box), part.box, part.may_round)
        self.received += window.size


def global_rank(peer: int, group: dist.ProcessGroup | None) -> int:
    """A rank of a group in the numbering of torch's point-to-point calls."""
    return peer if group is None else dist.get_global_rank(group, peer)
