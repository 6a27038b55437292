"""Laws of a power loss at any moment.

The target is absent, or the old one, or the complete new one. A resume ends in the same bytes.
A run is recorded call by call (recorder). Every prefix of it is laid out as a disk might hold it, and resumed from there.
"""

import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from attrs import evolve

from tests.runtime.recorder import Crash, Recorder, Short, Survivor, crash_states
from tests.runtime.world import (
    Stored,
    Torch,
    bits_of,
    copies,
    moves,
    plan_of,
    read_target,
    remade,
    stored,
    write_source,
)
from ucpl.errors import UcplError
from ucpl.extents import StoredTensor
from ucpl.runtime import execute, moving
from ucpl.runtime.buffers import MEMORY_MIN
from ucpl.runtime.disk import Disk, use_disk
from ucpl.runtime.failpoints import set_failpoints
from ucpl.runtime.journal import Journal, read_journal
from ucpl.runtime.moving import Mover
from ucpl.runtime.options import RunOptions
from ucpl.runtime.verify import verify_files

MEMORY = MEMORY_MIN


@pytest.fixture(autouse=True)
def the_disk():
    """Restore the disk after a test that replaces it."""
    before = use_disk(Disk())
    yield
    use_disk(before)


@pytest.fixture
def each_tile_is_journalled(monkeypatch):
    """Make one worker sync and journal after every tile.

    Each run then makes the same calls in the same order. No other thread journals meanwhile, however long a tile takes.
    """
    one = Mover._band
    monkeypatch.setattr(moving, "SYNC_SECONDS", float("inf"))
    monkeypatch.setattr(moving, "SYNC_BYTES", float("inf"))

    def and_flush(self, *args):
        one(self, *args)
        self._flush()

    monkeypatch.setattr(Mover, "_band", and_flush)


@pytest.fixture
def world(tmp_path):
    tensors = [Stored(f, (f,), "f32", bits_of("f32", (n,), n)) for f, n in (("a", 12_000), ("b", 900))]
    source = write_source(tmp_path / "src", tensors)
    return source, copies(source)


def run(plan, source, out, **more):
    framework = more.pop("framework", Torch())
    return execute(plan, source, framework, out, RunOptions(memory=MEMORY, workers=1, **more))


def content(path: Path):
    """Content of a target: None, a file's bytes, or a folder's files."""
    if not os.path.lexists(path):
        return None
    if path.is_file():
        return path.read_bytes()
    return {p.relative_to(path).as_posix(): p.read_bytes() for p in path.rglob("*") if p.is_file()}


def recorded(world, tmp_path, name="out", **more):
    """A recorded run into place/NAME: (recorder, expected target)."""
    source, plan = world
    place = tmp_path / "place"
    place.mkdir(exist_ok=True)
    if more.get("force"):
        (place / name).mkdir()
        (place / name / "old").write_text("old")
    recorder = Recorder(place, exchanges=more.pop("exchanges", True))
    use_disk(recorder)
    append = Journal.append

    def counted(self, tiles, fragments):
        append(self, tiles, fragments)
        recorder.mark("journalled")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Journal, "append", counted)
        run(plan, source, place / name, **more)
    recorder.mark("returned")
    use_disk(Disk())
    return recorder, content(place / name)


def tried(crash: Crash, world, top: Path, wanted, name="out", **more) -> None:
    """The law, in one tree."""
    source, plan = world
    shutil.rmtree(top, ignore_errors=True)
    top.mkdir()
    use_disk(Survivor(crash.tree.lay_out(top)))
    old = {"old": b"old"} if more.get("force") else None
    found = content(top / name)
    assert found in (None, old, wanted), f"{crash}: half a target"
    if "returned" in crash.marks:
        assert found == wanted, f"{crash}: it was done, and is gone"
    if found == wanted:
        run(plan, source, top / name, resume=True, **more)
    else:
        report = run(plan, source, top / name, resume=True, **more)
        assert report.tiles_resumed >= crash.marks.count("journalled"), f"{crash}: what was journalled is done again"
    assert content(top / name) == wanted, f"{crash}: other bytes in the end"
    assert os.listdir(top) == [name], f"{crash}: something is left"


