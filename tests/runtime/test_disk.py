"""Syncs of many files and folders at once."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest

from ucpl.runtime.disk import Disk, at_once, sync_folders, use_disk


class Meeting(Disk):
    """Each sync waits until as many others have begun."""

    def __init__(self, parties: int) -> None:
        self.barrier = threading.Barrier(parties, timeout=60)
        self.synced: list[str] = []

    def sync(self, fd: int, *, data_only: bool = False) -> None:
        self.barrier.wait()
        self.synced.append(os.readlink(f"/proc/self/fd/{fd}"))


def test_folders_are_synced_at_once_and_each_once(tmp_path: Path) -> None:
    for name in ("a", "a/b", "c"):
        (tmp_path / name).mkdir()
    disk = Meeting(4)
    before = use_disk(disk)
    try:
        sync_folders(tmp_path)
    finally:
        use_disk(before)
    assert sorted(disk.synced) == [*map(str, (tmp_path, tmp_path / "a", tmp_path / "a/b", tmp_path / "c"))]


@pytest.mark.parametrize("count", [0, 1, 2, 7, 8, 9, 100])
def test_each_thing_is_synced_once(count: int) -> None:
    seen: list[int] = []
    at_once(seen.append, range(count))
    assert sorted(seen) == [*range(count)]


def test_an_error_of_one_thread_is_raised_after_the_end_of_all() -> None:
    before = threading.active_count()
    seen: list[int] = []

    def sync(number: int) -> None:
        if number == 3:
            raise OSError(errno.EIO, "broken")
        seen.append(number)

    with pytest.raises(OSError, match="broken"):
        at_once(sync, range(8))
    assert sorted(seen) == [0, 1, 2, 4, 5, 6, 7] and threading.active_count() == before
