"""Real disks that are full, read-only, or out of files.

They are small file systems, mounted if the user is root.

Each in a process with mounts of its own. A sample of sizes by default, all of them with UCPL_FAULTS=all (`make faults`).
"""

from __future__ import annotations

import ctypes
import os
import random
import resource
import shutil
import subprocess
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.command import FIXTURES, digest, good, ucpl
from ucpl.language import parse

ALL = os.environ.get("UCPL_FAULTS") == "all"
CLONE_NEWNS = 0x20000
NOBODY = 65534


def sampled(values: range, count: int = 2) -> list[int]:
    return list(values) if ALL else random.Random(len(values)).sample(values, count)


def apart(work: Callable[[], None]) -> None:
    """In a fork.

    Its exceptions, such as failed assertions, fail here.
    """
    out, into = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            work()
            os.write(into, b"done")
        except BaseException:
            os.write(into, traceback.format_exc().encode()[-60_000:])
        finally:
            os._exit(0)
    os.close(into)
    with open(out, encoding="utf-8") as told:
        said = told.read()
    os.waitpid(pid, 0)
    assert said == "done", said


def own_mounts() -> None:
    """Mounts that nobody else sees, gone with this process. Raises: OSError, CalledProcessError."""
    if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNS) != 0:
        raise OSError(ctypes.get_errno(), "no mounts of our own")
    subprocess.run(["mount", "--make-rprivate", "/"], check=True, capture_output=True)


def mount(*arguments: object) -> None:
    subprocess.run(["mount", *map(str, arguments)], check=True, capture_output=True)


def can_mount() -> bool:
    with tempfile.TemporaryDirectory() as name:

        def tried() -> None:
            own_mounts()
            (Path(name) / "there").mkdir()
            mount("-t", "tmpfs", "none", Path(name) / "there")

        try:
            apart(tried)
        except AssertionError:
            return False
    return True


mounts = pytest.mark.skipif(os.geteuid() != 0 or not can_mount(), reason="file systems cannot be mounted here")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return Path(shutil.copytree(FIXTURES / "z1_dp2_sgdm", tmp_path / "src"))


class Case:
    """A conversion into `place`, its expected end, and another text."""

    def __init__(self, source: Path, tmp_path: Path) -> None:
        self.source, self.place = source, tmp_path / "place"
        self.place.mkdir()
        self.command = ("convert", source, self.place / "out", "--to", "zero1(dp=3)", "--workers", "1")
        good("convert", source, tmp_path / "wanted", "--to", "zero1(dp=3)")
        self.wanted, self.before = digest(tmp_path / "wanted"), digest(source)

    def refused(self, *more: object, codes: tuple[str, ...] = ("E501", "E503")) -> None:
        """It cannot be written, and is not there.

        A text is complete, or the old one is in its place.
        """
        done = ucpl(*self.command, *more)
        if done.status == 0:  # it had room
            assert digest(self.place / "out") == self.wanted
            shutil.rmtree(self.place / "out")
            return
        assert done.status == 4 and any(code in done.err for code in codes) and str(self.place) in done.err, done
        assert "= help:" in done.err and not (self.place / "out").exists()
        assert digest(self.source) == self.before
        text = self.place / "text"
        done = ucpl("infer", self.source, "-o", text)
        assert done.status in (0, 4) and text.exists() == (done.status == 0), done

    def ends_well(self, *more: object) -> None:
        good(*self.command, "--resume", *more)
        assert digest(self.place / "out") == self.wanted and digest(self.source) == self.before
        assert sorted(p.name for p in self.place.iterdir() if p.name not in ("text", "ballast", "lost+found")) == [
            "out"
        ]
        good("verify", self.place / "out")


@pytest.fixture
def case(source: Path, tmp_path: Path) -> Case:
    return Case(source, tmp_path)


@mounts
@pytest.mark.parametrize("size", sampled(range(8, 240, 8)))
def test_a_tmpfs_that_is_full(case: Case, tmp_path: Path, size: int) -> None:
    def work() -> None:
        own_mounts()
        mount("-t", "tmpfs", "-o", f"size={size}K", "none", case.place)
        case.refused()
        mount("-o", "remount,size=64M", case.place)
        case.ends_well()

    apart(work)


