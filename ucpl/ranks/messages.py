"""Pieces of tensors between ranks: in rounds, each within a staging buffer of a bounded size, both sides in one order.

The receiver says what it wants as a table of boxes; from it both sides cut the same pieces into the same rounds. Bytes are
packed by the sender and put in their places by the receiver; types change there, as the plan says.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from attrs import field

from ucpl.errors import Label, fail
from ucpl.extents import DTYPES, key_text
from ucpl.ranks.pieces import Box, Name, Piece, split
from ucpl.records import define, frozen

__all__ = ["Exchange", "Tensors", "dtype_of"]

ALIGNED = 16  # bytes: where a piece begins in a message, so that it can be seen in its own type
Tensors = Mapping[Name, torch.Tensor]  # flat, contiguous


def dtype_of(name: str) -> torch.dtype:
    """torch's type of a dtype by its name in the language."""
    found: torch.dtype = getattr(torch, DTYPES[name].torch)
    return found


def seen(flat: torch.Tensor, box: Box) -> torch.Tensor:
    """A box of a stored tensor, where it lies. The tensor may be a part of a larger one."""
    return flat.as_strided(box.shape, box.stride, flat.storage_offset() + box.offset)


def put(piece: Piece, values: torch.Tensor, there: torch.Tensor) -> None:
    """Values of a piece into their place, cast as the plan says. Raises: UcplError E605, E607."""
    if values.dtype == there.dtype:
        there.copy_(values)
        return
    made = values.to(there.dtype)
    place = Label(piece.target.name[0], where=key_text(piece.target.name[1]))
    if not piece.may_round and not _is_same(made.to(values.dtype), values):
        fail("E605", f"{key_text(piece.target.name[1])} is {piece.target.dtype}, which cannot hold what is sent", place)
    if values.is_floating_point() and bool((made.isinf() & ~values.isinf()).any()):
        fail("E607", f"a finite value of {key_text(piece.source.name[1])} is infinite as {piece.target.dtype}", place)
    there.copy_(made)


def _is_same(made: torch.Tensor, values: torch.Tensor) -> bool:
    return bool(((made == values) | ((made != made) & (values != values))).all())


@frozen
class _Slot:
    """A part of a message: which piece, and where in it."""

    piece: Piece
    begin: int
    size: int


def rounds_of(pieces: Sequence[Piece], most: int) -> list[list[_Slot]]:
    """Pieces in messages of at most `most` bytes, in their order: the same on both sides."""
    found: list[list[_Slot]] = []
    end = most + 1
    for whole in pieces:
        itemsize = DTYPES[whole.source.dtype].itemsize
        for piece in split(whole, max(1, most // itemsize)):
            size = piece.source.elements * itemsize
            if end + size > most:
                found.append([])
                end = 0
            found[-1].append(_Slot(piece, end, size))
            end = -(-(end + size) // ALIGNED) * ALIGNED
    return found


@define(eq=False)
class Exchange:
    """Messages of one rank with all others."""

    group: dist.ProcessGroup | None
    sources: Tensors
    targets: Tensors
    device: torch.device  # of the staging buffers
    most: int  # bytes of one message
    sent: int = 0  # bytes
    received: int = 0
    staging: int = 0  # the most bytes that were in use at once
    _gives: dict[int, list[list[_Slot]]] = field(factory=dict)
    _takes: dict[int, list[list[_Slot]]] = field(factory=dict)

    def run(self, takes: Mapping[int, Sequence[Piece]], gives: Mapping[int, Sequence[Piece]]) -> None:
        """takes: pieces by who gives them; gives: what each peer asked for. Raises: UcplError E605, E607."""
        self._takes = {peer: rounds_of(pieces, self.most) for peer, pieces in takes.items() if pieces}
        self._gives = {peer: rounds_of(pieces, self.most) for peer, pieces in gives.items() if pieces}
        count = max((len(r) for r in (*self._takes.values(), *self._gives.values())), default=0)
        for i in range(count):
            self._round(i)

    def _round(self, i: int) -> None:
        calls, arriving = [], []
        used = 0
        for peer, rounds in self._gives.items():
            if i < len(rounds):
                message = self._packed(rounds[i])
                used += len(message)
                self.sent += sum(slot.size for slot in rounds[i])
                calls.append(dist.P2POp(dist.isend, message, self._global(peer), self.group))
        for peer, rounds in self._takes.items():
            if i < len(rounds):
                message = torch.empty(_size(rounds[i]), dtype=torch.uint8, device=self.device)
                used += len(message)
                arriving.append((rounds[i], message))
                calls.append(dist.P2POp(dist.irecv, message, self._global(peer), self.group))
        self.staging = max(self.staging, used)
        for work in dist.batch_isend_irecv(calls) if calls else ():
            work.wait()
        for slots, message in arriving:
            self._unpacked(slots, message)

    def _global(self, peer: int) -> int:
        return peer if self.group is None else dist.get_global_rank(self.group, peer)

    def _packed(self, slots: Sequence[_Slot]) -> torch.Tensor:
        message = torch.empty(_size(slots), dtype=torch.uint8, device=self.device)
        for slot in slots:
            box = slot.piece.source
            there = message[slot.begin : slot.begin + slot.size].view(dtype_of(box.dtype)).view(box.shape)
            there.copy_(seen(self.sources[box.name], box))
        return message

    def _unpacked(self, slots: Sequence[_Slot], message: torch.Tensor) -> None:
        for slot in slots:
            box, goal = slot.piece.source, slot.piece.target
            values = message[slot.begin : slot.begin + slot.size].view(dtype_of(box.dtype)).view(box.shape)
            there = self.targets[goal.name]
            put(slot.piece, values.to(there.device), seen(there, goal))
            self.received += slot.size


def _size(slots: Sequence[_Slot]) -> int:
    return slots[-1].begin + slots[-1].size
