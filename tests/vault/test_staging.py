"""Tensors of a device, in buckets: a stand-in for a GPU, which copies as late as it may, and never before it is waited for."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from attrs import define, field

from ucpl.vault.arenas import Arenas
from ucpl.vault.files import ToSave
from ucpl.vault.staging import ROOMS, Stages

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

    def room(self, size: int) -> torch.Tensor:
        self.rooms += 1
        return torch.full((size,), GARBAGE, dtype=torch.uint8)

    def begin(self, parts: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Copies:
        for _, into in parts:
            into.fill_(GARBAGE)  # what was there is not to be read any more
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


@pytest.mark.parametrize("bucket", [1, 7, 64, 1000, 1 << 20])
def test_what_is_staged_is_what_lies_there(tmp_path, bucket):
    lane = Late()
    arenas = Arenas(Stages(lambda device: lane, bucket))
    plain = Arenas().write(tmp_path / "plain", saved(tensors()))
    for _ in range(2):  # rooms are used from save to save
        assert arenas.write(tmp_path / "staged", saved(tensors())) == plain
        assert (tmp_path / "staged").read_bytes() == (tmp_path / "plain").read_bytes()
    assert lane.rooms == ROOMS


def test_one_bucket_is_on_its_way_while_the_one_before_is_read(tmp_path):
    lane = Late()
    some = [torch.arange(100, dtype=torch.uint8), torch.arange(50, dtype=torch.uint8)]
    Arenas(Stages(lambda device: lane, 64)).write(tmp_path / "arena", saved(some))
    assert lane.told == ["began 0", "began 1", "waited for 0", "began 2", "waited for 1", "waited for 2"]


def test_tensors_in_memory_lie_between_those_of_a_device():
    """Each kind where it lies, in the order of the arena."""
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
