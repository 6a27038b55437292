"""--force on overlayfs, the file system of containers.

Names cannot be exchanged there, and folders cannot be moved.
"""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.runtime.test_crashes import content, run, the_disk  # noqa: F401  (a fixture for every test)
from tests.runtime.world import Stored, bits_of, copies, write_source
from ucpl.errors import UcplError
from ucpl.runtime.disk import Disk, use_disk
from ucpl.runtime.publish import Workplace

ROOT = Path(__file__).parents[2]


class Layered(Disk):
    """Folders of a lower layer are neither exchanged nor moved.

    `fails`: the number of the failing rename, counted over all renames.
    """

    def __init__(self, lower: Path, fails: int = 0) -> None:
        self.inodes = {os.stat(folder).st_ino for folder, _, _ in os.walk(lower)}
        self.left = fails

    def _refuse(self, *paths: Path) -> None:
        if any(os.lstat(path).st_ino in self.inodes for path in paths):
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))

    def exchange(self, one, other):
        try:
            self._refuse(one, other)
        except OSError:
            return False
        return super().exchange(one, other)

    def rename(self, source, target):
        self._refuse(source)
        if "/old-part" in f"{source} {target}":
            self.left -= 1
            if self.left == 0:
                raise OSError(errno.EIO, "the disk")
        super().rename(source, target)


@pytest.fixture
def world(tmp_path):
    source = write_source(tmp_path / "src", [Stored("a", ("a",), "f32", bits_of("f32", (300,), 1))])
    old = tmp_path / "out"
    (old / "deep" / "er").mkdir(parents=True)
    (old / "deep" / "er" / "f").write_text("old")
    (old / "deep" / "g").write_text("g")
    (old / "empty").mkdir(mode=0o700)
    (old / "link").symlink_to("deep")
    return source, copies(source)


def test_a_folder_that_no_rename_moves_is_replaced(world, tmp_path: Path) -> None:
    source, plan = world
    run(plan, source, tmp_path / "wanted")
    use_disk(Layered(tmp_path / "out"))
    run(plan, source, tmp_path / "out", force=True)
    assert content(tmp_path / "out") == content(tmp_path / "wanted")
    assert sorted(os.listdir(tmp_path)) == ["out", "src", "wanted"]


@pytest.mark.fault(
    "Every system call",
    "`--force` over a folder of an overlayfs layer, with a failure at each file",
    "the new target, or the old one with all files",
)
@pytest.mark.parametrize("n", range(1, 6))
def test_what_fails_on_the_way_leaves_the_old_one(world, tmp_path: Path, n: int) -> None:
    """Three files and links are moved; then their folder is renamed.

    Their folder gets the name of the old target.
    """
    source, plan = world
    before = {str(p.relative_to(tmp_path / "out")) for p in (tmp_path / "out").rglob("*")}
    use_disk(Layered(tmp_path / "out", n))
    if n == 5:
        run(plan, source, tmp_path / "out", force=True)
        return
    with pytest.raises(UcplError) as caught:
        run(plan, source, tmp_path / "out", force=True)
    assert caught.value.diagnostics[0].code == "E503"
    use_disk(Disk())
    Workplace(tmp_path / "out").clear()
    assert {str(p.relative_to(tmp_path / "out")) for p in (tmp_path / "out").rglob("*")} == before
    assert (tmp_path / "out" / "deep" / "er" / "f").read_text() == "old"
    assert (tmp_path / "out" / "empty").stat().st_mode & 0o777 == 0o700


def test_overlayfs_itself(tmp_path: Path) -> None:
    """A folder and a file of an image are replaced.

    Needs a kernel that mounts overlays in a namespace.
    """
    lower, mount = tmp_path / "lower", tmp_path / "m"
    shutil.copytree(ROOT / "tests/fixtures/deepspeed/z1_dp4/global_step3", lower / "folder")
    (lower / "plain.pt").write_bytes(b"old")
    mount.mkdir()
    (tmp_path / "t").mkdir()
    layers = f"lowerdir={lower},upperdir={tmp_path}/t/u,workdir={tmp_path}/t/w"
    if os.geteuid():
        space, layers = ["unshare", "--mount", "--map-root-user", "sh", "-c"], f"{layers},userxattr"
    else:
        space = ["unshare", "--mount", "sh", "-c"]
    setup = f"mount -t tmpfs none {tmp_path}/t && cd {tmp_path}/t && mkdir u w && mount -t overlay overlay -o {layers} {mount}"
    if shutil.which("unshare") is None or subprocess.run([*space, setup], capture_output=True).returncode:
        pytest.skip("no overlayfs can be mounted here")
    verb = f"{sys.executable} -m ucpl convert {ROOT}/tests/fixtures/deepspeed/z1_dp4"
    work = f"{verb} {mount}/folder --to 'zero1(dp=2)' --force && {verb} {mount}/plain.pt --to 'plain()' --force"
    done = subprocess.run(
        [*space, f"{setup} && {work} && ls -A {mount} && wc -c < {mount}/plain.pt && ls {mount}/folder"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    left = done.stdout.partition("folder\nplain.pt\n")[2].split()  # all names in the mount, and the lines after them
    assert int(left[0]) > 10_000 and left[1:] == ["global_step3", "latest", "ucpl", "zero_to_fp32.py"][: len(left) - 1]
