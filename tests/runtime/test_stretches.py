"""Small neighbours, moved, written and read back at once.

The bytes and the checks are the same.
"""

from __future__ import annotations

import os
import traceback
from pathlib import Path

import pytest

from tests.runtime.recorder import reordered_states
from tests.runtime.test_crashes import content, recorded, run, tried
from tests.runtime.world import Stored, bits_of, copies, write_source
from ucpl.errors import UcplError
from ucpl.files.checkpoint import Checkpoint
from ucpl.files.torch_files import read_torch_file
from ucpl.planning import Plan
from ucpl.runtime import read_back, stretches, targets
from ucpl.runtime.disk import Disk, use_disk
from ucpl.runtime.failpoints import set_failpoints

COUNT = 90
LARGE = (40, 41)  # numbers of tensors that are in no stretch


class Counting(Disk):
    """Counts reads and writes of a target's files."""

    def __init__(self) -> None:
        self.reads = self.writes = 0

    def read(self, fd, views, position):
        self.reads += 1
        return super().read(fd, views, position)

    def write(self, fd, view, position):
        self.writes += 1
        return super().write(fd, view, position)


@pytest.fixture(params=["crc", "no crc", "touching"])
def world(tmp_path: Path, request: pytest.FixtureRequest) -> tuple[Checkpoint, Plan]:
    """Small tensors in two files, with two large ones among them."""
    tensors = [
        Stored("ab"[n > 20], (f"t{n}",), "f32", bits_of("f32", (3_000 if n in LARGE else 1 + n % 40,), n))
        for n in range(COUNT)
    ]
    # Tensors touch in safetensors; in other files, some bytes are between them.
    source = write_source(tmp_path / "src", tensors, crc=request.param == "crc", gaps=request.param != "touching")
    return source, copies(source)


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch):
    """Switch the joining of neighbours off, and on again."""

    def switch(*, on: bool) -> None:
        for room in (stretches, targets):
            monkeypatch.setattr(room, "MANY", 16 if on else 1 << 40)
        monkeypatch.setattr(targets, "NEAR", 4096 if on else -1)

    return switch


def test_neighbours_have_the_same_bytes_as_each_alone(world, tmp_path: Path, alone, request) -> None:
    source, plan = world
    alone(on=False)
    many = Counting()
    use_disk(many)
    one = run(plan, source, tmp_path / "alone")
    alone(on=True)
    few = Counting()
    use_disk(few)
    other = run(plan, source, tmp_path / "together")
    use_disk(Disk())
    assert content(tmp_path / "together") == content(tmp_path / "alone")
    assert (one.tiles, one.bytes_written, one.bytes_read_back, one.bytes_read) == (
        other.tiles, other.bytes_written, other.bytes_read_back, other.bytes_read,
    )  # fmt: skip
    assert other.source_bytes_checked == one.source_bytes_checked
    assert few.writes <= many.writes / 3, (few.writes, many.writes)
    part = 10 if "touching" in request.node.name else 2  # each tensor of the source is read once, or all at once
    assert few.reads <= many.reads / part, (few.reads, many.reads)


@pytest.mark.parametrize(
    "place", ["tile-written:60", "target-write:3", "journal-before:1", "journal-synced:1", "synced:1"]
)
def test_an_interrupted_run_is_resumed(world, tmp_path: Path, place: str) -> None:
    source, plan = world
    run(plan, source, tmp_path / "wanted")
    set_failpoints(f"{place}:interrupt")
    try:
        with pytest.raises(UcplError) as caught:
            run(plan, source, tmp_path / "out")
    finally:
        set_failpoints("")
    assert caught.value.diagnostics[0].code == "E620"
    run(plan, source, tmp_path / "out", resume=True)
    assert content(tmp_path / "out") == content(tmp_path / "wanted")


def test_a_stretch_survives_a_power_loss_in_any_order(world, tmp_path: Path) -> None:
    recorder, wanted = recorded(world, tmp_path)
    for crash in reordered_states(recorder, draws=1, ones=False):
        tried(crash, world, tmp_path / "crash", wanted)


def test_damage_of_one_small_tensor_is_found(world, tmp_path: Path) -> None:
    source, plan = world
    extent = source.extents["b", ("t60",)]
    path = source.root / "b"
    data = bytearray(path.read_bytes())
    data[extent.storage_start] ^= 1
    path.write_bytes(data)
    if extent.crc is None:
        run(plan, source, tmp_path / "out")
        return
    with pytest.raises(UcplError) as caught:
        run(plan, source, tmp_path / "out")
    assert caught.value.diagnostics[0].code == "E612"
    assert caught.value.diagnostics[0].labels[0].where == extent.storage


class Flipping(Disk):
    """Flip a bit of the target as it is read back."""

    def __init__(self, at: int) -> None:
        self.at = at

    def read(self, fd, views, position):
        got = super().read(fd, views, position)
        is_read_back = any(frame.filename == read_back.__file__ for frame in traceback.extract_stack())
        is_of_target = "/tree/to_b" in os.readlink(f"/proc/self/fd/{fd}")
        if is_read_back and is_of_target and position <= self.at < position + got:
            views[0][self.at - position] ^= 1
        return got


@pytest.mark.parametrize("what", ["tile", "known bytes"])
def test_a_flipped_bit_between_neighbours_is_found_at_the_read_back(world, tmp_path: Path, what: str) -> None:
    source, plan = world
    run(plan, source, tmp_path / "good")
    start = next(e.storage_start for e in read_torch_file(tmp_path / "good", "to_b.pt").extents() if e.key == ("t60",))
    at = start if what == "tile" else start - 1  # the padding in front of it
    use_disk(Flipping(at))
    try:
        with pytest.raises(UcplError) as caught:
            run(plan, source, tmp_path / "out")
    finally:
        use_disk(Disk())
    assert caught.value.diagnostics[0].code == "E505"
