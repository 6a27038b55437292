"""Tensors that lie on a device, a bucket at a time: one is on its way into page-locked memory while the CPU copies and digests
the one before. Of those that lie in memory nothing is staged.

Untried on a GPU: `Cuda` is what is asked of one, and everything else is tried with a stand-in that copies late.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch
from attrs import field

from ucpl.live.tensors import flat_bytes, memory_of
from ucpl.records import define, frozen

__all__ = ["BUCKET", "Cuda", "Lane", "Stages", "lane_of"]

BUCKET = 32 << 20  # bytes that are on their way at once
ROOMS = 2  # one that is filled, one that is read


class Copying(Protocol):
    """Copies that were begun."""

    def synchronize(self) -> None:
        """Wait until they are done."""
        ...


class Lane(Protocol):
    """How bytes come from one device."""

    def room(self, size: int) -> torch.Tensor:
        """Bytes of the CPU's memory that the device writes into by itself."""
        ...

    def begin(self, parts: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Copying:
        """Copy bytes of the device, each into its place of a room, once what computes them is done."""
        ...


class Cuda:
    """A stream beside the one that trains."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def room(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def begin(self, parts: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Copying:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._stream):
            for source, into in parts:
                into.copy_(source, non_blocking=True)
            done.record(self._stream)
        return done


def lane_of(device: torch.device) -> Lane | None:
    """None: what lies there is taken as it lies, or brought here as a whole, where it is no GPU of NVIDIA's or AMD's."""
    return Cuda(device) if device.type == "cuda" else None


@frozen(eq=False)
class _Part:
    """Bytes [low, high) of a tensor, of one bucket."""

    tensor: int  # its number
    low: int
    high: int
    at: int  # in the bucket's room


@define(eq=False)
class Stages:
    """Rooms of each device, which are used from save to save: page-locked memory is expensive to get."""

    lane_of: Callable[[torch.device], Lane | None] = lane_of
    bucket: int = BUCKET
    _lanes: dict[torch.device, tuple[Lane, list[torch.Tensor]] | None] = field(factory=dict)

    def _of(self, device: torch.device) -> tuple[Lane, list[torch.Tensor]] | None:
        if device not in self._lanes:
            lane = self.lane_of(device)
            self._lanes[device] = (lane, [lane.room(self.bucket) for _ in range(ROOMS)]) if lane is not None else None
        return self._lanes[device]

    def staged(self, data: Sequence[bytes | torch.Tensor]) -> Iterator[tuple[int, memoryview]]:
        """(number, bytes) in their order, of what is large in several parts, each to be used before the next is asked for."""
        device, some = None, [0, 0]
        for end, one in enumerate(data):  # runs of tensors of one device
            here = one.device if isinstance(one, torch.Tensor) and self._of(one.device) is not None else None
            if here != device:
                yield from self._run(device, data, range(some[0], end))
                device, some = here, [end, end]
        yield from self._run(device, data, range(some[0], len(data)))

    def _run(
        self, device: torch.device | None, data: Sequence[bytes | torch.Tensor], some: range
    ) -> Iterator[tuple[int, memoryview]]:
        known = self._of(device) if device is not None else None
        if known is None:
            yield from ((number, _near(data[number])) for number in some)
            return
        lane, rooms = known
        flat = {number: flat_bytes(one) for number in some if isinstance(one := data[number], torch.Tensor)}
        buckets = self._cut(flat)
        begun: list[Copying] = []

        def begin(number: int) -> None:
            if number < len(buckets):
                room = rooms[number % ROOMS]
                parts = [(flat[p.tensor][p.low : p.high], room[p.at : p.at + p.high - p.low]) for p in buckets[number]]
                begun.append(lane.begin(parts))

        begin(0)
        for number, parts in enumerate(buckets):
            begin(number + 1)
            begun[number].synchronize()
            view: memoryview = memory_of(rooms[number % ROOMS])
            for part in parts:
                yield part.tensor, view[part.at : part.at + part.high - part.low]

    def _cut(self, flat: dict[int, torch.Tensor]) -> list[list[_Part]]:
        """Tensors end to end, cut where a bucket is full."""
        buckets: list[list[_Part]] = []
        free = 0
        for number, tensor in flat.items():
            low = 0
            while low < len(tensor):
                if not free:
                    buckets.append([])
                    free = self.bucket
                high = min(len(tensor), low + free)
                buckets[-1].append(_Part(number, low, high, self.bucket - free))
                free -= high - low
                low = high
        return buckets


def _near(data: bytes | torch.Tensor) -> memoryview:
    """Bytes as they are in memory; those on another device are brought here first."""
    return memoryview(data) if isinstance(data, bytes) else memory_of(data)