@pytest.mark.fault(
    "Power loss",
    "power loss at any call, into a new folder, over an old one, without an exchange of names",
    "the target is absent, old or new and complete; `--resume` writes the same bytes",
)
@pytest.mark.parametrize("how", ["new", "force", "force without exchange"])
def test_a_folder_survives_any_crash(world, tmp_path, each_tile_is_journalled, how):
    more = {"force": True} if "force" in how else {}
    recorder, wanted = recorded(world, tmp_path, exchanges=how != "force without exchange", **more)
    assert wanted and {"latest", "ucpl/manifest.json", "ucpl/layout.ucpl", "to_a.pt"} <= set(wanted)
    states = list(crash_states(recorder))
    assert len(states) > 60 and {s.mode for s in states} == {"kept", "lost", "bare", "torn"}
    for crash in states:
        tried(crash, world, tmp_path / "crash", wanted, **more)


@pytest.mark.fault("Power loss", "the same into a single file", "the same")
def test_a_single_file_survives_any_crash(world, tmp_path, each_tile_is_journalled):
    source, plan = world
    one = remade(plan, targets=tuple(evolve(t, file="model.pt") for t in plan.targets))
    more = {"framework": Torch(texts={})}
    recorder, wanted = recorded((source, one), tmp_path, "out.pt", **more)
    assert isinstance(wanted, bytes)
    for crash in crash_states(recorder):
        tried(crash, (source, one), tmp_path / "crash", wanted, "out.pt", **more)


@pytest.mark.fault("Power loss", "a second power loss during a resumed run with a torn journal", "as for the first")
def test_a_resumed_run_survives_any_crash(world, tmp_path, each_tile_is_journalled):
    """The power fails again during the second run.

    The first power loss tore the journal.
    """
    source, plan = world
    recorder, wanted = recorded(world, tmp_path)
    torn = [c for c in crash_states(recorder, ("torn",)) if c.marks.count("journalled") == 1]
    first = next(c for c in torn if any(b"ucpl journal" in d and len(d) % 48 for d in c.tree.files.values()))
    place = tmp_path / "again"
    place.mkdir()
    known = first.tree.lay_out(place)
    second = Recorder(place)
    use_disk(second)
    assert known
    run(plan, source, place / "out", resume=True)
    use_disk(Disk())
    assert content(place / "out") == wanted
    for crash in crash_states(second):
        tried(crash, world, tmp_path / "crash", wanted)


# ---- short reads and writes ------------------------------------------------------------------------------------------


@pytest.mark.fault("Power loss", "reads and writes that return less than requested", "the same bytes")
@pytest.mark.parametrize("most", [1000, 4097])
def test_short_reads_and_writes_change_nothing(world, tmp_path, most):
    source, plan = world
    run(plan, source, tmp_path / "wanted")
    use_disk(Short(most))
    report = run(plan, source, tmp_path / "out")
    assert content(tmp_path / "out") == content(tmp_path / "wanted")
    assert report.source_bytes_unverified == 0


def test_short_reads_of_scattered_and_combed_runs(tmp_path):
    """Rows go to every other row; columns come from between others."""
    full = bits_of("f32", (60, 700), 1)
    source = write_source(tmp_path / "src", [Stored("s", ("w",), "f32", full)])
    targets = [
        StoredTensor("rows.pt", ("w",), "f32", (60, 1400), "weight", "w"),
        StoredTensor("columns.pt", ("w",), "f32", (60, 600), "weight", "w"),
    ]
    rows = [
        (0, 0, 0, (60, 700), 0, (700, 1), 0, (1400, 1)),
        (0, 0, 1, (60, 600), 100, (700, 1), 0, (600, 1)),
    ]
    plan = plan_of([stored(e) for e in source.extents.values()], targets, moves("copy", rows))
    for most in (777, 1400):
        use_disk(Short(most))
        out = tmp_path / f"out{most}"
        run(plan, source, out)
        use_disk(Disk())
        assert read_target(out, "columns.pt")["w"].tobytes() == full[:, 100:].tobytes()
        assert read_target(out, "rows.pt")["w"][:, :700].tobytes() == full.tobytes()


