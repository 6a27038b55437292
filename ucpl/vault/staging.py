"""Copies of device tensors into an arena.

If the driver has pinned the pages of the arena, the device writes into them directly. Otherwise the bytes come in
buckets: one bucket is on its way into page-locked memory, while the CPU copies and digests the previous one. Tensors in
CPU memory need no staging. `Cuda` is the only interface to a GPU; tests replace it by a class that copies late.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import suppress
from typing import Protocol

import torch
from attrs import field

from ucpl.live.tensors import address_of, flat_bytes, memory_of, tensor_of
from ucpl.records import define, frozen

__all__ = ["BUCKET", "Cuda", "DeviceLane", "Stages", "lane_of"]

BUCKET = 32 << 20  # bytes that are on their way at once
ROOMS = 2  # one that is filled, one that is read
_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every device of the process
_TOKEN = 8  # bytes


class Copying(Protocol):
    """Copies in progress."""

    def synchronize(self) -> None:
        """Wait until they are done."""
        ...


class DeviceLane(Protocol):
    """The path of bytes from one device."""

    def room(self, size: int) -> torch.Tensor:
        """CPU memory that the device writes into directly."""
        ...

    def begin(self, parts: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Copying:
        """Start the copy of each device tensor into its place.

        The copy begins after the pending computation of the tensors.
        """
        ...

    def pin(self, memory: torch.Tensor) -> bool:
        """Let the device write directly into mapped memory; False if impossible."""
        ...

    def unpin(self, memory: torch.Tensor) -> None:
        """Undo `pin` before the memory is unmapped.

        Another mapping may get the same addresses.
        """
        ...

    def reaches(self, memory: torch.Tensor) -> bool:
        """True if the CPU sees the bytes that the device writes.

        It is tested at the end of the pinned memory. If another process has truncated and extended the file, the pinned
        pages belong to no file.
        """
        ...


class Cuda:
    """A CUDA stream next to the stream of the training."""

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

    def pin(self, memory: torch.Tensor) -> bool:
        with suppress(RuntimeError, AttributeError), torch.cuda.device(self._device):
            runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            if not int(runtime.cudaHostRegister(address_of(memory), len(memory), _PORTABLE)):
                return True
            # CUDA reports a failure a second time, to the kernel that is launched next: that is this one.
            torch.ones(1, device=self._device)
        return False

    def unpin(self, memory: torch.Tensor) -> None:
        with suppress(RuntimeError, AttributeError):  # of a child that was forked, or of a process that ends
            runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            self._stream.synchronize()
            runtime.cudaHostUnregister(address_of(memory))

    def reaches(self, memory: torch.Tensor) -> bool:
        end = memory[-_TOKEN:]
        token = tensor_of(bytearray(os.urandom(len(end))), torch.uint8, (len(end),))
        self.begin([(token.to(self._device), end)]).synchronize()
        return torch.equal(end, token)


def lane_of(device: torch.device) -> DeviceLane | None:
    """The lane of a device.

    None: its tensors are used in place or copied at once.

    Devices with a lane are GPUs of NVIDIA and AMD.
    """
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
    """The lanes of all devices, with their staging memory.

    The memory is reused, because page-locked memory is expensive to allocate.
    """

    lane_of: Callable[[torch.device], DeviceLane | None] = lane_of
    bucket: int = BUCKET
    _lanes: dict[torch.device, DeviceLane | None] = field(factory=dict)
    _rooms: dict[torch.device, list[torch.Tensor]] = field(factory=dict)

    def lane(self, data: bytes | torch.Tensor) -> DeviceLane | None:
        """The lane of a tensor's device; None if it needs none."""
        if not isinstance(data, torch.Tensor):
            return None
        if data.device not in self._lanes:
            self._lanes[data.device] = self.lane_of(data.device)
        return self._lanes[data.device]

    def staged(self, data: Sequence[bytes | torch.Tensor]) -> Iterator[tuple[int, memoryview]]:
        """(number, bytes) of the data in order, large data in parts.

        Use each part before you request the next.
        """
        device, some = None, [0, 0]
        for end, one in enumerate(data):  # runs of tensors of one device
            here = one.device if isinstance(one, torch.Tensor) and self.lane(one) is not None else None
            if here != device:
                yield from self._run(device, data, range(some[0], end))
                device, some = here, [end, end]
        yield from self._run(device, data, range(some[0], len(data)))

    def placed(
        self, data: Sequence[bytes | torch.Tensor], into: torch.Tensor
    ) -> Generator[tuple[int, memoryview | int], None, None]:
        """The same for devices that write directly into the arena.

        For their data the second value is the number of bytes. All copies start before the first wait, and all have
        ended when this ends.
        """
        parts: dict[torch.device, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        at = 0
        for one in data:
            size = len(one) if isinstance(one, bytes) else one.numel() * one.element_size()
            if isinstance(one, torch.Tensor) and self.lane(one) is not None:
                parts.setdefault(one.device, []).append((flat_bytes(one), into[at : at + size]))
            at += size
        begun: list[Copying] = []
        try:
            for device, some in parts.items():
                lane = self._lanes[device]
                assert lane is not None
                begun.append(lane.begin(some))
            for number, one in enumerate(data):
                if isinstance(one, bytes) or self.lane(one) is None:
                    yield number, _near(one)
                    continue
                while begun:
                    begun.pop().synchronize()
                yield number, one.numel() * one.element_size()
        finally:
            for left in begun:
                left.synchronize()

    def _run(
        self, device: torch.device | None, data: Sequence[bytes | torch.Tensor], some: range
    ) -> Iterator[tuple[int, memoryview]]:
        lane = self._lanes[device] if device is not None else None
        if device is None or lane is None:
            yield from ((number, _near(data[number])) for number in some)
            return
        if device not in self._rooms:
            self._rooms[device] = [lane.room(self.bucket) for _ in range(ROOMS)]
        rooms = self._rooms[device]
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
    """Bytes in CPU memory.

    Those on another device are copied first.
    """
    return memoryview(data) if isinstance(data, bytes) else memory_of(data)
