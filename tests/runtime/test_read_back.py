"""Read-back of all bytes from the disk.

Each page is read after the last write to it, in parallel with the move if possible.
"""

import os
import threading

import pytest

from tests.runtime.test_crashes import content, each_tile_is_journalled, run, the_disk, world  # noqa: F401
from tests.runtime.world import Stored, Torch, bits_of, copies, write_source
from ucpl.errors import UcplError
from ucpl.runtime import execute, linux, moving, read_back, targets
from ucpl.runtime.buffers import MEMORY_MIN, Workspace
from ucpl.runtime.disk import Disk, use_disk
from ucpl.runtime.failpoints import set_failpoints
from ucpl.runtime.options import RunOptions
from ucpl.runtime.read_back import ReadBack

PAGE = 4096


def pages(position: int, size: int) -> range:
    return range(position // PAGE, -(-(position + size) // PAGE))


class Pages(Disk):
    """State of every page of the target's files: written, synced, forgotten, read.

    A read of any other page is recorded.
    """

    def __init__(self) -> None:
        self.state: dict[tuple[int, int], str] = {}  # (inode, page)
        self.seen: dict[tuple[int, int], set[range]] = {}  # which bytes of a page were read since its last write
        self.early: list[str] = []
        self.reads = 0
        self._lock = threading.RLock()

    def _of(self, fd: int) -> int | None:
        path = os.readlink(f"/proc/self/fd/{fd}")
        return os.fstat(fd).st_ino if "/tree/to_" in path else None

    def write(self, fd, view, position):
        with self._lock:
            done = super().write(fd, view, position)
            if (file := self._of(fd)) is not None:
                self.state |= {(file, page): "written" for page in pages(position, done)}
                self.seen |= {(file, page): set() for page in pages(position, done)}
            return done

    def sync(self, fd, *, data_only=False):
        with self._lock:
            super().sync(fd, data_only=data_only)
            self._next(self._of(fd), "written", "synced", lambda page: True)

    def forget(self, fd, position, size):
        with self._lock:
            super().forget(fd, position, size)
            whole = range(-(-position // PAGE), (position + size) // PAGE) if size else range(1 << 40)
            self._next(self._of(fd), "synced", "forgotten", whole.__contains__)

    def _next(self, file, before, after, holds) -> None:
        for key, state in self.state.items():
            if key[0] == file and state == before and holds(key[1]):
                self.state[key] = after

    def read(self, fd, views, position):
        with self._lock:
            got = super().read(fd, views, position)
            if (file := self._of(fd)) is not None:
                self.reads += 1
                for page in pages(position, got):
                    if self.state[file, page] in ("written", "synced"):
                        self.early.append(f"page {page} was {self.state[file, page]}")
                    self.state[file, page] = "read"
                    low, high = max(position, page * PAGE), min(position + got, (page + 1) * PAGE)
                    self.seen[file, page].add(range(low, high))
            return got

    def unread(self) -> int:
        """Bytes not read since the last write to their page."""
        count = 0
        ends: dict[int, int] = {}
        for (file, page), parts in self.seen.items():
            ends[file] = max(ends.get(file, 0), max((part.stop for part in parts), default=(page + 1) * PAGE))
        for (file, page), parts in self.seen.items():
            at, end = page * PAGE, min((page + 1) * PAGE, ends[file])
            for part in sorted(parts, key=lambda part: part.start):
                count += max(0, min(part.start, end) - at)
                at = max(at, part.stop)
            count += max(0, end - at)
        return count


def odd(tmp_path, sizes=(12_000, 900, 1, 30_001)):
    tensors = [Stored(f, (f,), "f32", bits_of("f32", (n,), n)) for f, n in zip("abcd", sizes, strict=True)]
    source = write_source(tmp_path / "src", tensors)
    return source, copies(source)


@pytest.fixture
def what_is_durable_is_read_at_once(each_tile_is_journalled, monkeypatch):  # noqa: F811
    """Read back before the next tile is written.

    A parallel thread would do this at an unknown time.
    """
    durable = ReadBack.durable

    def and_read(self, indexes):
        durable(self, indexes)
        with Workspace(self._plane.share, self._plane.budget) as space:
            while (some := self._take()) is not None:
                self._some(some, space)

    monkeypatch.setattr(ReadBack, "durable", and_read)


@pytest.mark.fault(
    "Power loss",
    "read-back of bytes that are not durable",
    "never: each page is read after its last sync, with the page cache dropped",
)
def test_every_page_is_read_after_its_last_write_was_synced_and_forgotten(tmp_path, what_is_durable_is_read_at_once):
    source, plan = odd(tmp_path)
    watching = Pages()
    use_disk(watching)
    report = run(plan, source, tmp_path / "out")
    assert not watching.early
    assert watching.state and set(watching.state.values()) == {"read"} and not watching.unread()
    assert report.bytes_read_back >= report.bytes_target


def test_so_it_is_with_several_threads(tmp_path, monkeypatch):
    source, plan = odd(tmp_path, (300_000, 900, 1, 400_001))
    monkeypatch.setattr(moving, "SYNC_SECONDS", 0.0)
    watching = Pages()
    use_disk(watching)
    execute(plan, source, Torch(), tmp_path / "out", RunOptions(memory=3 * MEMORY_MIN, workers=3))
    assert not watching.early and not watching.unread()


class Slow(Pages):
    """Delays the last write of payload until a read-back.

    Setting `until` also ends the delay.
    """

    def __init__(self, last: int, until: threading.Event | None = None) -> None:
        super().__init__()
        self.left = last
        self.was_beside = False
        self._until = until
        self._read = threading.Event()

    def read(self, fd, views, position):
        got = super().read(fd, views, position)
        if self.reads:
            self._read.set()
        return got

    def write(self, fd, view, position):
        if self._of(fd) is not None and len(view) > PAGE:
            self.left -= 1
            if not self.left:
                self.was_beside = (self._until or self._read).wait(60)
        return super().write(fd, view, position)


def test_what_is_durable_is_read_back_while_the_rest_is_moved(tmp_path, each_tile_is_journalled):  # noqa: F811
    source, plan = odd(tmp_path)
    tiles = run(plan, source, tmp_path / "first").tiles
    watching = Slow(last=tiles - 2)  # two tiles are of less than a page
    use_disk(watching)
    report = run(plan, source, tmp_path / "out")
    assert watching.was_beside and not watching.early
    assert report.seconds["read-back beside"] > 0
    assert content(tmp_path / "out") == content(tmp_path / "first")


class Damaging(Slow):
    """Changes one byte from the first sync on.

    The byte is in the first file's second page. No code of ucpl writes this byte.
    """

    def sync(self, fd, *, data_only=False):
        super().sync(fd, data_only=data_only)
        path = os.readlink(f"/proc/self/fd/{fd}")
        if path.endswith("to_a.pt") and not getattr(self, "done", False):
            self.done = True
            with open(path, "r+b") as file:
                file.seek(PAGE + 7)
                byte = file.read(1)[0]
                file.seek(PAGE + 7)
                file.write(bytes([byte ^ 1]))


@pytest.mark.fault("Power loss", "the disk changes a byte while other tiles move", "found at once; no target")
def test_a_byte_that_the_disk_changed_is_found_before_all_is_moved(tmp_path, each_tile_is_journalled, monkeypatch):  # noqa: F811
    source, plan = odd(tmp_path)
    found, differs = threading.Event(), read_back._differs

    def noted(*args):
        found.set()
        differs(*args)

    monkeypatch.setattr(read_back, "_differs", noted)
    watching = Damaging(last=4, until=found)
    use_disk(watching)
    with pytest.raises(UcplError) as caught:
        run(plan, source, tmp_path / "out")
    assert watching.was_beside or watching.left > 0, (
        "it was found before the fourth tile was written, or while that waited"
    )
    assert caught.value.diagnostics[0].code == "E505" and "to_a.pt" in caught.value.diagnostics[0].message
    assert sorted(os.listdir(tmp_path)) == ["src"], "the work is of no use: it is removed"


class Careless(Slow):
    """Writes of CRC-dependent bytes damage the byte before them.

    That byte is payload and was already read back.
    """

    def write(self, fd, view, position):
        done = super().write(fd, view, position)
        if self._of(fd) is not None and bytes(view[:4]) == b"PK\x07\x08" and position > PAGE:
            os.pwrite(fd, bytes([os.pread(fd, 1, position - 1)[0] ^ 1]), position - 1)
        return done


@pytest.mark.fault(
    "Power loss",
    "a write that damages its neighbours after read-back",
    "found: a page with a later write is read again",
)
def test_what_shares_a_page_with_a_later_write_is_read_back_again(tmp_path, each_tile_is_journalled):  # noqa: F811
    """A descriptor follows each storage, in the page of the storage's end.

    It is written after the last move.
    """
    source, plan = odd(tmp_path, (7_168 + 16, 900, 1, 1))
    use_disk(Careless(last=10_000))
    with pytest.raises(UcplError) as caught:
        run(plan, source, tmp_path / "out")
    assert caught.value.diagnostics[0].code == "E505"


def test_what_an_earlier_run_made_durable_is_read_back_as_well(tmp_path, each_tile_is_journalled):  # noqa: F811
    source, plan = odd(tmp_path)
    set_failpoints("tile-written:4:eio")
    with pytest.raises((UcplError, OSError)):
        run(plan, source, tmp_path / "out")
    set_failpoints("")
    report = run(plan, source, tmp_path / "out", resume=True)
    assert report.tiles_resumed == 3 and report.bytes_read_back >= report.bytes_target


def test_nothing_is_read_back_where_the_caller_says_so(tmp_path):
    source, plan = odd(tmp_path)
    run(plan, source, tmp_path / "first")
    watching = Pages()
    use_disk(watching)
    report = run(plan, source, tmp_path / "out", read_back=False)
    assert watching.reads == 0 and set(watching.state.values()) == {"synced"}
    assert report.bytes_read_back == 0 and content(tmp_path / "out") == content(tmp_path / "first")


class Beginning(Disk):
    """Bytes, by inode, that the disk was asked to begin with."""

    def __init__(self) -> None:
        self.begun: dict[int, int] = {}

    def start_writing(self, fd, position, size):
        held = os.fstat(fd)
        assert position + size <= held.st_size
        self.begun[held.st_ino] = self.begun.get(held.st_ino, 0) + size
        super().start_writing(fd, position, size)


def test_the_disk_begins_with_what_is_large_before_it_is_synced(tmp_path, monkeypatch):
    monkeypatch.setattr(targets, "_LARGE", PAGE)
    source, plan = odd(tmp_path)
    disk = Beginning()
    use_disk(disk)
    report = run(plan, source, tmp_path / "out")
    assert sum(disk.begun.values()) >= 0.9 * report.bytes_target
    monkeypatch.setattr(linux, "_libc", lambda: None)  # a hint alone: the same bytes without it
    run(plan, source, tmp_path / "again")
    assert content(tmp_path / "out") == content(tmp_path / "again")


def test_what_is_durable_is_read_back_by_those_that_have_no_more_to_move(tmp_path, monkeypatch):
    source, plan = odd(tmp_path, (60_000, 900, 1, 60_001))
    both = threading.Barrier(2)
    one = ReadBack._some

    def met(self, some, space):
        if threading.current_thread() not in seen:
            seen.add(threading.current_thread())
            both.wait(20)
        one(self, some, space)

    seen: set[threading.Thread] = set()
    monkeypatch.setattr(ReadBack, "_some", met)
    monkeypatch.setattr(ReadBack, "rest", lambda self, beside, mine, meanwhile: None)
    execute(plan, source, Torch(), tmp_path / "out", RunOptions(memory=2 * MEMORY_MIN, workers=1))
    assert len(seen) == 2, "the thread that moved, and the one that does nothing else"


class Waiting(Disk):
    """A sync of one file returns once that of another has begun."""

    def __init__(self) -> None:
        self.both = threading.Barrier(2)
        self.met: list[int] = []

    def sync(self, fd, *, data_only=False):
        if not data_only and "/tree/to_" in os.readlink(f"/proc/self/fd/{fd}"):
            self.met.append(self.both.wait(20))
        super().sync(fd, data_only=data_only)


def test_files_are_synced_side_by_side(tmp_path):
    """All files are synced at the same time.

    A sync waits equally long for one file or many. One after the other, a folder of 300 files took a second.
    """
    source, plan = odd(tmp_path)
    watching = Waiting()
    use_disk(watching)
    run(plan, source, tmp_path / "out")
    assert sorted(watching.met) == [0, 0, 1, 1], "four files, by two"