@pytest.mark.fault("Every system call", "a tmpfs of 2 to 15 inodes", "the same")
@mounts
@pytest.mark.parametrize("inodes", sampled(range(2, 16)))
def test_a_file_system_with_no_room_for_one_name_more(case: Case, tmp_path: Path, inodes: int) -> None:
    def work() -> None:
        own_mounts()
        mount("-t", "tmpfs", "-o", f"size=64M,nr_inodes={inodes}", "none", case.place)
        case.refused(codes=("E503",))
        mount("-o", "remount,nr_inodes=1000", case.place)
        case.ends_well()

    apart(work)


def on_ext4(case: Case, tmp_path: Path) -> None:
    image = tmp_path / "image"
    with image.open("wb") as file:
        file.truncate(8 << 20)
    subprocess.run(["mkfs.ext4", "-q", "-m", "0", str(image)], check=True, capture_output=True)
    own_mounts()
    mount("-o", "loop", image, case.place)


def ballast(place: Path, left: int) -> Path:
    """All but `left` KiB of the free room."""
    path = place / "ballast"
    free = os.statvfs(place)
    with path.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, free.f_bavail * free.f_frsize - (left << 10))
    return path


@pytest.mark.fault(
    "Every system call", "a full tmpfs or ext4", "status 4, no target; with room, `--resume` writes the same bytes"
)
@mounts
@pytest.mark.skipif(shutil.which("mkfs.ext4") is None, reason="no mkfs.ext4")
@pytest.mark.parametrize("left", sampled(range(8, 232, 8)))
def test_an_ext4_that_is_full(case: Case, tmp_path: Path, left: int) -> None:
    def work() -> None:
        on_ext4(case, tmp_path)
        there = ballast(case.place, left)
        case.refused()
        there.unlink()
        case.ends_well()

    apart(work)


@pytest.mark.fault("Every system call", "a read-only target, another user's folder", "status 4, nothing changed")
@mounts
def test_a_target_that_is_read_only(case: Case, tmp_path: Path) -> None:
    def work() -> None:
        own_mounts()
        mount("-t", "tmpfs", "none", case.place)
        mount("-o", "remount,ro", case.place)
        case.refused(codes=("E503",))
        case.refused("--force", codes=("E503",))
        mount("-o", "remount,rw", case.place)
        case.ends_well()

    apart(work)


@pytest.mark.fault("Every system call", "a read-only source", "done: nothing is written there")
@mounts
def test_a_source_that_is_read_only_is_enough(case: Case, tmp_path: Path) -> None:
    def work() -> None:
        own_mounts()
        mount("--bind", case.source, case.source)
        mount("-o", "remount,bind,ro", case.source)
        case.ends_well()

    apart(work)


@pytest.mark.fault(
    "Every system call", "a limit of file sizes (`ulimit -f`)", "status 4; without the limit, the same bytes"
)
@pytest.mark.parametrize("most", sampled(range(1, 90, 4)))
def test_files_of_a_limited_size(case: Case, tmp_path: Path, most: int) -> None:
    """RLIMIT_FSIZE, as `ulimit -f` sets it: EFBIG, or no signal."""

    def work() -> None:
        hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        resource.setrlimit(resource.RLIMIT_FSIZE, (most << 10, hard))
        case.refused(codes=("E503",))
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        case.ends_well()

    apart(work)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs to become somebody else")
def test_a_folder_that_is_somebody_elses(case: Case) -> None:
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o755)
        source = Path(shutil.copytree(case.source, Path(name) / "src"))
        case = Case(source, Path(name))
        # Import the modules of errors, and the parser: neither the interpreter nor our cache of trees may be open to others.
        assert ucpl("convert", source, case.place, "--to", "plain()").status == 4
        parse("ucpl 1\n", "anew")

        def work() -> None:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            case.refused(codes=("E503",))

        apart(work)