@pytest.mark.fault("Power loss", "more runs than one system call accepts", "the same bytes")
def test_a_scatter_of_more_runs_than_one_call_takes(tmp_path):
    """3,000 rows of one contiguous tensor, each to its own place.

    They take three calls of at most 1,024 parts.
    """
    full = bits_of("f32", (3000, 128), 1)
    source = write_source(tmp_path / "src", [Stored("s", ("w",), "f32", full)])
    target = [StoredTensor("d.pt", ("w",), "f32", (3000, 130), "weight", "w")]
    rows = [(0, 0, 0, (3000, 128), 0, (128, 1), 0, (130, 1))]
    plan = plan_of([stored(e) for e in source.extents.values()], target, moves("copy", rows))
    calls: list[int] = []

    class Counting(Disk):
        def read(self, fd, views, position):
            calls.append(len(views))
            return super().read(fd, views, position)

    use_disk(Counting())
    report = execute(plan, source, Torch(), tmp_path / "out", RunOptions(memory=64 << 20, workers=1))
    assert max(calls) == 1024
    assert read_target(tmp_path / "out", "d.pt")["w"][:, :128].tobytes() == full.tobytes()
    assert report.bytes_read == full.nbytes and report.source_bytes_unverified == 0


def test_verifying_survives_short_reads(world, tmp_path):
    from tests.runtime.world import open_target

    source, plan = world
    run(plan, source, tmp_path / "out")
    use_disk(Short(500))
    found = verify_files(open_target(tmp_path / "out", ["to_a.pt", "to_b.pt"]), memory=MEMORY, workers=1)
    assert found and found.bytes_unprotected == 0


# ---- the journal, the lock -------------------------------------------------------------------------------------------


@pytest.mark.fault("Power loss", "a torn record at the end of the journal", "cut off before the next record")
def test_a_torn_tail_of_the_journal_is_cut_off(world, tmp_path, each_tile_is_journalled):
    """Records appended after the cut can be read."""
    recorder, _ = recorded(world, tmp_path)
    torn = [c for c in crash_states(recorder, ("torn",)) if c.marks.count("journalled") == 1]
    found = [
        d for c in torn for d in c.tree.files.values() if b"ucpl journal" in d and (len(d) - d.index(b"\n") - 1) % 48
    ]
    path = tmp_path / "journal"
    path.write_bytes(found[0])
    past = read_journal(path)
    assert past is not None and past.size < len(found[0])
    journal = Journal(path, past.size)
    journal.publishing(7, 8)
    journal.close()
    after = read_journal(path)
    assert after is not None and after.publishing == (7, 8) and len(after.tile) == len(past.tile)


class Failing(Disk):
    """Fails at one kind of call for chosen paths.

    Counts open files.
    """

    def __init__(self, what, error, where=""):
        self.what, self.error, self.where, self.paths = what, error, where, {}

    def _fail(self, what, path):
        if what == self.what and self.where in str(path):
            raise OSError(self.error, os.strerror(self.error), str(path))

    def open(self, path, flags, mode=0o666):
        self._fail("open", path)
        fd = super().open(path, flags, mode)
        self.paths[fd] = path
        return fd

    def close(self, fd):
        self.paths.pop(fd)
        super().close(fd)

    def resize(self, fd, size):
        self._fail("resize", self.paths[fd])
        super().resize(fd, size)

    def remove(self, path):
        self._fail("remove", path)
        super().remove(path)

    def sync(self, fd, *, data_only=False):
        self._fail("sync", self.paths[fd])
        super().sync(fd, data_only=data_only)


@pytest.mark.fault("Power loss", "a journal that cannot be truncated", "status 4, no open descriptor")
@pytest.mark.parametrize("error", [5, 28])
def test_no_descriptor_is_left_when_the_journal_cannot_be_cut(world, tmp_path, error):
    source, plan = world
    disk = Failing("resize", error, "journal")
    use_disk(disk)
    with pytest.raises(UcplError) as caught:
        run(plan, source, tmp_path / "out")
    assert caught.value.diagnostics[0].code == "E503"
    assert disk.paths == {} and sorted(os.listdir(tmp_path)) == ["src"]


@pytest.mark.parametrize("error", [5, 28])
def test_nor_when_it_cannot_be_cut_where_the_last_run_ended(world, tmp_path, error):
    """A resumed run cuts off the torn tail of the journal.

    If the cut fails, all files stay, and the next run resumes.
    """
    source, plan = world
    out = tmp_path / "out"
    set_failpoints("tile-written:2:interrupt")
    with pytest.raises(UcplError):
        run(plan, source, out)
    set_failpoints("")
    use_disk(disk := Failing("resize", error, "journal"))
    with pytest.raises(UcplError) as caught:
        run(plan, source, out, resume=True)
    assert caught.value.diagnostics[0].code == "E503" and disk.paths == {} and not out.exists()
    use_disk(Disk())
    assert run(plan, source, out, resume=True).tiles_resumed > 0


