"""Device tensors in buckets, with a stand-in for a GPU.

It copies as late as allowed, and never before someone waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

import pytest
import torch
from attrs import define, field

from ucpl.vault.arenas import Arenas
from ucpl.vault.files import ToSave
from ucpl.vault.staging import ROOMS, Cuda, Stages

GARBAGE = 0xEE


@define(eq=False)
class Copies:
    """Copies that were begun, which are made when they are waited for."""

    lane: Late
    parts: Sequence[tuple[torch.Tensor, torch.Tensor]]
    number: int

    def synchronize(self) -> None:
        for source, into in self.parts:
            into.copy_(source)
        self.lane.told.append(f"waited for {self.number}")


@define(eq=False)
class Late:
    """A device whose copies are garbage until they are done."""

    rooms: int = 0
    count: int = 0
    told: list[str] = field(factory=list)
    pins: bool = True
    lost: bool = False  # pages that are pinned are the file's no more
    pinned: list[torch.Tensor] = field(factory=list)

    def pin(self, memory: torch.Tensor) -> bool:
        assert not any(memory is one for one in self.pinned)
        if self.pins:
            self.pinned.append(memory)
            self.told.append("pinned")
        self.lost = False
        return self.pins

    def unpin(self, memory: torch.Tensor) -> None:
        self.pinned = [one for one in self.pinned if one is not memory]
        self.told.append("let go")

    def reaches(self, memory: torch.Tensor) -> bool:
        return not self.lost

    def room(self, size: int) -> torch.Tensor:
        self.rooms += 1
        return torch.full((size,), GARBAGE, dtype=torch.uint8)

    def begin(self, parts: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Copies:
        for _, into in parts:
            into.fill_(GARBAGE)  # the old bytes must not be read any more
        made = Copies(self, parts, self.count)
        self.told.append(f"began {self.count}")
        self.count += 1
        return made


def tensors() -> list[torch.Tensor]:
    """Of many sizes and types: with gaps, without elements, without dims."""
    found = [torch.arange(n, dtype=torch.int16) + i for i, n in enumerate((1, 31, 32, 33, 100, 5, 1))]
    found += [
        torch.arange(60.0).view(6, 10)[:, ::3],
        torch.tensor(2.5, dtype=torch.bfloat16),
        torch.arange(40.0).view(5, 8).T,
    ]
    return [*found, torch.empty(0, 3)]


def saved(some: list[torch.Tensor]) -> list[ToSave]:
    """Two files of them, with bytes that are known between."""
    files = []
    for name, mine in (("a", some[:4]), ("b", some[4:])):
        at, fixed, held = 0, [], []
        for i, tensor in enumerate(mine):
            fixed.append((at, f"{name}{i}".encode()))
            if tensor.numel():
                held.append((at + 2, str(i), tensor))
            at += 2 + tensor.nbytes
        files.append(ToSave(name, at, tuple(fixed), tuple(held)))
    return files


def arenas_of(lane: Late, bucket: int = 64, kind: str = "tmpfs") -> Arenas:
    return Arenas(Stages(lambda device: lane, bucket), lambda path: kind)


@pytest.mark.parametrize("kind, pins", [("ext4", True), ("tmpfs", False), ("tmpfs", True)])
@pytest.mark.parametrize("bucket", [1, 7, 64, 1000, 1 << 20])
def test_staged_bytes_are_the_bytes_of_the_tensor(tmp_path, bucket, kind, pins):
    lane = Late(pins=pins)
    arenas = arenas_of(lane, bucket, kind)
    plain = Arenas().write(tmp_path / "plain", saved(tensors()))
    for _ in range(2):  # rooms are used from save to save
        assert arenas.write(tmp_path / "staged", saved(tensors())) == plain
        assert (tmp_path / "staged").read_bytes() == (tmp_path / "plain").read_bytes()
        size, digested = arenas.copy(tmp_path / "staged", saved(tensors()))
        assert digested() == plain
        assert (tmp_path / "staged").read_bytes()[:size] == (tmp_path / "plain").read_bytes()
    assert (lane.rooms, len(lane.pinned)) == ((0, 1) if kind == "tmpfs" and pins else (ROOMS, 0))


def test_all_is_on_its_way_to_pinned_memory_at_once_and_waited_for_once(tmp_path):
    lane = Late()
    arenas = arenas_of(lane)
    arenas.copy(tmp_path / "arena", saved(tensors()))
    assert lane.told == ["pinned", "began 0", "waited for 0"]
    arenas.close()
    assert lane.told[3:] == ["let go"]
    assert not lane.pinned


def test_a_save_that_ends_early_leaves_no_copy_under_way():
    lane = Late()
    data: list[bytes | torch.Tensor] = [b"one", torch.arange(10, dtype=torch.uint8)]
    placed = Stages(lambda device: lane, 4).placed(data, torch.zeros(13, dtype=torch.uint8))
    next(placed)
    assert lane.told == ["began 0"]
    placed.close()
    assert lane.told == ["began 0", "waited for 0"]


def test_pinned_memory_is_unpinned_before_its_address_is_reused(tmp_path):
    """A file that replaced another, and one that was truncated and extended."""
    lane = Late()
    arenas, arena = arenas_of(lane), tmp_path / "arena"
    arenas.copy(arena, saved(tensors()))
    arena.rename(tmp_path / "gone")
    arenas.copy(arena, saved(tensors()))
    assert [one for one in lane.told if one in ("pinned", "let go")] == ["pinned", "let go", "pinned"]
    lane.lost = True
    arenas.copy(arena, saved(tensors()))
    assert [one for one in lane.told if one in ("pinned", "let go")][3:] == ["let go", "pinned"]
    assert arena.read_bytes() == (tmp_path / "gone").read_bytes()
    lane.lost, lane.pins = True, False  # and now it cannot be pinned any more
    arenas.copy(arena, saved(tensors()))
    assert arena.read_bytes() == (tmp_path / "gone").read_bytes()
    assert (lane.rooms, lane.pinned) == (ROOMS, [])


def test_one_bucket_is_on_its_way_while_the_one_before_is_read(tmp_path):
    lane = Late()
    some = [torch.arange(100, dtype=torch.uint8), torch.arange(50, dtype=torch.uint8)]
    arenas_of(lane, kind="ext4").write(tmp_path / "arena", saved(some))
    assert lane.told == ["began 0", "began 1", "waited for 0", "began 2", "waited for 1", "waited for 2"]


def test_tensors_in_memory_lie_between_those_of_a_device():
    """Each kind in its place, in the order of the arena."""
    lane = Late()
    data: list[bytes | torch.Tensor] = [
        b"one",
        torch.arange(10, dtype=torch.uint8),
        b"two",
        torch.arange(9, dtype=torch.uint8),
    ]
    stages = Stages(lambda device: lane, 4)
    found: dict[int, bytes] = {}
    for number, part in stages.staged(data):
        found[number] = found.get(number, b"") + bytes(part)
    assert list(found) == [0, 1, 2, 3]
    assert found == {0: b"one", 1: bytes(range(10)), 2: b"two", 3: bytes(range(9))}
    assert [number for number, _ in Stages().staged(data)] == [0, 1, 2, 3]


@pytest.mark.parametrize("code", [0, 712])
def test_what_is_asked_of_cuda(monkeypatch, code):
    """Streams, events and the runtime of torch.cuda are stand-ins.

    An error is reported again to the next kernel.
    """
    asked: list[tuple[object, ...]] = []

    class Event:
        def record(self, stream: object) -> None:
            asked.append(("recorded",))

        def synchronize(self) -> None:
            asked.append(("waited",))

    class Stream(Event):
        def __init__(self, device: torch.device) -> None: ...

        def wait_stream(self, other: object) -> None:
            asked.append(("behind", other))

    class Runtime:
        def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
            asked.append(("register", address, size, flags))
            return code

        def cudaHostUnregister(self, address: int) -> int:
            asked.append(("unregister", address))
            return 0

    def reported(*_: object, **__: object) -> torch.Tensor:
        asked.append(("reported",))
        raise RuntimeError("CUDA error: part or all of the requested memory range is already mapped")

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "what trains")
    monkeypatch.setattr(torch.cuda, "cudart", Runtime)
    lane, memory = Cuda(torch.device("cpu")), torch.zeros(100, dtype=torch.uint8)
    with monkeypatch.context() as within:
        within.setattr(torch, "ones", reported)
        assert lane.pin(memory) == (not code)
    assert asked == [("register", memory.data_ptr(), 100, 1), *([("reported",)] if code else [])]
    asked.clear()
    assert lane.reaches(memory)
    assert memory[:92].eq(0).all()
    assert asked == [("behind", "what trains"), ("recorded",), ("waited",)]
    lane.unpin(memory)
    assert asked[3:] == [("waited",), ("unregister", memory.data_ptr())]
