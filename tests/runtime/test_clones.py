"""Blocks that a target shares with its source.

One disk shares blocks; another refuses.
"""

import errno
import os
import shutil
import subprocess

import numpy as np
import pytest
from attrs import evolve

from tests.runtime.test_execute import code_of, run
from tests.runtime.world import Stored, bits_of, copies, read_target, write_source
from ucpl.runtime import linux
from ucpl.runtime.disk import Disk, use_disk
from ucpl.runtime.moving import CLONE_MIN

BLOCK = 4096
LEFT = CLONE_MIN + 8 * BLOCK  # a last tile that is too short, and the ends of the others
MEMORY = 64 << 20


class Sharing(Disk):
    """A simulated file system that shares blocks or refuses to."""

    def __init__(self, refusal=0):
        self.refusal, self.calls = refusal, []

    def clone(self, source, target, size):
        self.calls.append((source[1], target[1], size))
        if self.refusal:
            raise OSError(self.refusal, os.strerror(self.refusal))
        assert size % BLOCK == source[1] % BLOCK == target[1] % BLOCK == 0
        os.pwrite(target[0], os.pread(source[0], size, source[1]), target[1])


@pytest.fixture
def sharing():
    before = use_disk(disk := Sharing())
    yield disk
    use_disk(before)


def whole_file(tmp_path, off=0):
    """A tensor of slightly more than 3 MiB.

    Its offset in the source equals its offset in the target, plus `off` bytes.
    """
    bits = bits_of("f32", (800_017,), 1)
    probe = write_source(tmp_path / "probe", [Stored("s", ("w",), "f32", bits)])
    run(copies(probe), probe, tmp_path / "first")
    path = tmp_path / "first" / "to_s.pt"
    start = path.read_bytes().index(bits.tobytes()[:64])
    source = write_source(tmp_path / "src", [Stored("s", ("w",), "f32", bits)])
    (extent,) = source.extents.values()
    content = (source.root / "s").read_bytes()
    shift = (start - extent.storage_start + off) % BLOCK
    (source.root / "s").write_bytes(bytes(shift) + content)
    moved = {key: evolve(e, storage_start=e.storage_start + shift) for key, e in source.extents.items()}
    return evolve(source, extents=moved), bits


def test_full_blocks_are_shared_and_the_ends_written(tmp_path, sharing):
    source, bits = whole_file(tmp_path)
    sharing.calls.clear()
    report = run(copies(source), source, tmp_path / "out", memory=MEMORY)
    assert read_target(tmp_path / "out", "to_s.pt")["w"].tobytes() == bits.tobytes()
    assert sum(size for _, _, size in sharing.calls) == report.bytes_cloned > bits.nbytes - LEFT
    assert report.bytes_written + report.bytes_cloned >= report.bytes_target
    assert report.bytes_written < LEFT + BLOCK
    assert report.source_bytes_checked == report.bytes_read == bits.nbytes  # its CRC is still of bytes that were read
    assert report.bytes_read_back >= report.bytes_target


def test_never_is_never(tmp_path, sharing):
    source, bits = whole_file(tmp_path)
    sharing.calls.clear()
    report = run(copies(source), source, tmp_path / "out", memory=MEMORY, reflink=False)
    assert not sharing.calls and report.bytes_cloned == 0
    assert read_target(tmp_path / "out", "to_s.pt")["w"].tobytes() == bits.tobytes()


@pytest.mark.parametrize("off", [64, 2048])
def test_places_that_do_not_agree_are_written(tmp_path, sharing, off):
    source, bits = whole_file(tmp_path, off)
    sharing.calls.clear()
    report = run(copies(source), source, tmp_path / "out", memory=MEMORY)
    assert not sharing.calls and report.bytes_cloned == 0
    assert read_target(tmp_path / "out", "to_s.pt")["w"].tobytes() == bits.tobytes()


REFUSALS = ["EOPNOTSUPP", "EXDEV", "EINVAL", "ENOTTY", "EPERM", "ETXTBSY", "EIO", "ENOSPC"]


@pytest.mark.parametrize("refusal", REFUSALS)
def test_what_is_refused_is_written_and_not_asked_for_again(tmp_path, sharing, refusal):
    source, bits = whole_file(tmp_path)
    sharing.calls.clear()
    sharing.refusal = getattr(errno, refusal)
    report = run(copies(source), source, tmp_path / "out", memory=MEMORY, workers=1)
    assert len(sharing.calls) == 1 and report.bytes_cloned == 0
    assert report.bytes_written >= report.bytes_target
    assert read_target(tmp_path / "out", "to_s.pt")["w"].tobytes() == bits.tobytes()


def test_this_disk_refuses_or_shares(tmp_path):
    """The call itself, on whatever is under the tests."""
    source, bits = whole_file(tmp_path)
    report = run(copies(source), source, tmp_path / "out", memory=MEMORY)
    assert 0 <= report.bytes_cloned <= bits.nbytes
    assert read_target(tmp_path / "out", "to_s.pt")["w"].tobytes() == bits.tobytes()


def test_a_block_that_is_another_than_the_one_that_was_read_is_found(tmp_path, sharing):
    """The read-back is compared with the bytes read.

    It is not compared with the shared blocks.
    """
    source, _ = whole_file(tmp_path)
    genuine = sharing.clone

    def other(here, there, size):
        genuine(here, there, size)
        os.pwrite(there[0], bytes(64), there[1] + 512)

    sharing.clone = other
    assert code_of(lambda: run(copies(source), source, tmp_path / "out", memory=MEMORY)) == "E505"


@pytest.mark.parametrize("kind", ["btrfs", "xfs"])
def test_a_real_file_system_shares_blocks(tmp_path, kind):
    """A mounted image of its own; needs root and the tools."""
    tool = shutil.which(f"mkfs.{kind}")
    if os.getuid() or tool is None:
        pytest.skip(f"this needs root and mkfs.{kind}")
    image, top = tmp_path / "image", tmp_path / "mounted"
    top.mkdir()
    with image.open("wb") as file:
        file.truncate(320 << 20)
    subprocess.run([tool, "-q", image], check=True, capture_output=True)
    if subprocess.run(["mount", "-o", "loop", image, top], capture_output=True).returncode:
        pytest.skip("nothing can be mounted here")
    try:
        source, bits = whole_file(top)
        report = run(copies(source), source, top / "out", memory=MEMORY)
        assert read_target(top / "out", "to_s.pt")["w"].tobytes() == bits.tobytes()
        assert report.bytes_cloned > bits.nbytes - LEFT
        with (source.root / "s").open("r+b") as file:  # a block that is shared is changed on one side alone
            file.write(bytes(1 << 20))
        assert read_target(top / "out", "to_s.pt")["w"].tobytes() == bits.tobytes()
    finally:
        subprocess.run(["umount", top], check=True)


def test_a_range_that_is_no_full_block_is_refused_by_the_kernel(tmp_path):
    (tmp_path / "a").write_bytes(np.arange(BLOCK, dtype="u1").tobytes())
    with (tmp_path / "a").open("rb") as one, (tmp_path / "b").open("wb") as other, pytest.raises(OSError):
        linux.clone_range((one.fileno(), 1), (other.fileno(), 0), 10)