@pytest.mark.fault("Power loss", "a lock file that cannot be removed", "reported; it blocks no later run")
def test_a_lock_that_cannot_be_removed_is_reported_and_blocks_nobody(world, tmp_path):
    source, plan = world
    use_disk(disk := Failing("remove", 30, "ucpl-lock"))
    report = run(plan, source, tmp_path / "out")
    assert disk.paths == {}
    assert len(report.remarks) == 1 and ".out.ucpl-lock" in report.remarks[0]
    assert run(plan, source, tmp_path / "out", resume=True).done_before
    use_disk(Disk())
    assert run(plan, source, tmp_path / "out", resume=True).remarks == ()
    assert sorted(os.listdir(tmp_path)) == ["out", "src"]


@pytest.mark.fault(
    "Power loss",
    "EIO and ENOSPC at a sync or an open of any file",
    "status 4, no target, no open descriptor, resumable",
)
@pytest.mark.parametrize(
    ("what", "where"),
    [("sync", "journal"), ("sync", "to_a.pt"), ("sync", "manifest"), ("sync", "latest"), ("sync", "layout.ucpl"),
     ("open", "journal.new"), ("open", "to_b.pt"), ("sync", "tree")],
)  # fmt: skip
@pytest.mark.parametrize("error", [5, 28])
def test_a_disk_that_fails_leaves_no_target_and_no_descriptor(world, tmp_path, what, where, error):
    source, plan = world
    disk = Failing(what, error, where)
    use_disk(disk)
    with pytest.raises(UcplError) as caught:
        run(plan, source, tmp_path / "out")
    assert caught.value.exit_status == 4 and disk.paths == {}
    assert not (tmp_path / "out").exists()
    use_disk(Disk())
    run(plan, source, tmp_path / "out", resume=True)
    run(plan, source, tmp_path / "wanted")
    assert content(tmp_path / "out") == content(tmp_path / "wanted")


# ---- a single file that is finished ----------------------------------------------------------------------------------


@pytest.fixture
def single(world):
    source, plan = world
    return source, remade(plan, targets=tuple(evolve(t, file="model.pt") for t in plan.targets))


@pytest.mark.fault(
    "Power loss",
    "`--resume` into a finished single file, or into another one",
    "done if every byte is the same, else refused",
)
def test_resume_into_a_finished_single_file_is_done(single, tmp_path):
    source, plan = single
    out = tmp_path / "out.pt"
    run(plan, source, out, framework=Torch(texts={}))
    before = content(out), out.stat().st_mtime_ns
    report = run(plan, source, out, framework=Torch(texts={}), resume=True)
    assert report.done_before and (content(out), out.stat().st_mtime_ns) == before
    assert sorted(os.listdir(tmp_path)) == ["out.pt", "src"]


@pytest.mark.parametrize("where", ["first", "payload", "crc", "longer", "shorter"])
def test_resume_into_another_single_file_is_refused(single, tmp_path, where):
    source, plan = single
    out = tmp_path / "out.pt"
    run(plan, source, out, framework=Torch(texts={}))
    data = bytearray(out.read_bytes())
    match where:
        case "longer":
            data += b"x"
        case "shorter":
            del data[-1]
        case "crc":
            data[data.rindex(b"PK\x01\x02", 0, data.rindex(b"model/version")) + 16] ^= 1
        case _:
            data[{"first": 7, "payload": len(data) // 2}[where]] ^= 1
    out.write_bytes(data)
    with pytest.raises(UcplError) as caught:
        run(plan, source, out, framework=Torch(texts={}), resume=True)
    assert caught.value.diagnostics[0].code == "E506" and out.read_bytes() == data


def test_resume_into_a_single_file_of_another_source_is_refused(single, tmp_path):
    source, plan = single
    out = tmp_path / "out.pt"
    run(plan, source, out, framework=Torch(texts={}))
    other = write_source(tmp_path / "other", [
        Stored(f, (f,), "f32", bits_of("f32", (n,), n + 1)) for f, n in (("a", 12_000), ("b", 900))
    ])  # fmt: skip
    with pytest.raises(UcplError) as caught:
        run(plan, other, out, framework=Torch(texts={}), resume=True)
    assert caught.value.diagnostics[0].code == "E506"
    assert np.array_equal(read_target(tmp_path, "out.pt")["b"], bits_of("f32", (900,), 900))
