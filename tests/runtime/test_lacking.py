"""File systems that lack a call.

The run works without each call, and reports each guarantee that it then loses.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from tests.runtime.test_crashes import content, run, the_disk  # noqa: F401  (a fixture for every test)
from tests.runtime.world import Stored, bits_of, copies, write_source
from ucpl.errors import UcplError
from ucpl.runtime.disk import Disk, use_disk
from ucpl.runtime.linux import kind_of, network_remark

REFUSALS = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.ENOLCK)


class Lacking(Disk):
    """Refuses some kinds of call, always."""

    def __init__(self, error: int, *lacks: str) -> None:
        self.error, self.lacks = error, lacks

    def _refuse(self, what: str) -> None:
        if what in self.lacks:
            raise OSError(self.error, os.strerror(self.error))

    def lock_file(self, fd):
        self._refuse("lock")
        super().lock_file(fd)

    def lock_range(self, fd):
        self._refuse("lock_range")
        super().lock_range(fd)

    def forget(self, fd, position, size):
        self._refuse("forget")
        super().forget(fd, position, size)

    def sync(self, fd, *, data_only=False):
        self._refuse("data_only" if data_only else "folder" if os.path.isdir(f"/proc/self/fd/{fd}") else "sync")
        super().sync(fd, data_only=data_only)

    def exchange(self, one, other):
        return False if "exchange" in self.lacks else super().exchange(one, other)


@pytest.fixture
def world(tmp_path):
    source = write_source(tmp_path / "src", [Stored("a", ("a",), "f32", bits_of("f32", (3000,), 1))])
    return source, copies(source)


@pytest.mark.fault(
    "Every system call",
    "flock, fadvise, fdatasync, sync of folders or exchange refused by the file system",
    "the same bytes; a remark names each lost guarantee",
)
@pytest.mark.parametrize("error", REFUSALS, ids=errno.errorcode.get)
@pytest.mark.parametrize(
    ("lacks", "said"),
    [(("lock",), ""), (("lock", "lock_range"), "no lock is to be had"), (("forget",), "may have come from memory"),
     (("data_only",), ""), (("folder",), ""), (("exchange",), ""),
     (("lock", "lock_range", "forget", "data_only", "folder", "exchange"), "no lock is to be had")],
    ids=lambda lacks: "+".join(lacks),
)  # fmt: skip
def test_what_a_file_system_lacks_is_done_without(world, tmp_path: Path, error: int, lacks: tuple[str, ...], said: str):
    source, plan = world
    run(plan, source, tmp_path / "wanted")
    (tmp_path / "out").mkdir()
    use_disk(Lacking(error, *lacks))
    report = run(plan, source, tmp_path / "out", force=True)
    assert content(tmp_path / "out") == content(tmp_path / "wanted")
    assert any(said in remark for remark in report.remarks) if said else report.remarks == ()
    assert sorted(os.listdir(tmp_path)) == ["out", "src", "wanted"]


@pytest.mark.parametrize("how", ["lock", "lock_range"])
def test_a_lock_that_another_holds_is_no_lacking_lock(world, tmp_path: Path, how: str):
    source, plan = world

    class Held(Lacking):
        def _refuse(self, what: str) -> None:
            if what == how:
                raise BlockingIOError(errno.EAGAIN, "held")
            super()._refuse(what)

    use_disk(Held(errno.ENOSYS, "lock"))
    with pytest.raises(UcplError) as caught:
        run(plan, source, tmp_path / "out")
    assert caught.value.diagnostics[0].code == "E502"


@pytest.mark.parametrize("what", ["sync", "folder", "data_only", "lock", "forget"])
def test_an_error_of_the_disk_is_no_lacking_call(world, tmp_path: Path, what: str):
    source, plan = world
    use_disk(Lacking(errno.EIO, what))
    with pytest.raises(UcplError) as caught:
        run(plan, source, tmp_path / "out")
    assert caught.value.diagnostics[0].code == "E503" and not (tmp_path / "out").exists()


def test_a_folder_that_cannot_be_listed_is_not_taken_for_synced(world, tmp_path: Path, monkeypatch):
    source, plan = world
    scan = os.scandir

    def failing(path="."):
        if str(path).endswith("tree"):
            raise OSError(errno.EIO, "failed", str(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", failing)
    with pytest.raises(UcplError) as caught:
        run(plan, source, tmp_path / "out")
    assert caught.value.diagnostics[0].code == "E503" and not (tmp_path / "out").exists()


def table(tmp_path: Path, kind: str, at: str) -> Path:
    path = tmp_path / "mountinfo"
    path.write_text(
        "21 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw\n"
        f"22 21 0:40 / {at} rw,relatime - {kind} server:/export rw\nhalf a line\n"
    )
    return path


@pytest.mark.parametrize("kind", ["nfs4", "cifs", "lustre", "fuse.sshfs"])
def test_a_file_system_of_a_network_is_recognized_by_its_kind(tmp_path: Path, kind: str):
    known = table(tmp_path, kind, "/mnt/a\\040b")
    assert kind_of(Path("/mnt/a b/c"), known) == kind and f"is on {kind}:" in network_remark(Path("/mnt/a b"), known)
    assert kind_of(Path("/mnt/a bc"), known) == "ext4" and network_remark(Path("/mnt/a bc"), known) == ""
    assert network_remark(Path("/x"), tmp_path / "no such table") == ""


@pytest.mark.fault(
    "Every system call", "a target on NFS, SMB, Lustre or FUSE", "a remark names the guarantees that do not hold there"
)
def test_a_run_says_that_its_target_is_on_a_network(world, tmp_path: Path, monkeypatch):
    import ucpl.runtime.execute as _  # noqa: F401
    from ucpl.runtime import linux

    source, plan = world
    known = table(tmp_path, "nfs4", str(tmp_path))
    monkeypatch.setattr(linux.network_remark, "__defaults__", (known,))
    (remark,) = run(plan, source, tmp_path / "out").remarks
    assert "is on nfs4" in remark
