"""Laws of a run that ends early.

Durable work is not repeated, and the final bytes are the same.
"""

import json
import os
import random
import signal
import sys
import traceback
from pathlib import Path

import pytest
from attrs import evolve

from tests.runtime.world import Stored, Torch, bits_of, copies, write_source
from ucpl.errors import UcplError
from ucpl.runtime import Report, execute
from ucpl.runtime import execute as _execute
from ucpl.runtime.buffers import MEMORY_MIN
from ucpl.runtime.failpoints import set_failpoints
from ucpl.runtime.options import RunOptions

MEMORY = 2 * MEMORY_MIN
ROOT = Path(__file__).parents[2]
assert _execute is execute


@pytest.fixture(autouse=True)
def no_failpoints(monkeypatch):
    """Every tile is journalled soon, so that there is something to resume."""
    monkeypatch.setattr(sys.modules["ucpl.runtime.moving"], "SYNC_BYTES", 1)
    yield
    set_failpoints("")


def build(top: Path):
    tensors = [Stored(f, (f,), "f32", bits_of("f32", (700, 1000), i)) for i, f in enumerate("abc")]
    return write_source(top / "src", tensors)


@pytest.fixture
def simple(tmp_path):
    source = build(tmp_path)
    return source, copies(source), tmp_path / "out"


def run(plan, source, out, **more) -> Report:
    more.setdefault("memory", MEMORY)
    return execute(plan, source, more.pop("framework", Torch()), out, RunOptions(**more))


def tree(top: Path):
    return {p.relative_to(top).as_posix(): p.read_bytes() for p in sorted(top.rglob("*")) if p.is_file()}


def forked(plan, source, out: Path, fail: str, *more: str) -> int:
    """The exit status of a run in a fork of this process."""
    pid = os.fork()
    if pid:
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        assert status in (0, -signal.SIGKILL), status
        return status
    try:
        set_failpoints(fail)
        run(plan, source, out, resume="resume" in more, force="force" in more)
        os._exit(0)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


PLACES = [
    "created",
    "tile-written",
    "journal-before",
    "journal-synced",
    "target-sync",
    "synced",
    "publish-before",
    "publish-after",
]


@pytest.mark.fault(
    "Interruption",
    "SIGKILL at each failpoint, with and without `--force`",
    "the old target is unchanged; `--resume` writes the same bytes",
)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("force", [False, True])
def test_a_killed_run_resumes_to_the_same_bytes(simple, place, force):
    source, plan, out = simple
    run(plan, source, out.with_name("wanted"))
    if force:
        out.mkdir()
        (out / "old").write_text("old")
    hit = random.Random(place).randint(2, 60) if place == "tile-written" else 1
    more = ("force",) if force else ()
    assert forked(plan, source, out, f"{place}:{hit}:kill", *more) == -signal.SIGKILL
    if place != "publish-after":
        assert (tree(out) == {"old": b"old"}) if force else not out.exists()
    again = run(plan, source, out, resume=True, force=force)
    assert tree(out) == tree(out.with_name("wanted"))
    assert again.done_before == (place == "publish-after")
    if place in ("synced", "publish-before"):
        assert again.tiles_resumed == again.tiles and again.bytes_read == 0
    assert sorted(os.listdir(out.parent)) == ["out", "src", "wanted"]


@pytest.mark.fault(
    "Interruption",
    "SIGKILL right after the rename, then `--resume` with another plan or source",
    "the existing target is not reported as done",
)
@pytest.mark.parametrize("other", ["plan", "source"])
def test_a_run_that_was_published_is_not_taken_for_another(simple, other):
    """A run killed between the rename and its end.

    The published target is of that plan and source. It is no evidence for other plans and sources.
    """
    source, plan, out = simple
    run(plan, source, out.with_name("wanted"))
    assert forked(plan, source, out, "publish-after:1:kill") == -signal.SIGKILL
    assert tree(out) == tree(out.with_name("wanted"))
    if other == "plan":
        plan = copies(source, lambda tensor: "all.pt")
    else:
        os.utime(source.root / "a", ns=(5, 5))
    with pytest.raises(UcplError) as caught:
        run(plan, source, out, resume=True)
    assert caught.value.diagnostics[0].code == "E506" and tree(out) == tree(out.with_name("wanted"))
    assert not run(plan, source, out, resume=True, force=True).done_before
    run(plan, source, out.with_name("other"))
    assert tree(out) == tree(out.with_name("other"))


@pytest.mark.fault("Interruption", "SIGKILL at random tiles, many times", "the same bytes in the end")
def test_killed_again_and_again(simple):
    source, plan, out = simple
    rng = random.Random(3)
    for _ in range(6):
        if forked(plan, source, out, f"tile-written:{rng.randint(1, 90)}:kill", "resume") == 0:
            break
        assert not out.exists()
    run(plan, source, out, resume=True)
    run(plan, source, out.with_name("wanted"))
    assert tree(out) == tree(out.with_name("wanted"))


@pytest.mark.fault("Interruption", "a stop between the two renames of `--force`", "the old or the new target exists")
@pytest.mark.parametrize("then", ["resume", "afresh", "another plan"])
def test_between_moving_aside_and_publishing(simple, monkeypatch, then):
    """After any next step one complete target exists.

    It is the old target, restored, or the new one.
    """
    source, plan, out = simple
    out.mkdir()
    (out / "old").write_text("old")
    monkeypatch.setattr("ucpl.runtime.linux.exchange", lambda *_: False)
    set_failpoints("publish-between:1:eio")
    with pytest.raises(UcplError):
        run(plan, source, out, force=True)
    assert not out.exists()
    set_failpoints("")
    if then == "resume":
        assert run(plan, source, out, resume=True, force=True).tiles_resumed > 0
        assert "to_a.pt" in tree(out) and sorted(os.listdir(out.parent)) == ["out", "src"]
        return
    other = evolve(plan, spec_digest="another")
    with pytest.raises(UcplError) as caught:
        run(plan if then == "afresh" else other, source, out, resume=then != "afresh")
    assert caught.value.diagnostics[0].code == ("E500" if then == "afresh" else "E602")
    assert tree(out) == {"old": b"old"}


def test_no_record_is_written_before_its_data_is_synced(simple, monkeypatch):
    from ucpl.runtime.journal import Journal
    from ucpl.runtime.targets import TargetFiles

    source, plan, out = simple
    synced: set[int] = set()
    recorded: list[bool] = []
    sync, append = TargetFiles.sync, Journal.append

    def watched_sync(self, indexes, **more):
        indexes = list(indexes)
        sync(self, indexes, **more)
        synced.update(indexes)

    def watched_append(self, tiles, fragments):
        per_file = -(-2_800_000 // (MEMORY // 2 // 4))  # tiles of one file
        recorded.append({tile.index // per_file for tile in tiles} <= synced)
        append(self, tiles, fragments)
        synced.clear()

    monkeypatch.setattr(TargetFiles, "sync", watched_sync)
    monkeypatch.setattr(Journal, "append", watched_append)
    run(plan, source, out)
    assert recorded and all(recorded)


@pytest.mark.fault("Disk and files", "ENOSPC while writing, EIO at a sync or a read", "status 3 or 4, resumable")
@pytest.mark.parametrize(
    "error", ["tile-written:40:enospc", "target-write:40:enospc", "target-sync:3:eio", "source-read:40:eio"]
)
def test_what_fails_is_kept_and_resumed(simple, error):
    source, plan, out = simple
    set_failpoints(error)
    with pytest.raises((UcplError, OSError)) as caught:
        run(plan, source, out)
    if isinstance(caught.value, UcplError):
        assert caught.value.exit_status == (3 if "source" in error else 4)
        assert "--resume" in str(caught.value.diagnostics[0])
    set_failpoints("")
    again = run(plan, source, out, resume=True)
    if "sync" not in error:
        assert again.tiles_resumed > 0
    assert again.bytes_read < again.bytes_needed or "sync" in error
    run(plan, source, out.with_name("wanted"))
    assert tree(out) == tree(out.with_name("wanted"))


@pytest.mark.fault("Interruption", "a read error halfway", "no finished tile is read again")
def test_no_journalled_tile_is_done_again(simple, monkeypatch):
    monkeypatch.setattr(sys.modules["ucpl.runtime.moving"], "SYNC_BYTES", 1 << 30)  # all is synced when the run fails
    source, plan, out = simple
    set_failpoints("source-read:40:eio")
    with pytest.raises(UcplError):
        run(plan, source, out, workers=1)
    set_failpoints("")
    again = run(plan, source, out, resume=True, workers=1)
    assert again.tiles_resumed == 39 or again.tiles_resumed == 38
    assert again.bytes_read == again.bytes_needed - again.tiles_resumed * (MEMORY // 4)


@pytest.mark.fault("Disk and files", "a source that is flipped before an interruption", "found after `--resume`")
def test_the_crc_of_a_member_is_checked_across_runs(simple):
    source, plan, out = simple
    path = source.root / "a"
    data = bytearray(path.read_bytes())
    data[100] ^= 1
    path.write_bytes(data)
    set_failpoints("source-read:60:eio")
    with pytest.raises(UcplError):
        run(plan, source, out)
    set_failpoints("")
    with pytest.raises(UcplError) as caught:
        run(plan, source, out, resume=True)
    assert caught.value.diagnostics[0].code == "E612"
    assert sorted(os.listdir(out.parent)) == ["src"]


@pytest.mark.fault("Interruption", "SIGINT (Ctrl-C) at a failpoint", "status 130, with the command that resumes")
@pytest.mark.parametrize("place", ["tile-written:30:interrupt", "synced:1:interrupt", "publish-before:1:interrupt"])
def test_an_interrupt_says_how_to_resume(simple, place):
    source, plan, out = simple
    set_failpoints(place)
    with pytest.raises(UcplError) as caught:
        run(plan, source, out)
    assert caught.value.exit_status == 130 and "--resume" in caught.value.diagnostics[0].remedy
    assert not out.exists()
    set_failpoints("")
    assert run(plan, source, out, resume=True).tiles_resumed > 0
    assert "to_a.pt" in tree(out) and sorted(os.listdir(out.parent)) == ["out", "src"]


def stopped(plan, source, out):
    set_failpoints("source-read:40:eio")
    with pytest.raises(UcplError):
        run(plan, source, out)
    set_failpoints("")
    return out.with_name(".out.ucpl-work")


@pytest.mark.fault("Interruption", "`--resume` with another plan or source", "refused with status 5")
def test_another_plan_or_source_is_not_resumed(simple):
    source, plan, out = simple
    stopped(plan, source, out)
    other = plan.of(moves=(plan.moves[0].replace(source=plan.moves[0].source[::-1].copy()),))
    with pytest.raises(UcplError) as caught:
        run(other, source, out, resume=True)
    assert caught.value.diagnostics[0].code == "E602" and caught.value.exit_status == 5
    os.utime(source.root / "a", ns=(5, 5))
    with pytest.raises(UcplError) as caught:
        run(plan, source, out, resume=True)
    assert caught.value.diagnostics[0].code == "E602"
    assert run(plan, source, out).tiles_resumed == 0  # afresh


@pytest.mark.fault(
    "Interruption", "a journal that is torn, garbled, without header or missing", "only intact records count"
)
@pytest.mark.parametrize("how", ["torn", "garbled", "headless", "none"])
def test_a_damaged_tail_of_the_journal_is_ignored(simple, how):
    source, plan, out = simple
    journal = stopped(plan, source, out) / "journal"
    data = bytearray(journal.read_bytes())
    head = data.index(b"\n") + 1
    if how == "torn":
        data = data[:-7]
    elif how == "garbled":
        data[head + 48 * 5 + 20] ^= 1
    elif how == "headless":
        data = data[: head // 2]
    journal.write_bytes(data)
    if how == "none":
        journal.unlink()
    again = run(plan, source, out, resume=True)
    assert again.tiles_resumed <= 5 if how in ("garbled", "headless", "none") else again.tiles_resumed > 5
    run(plan, source, out.with_name("wanted"))
    assert tree(out) == tree(out.with_name("wanted"))


def test_resume_of_a_finished_target_is_done_and_of_another_is_refused(simple):
    source, plan, out = simple
    run(plan, source, out, resume=True)  # nothing to resume: afresh
    before = tree(out)
    assert run(plan, source, out, resume=True).done_before
    other = evolve(plan, spec_digest="another")
    with pytest.raises(UcplError) as caught:
        run(other, source, out, resume=True)
    assert caught.value.diagnostics[0].code == "E506"
    (out / "to_a.pt").write_bytes(b"cut short")
    with pytest.raises(UcplError):
        run(plan, source, out, resume=True)
    run(plan, source, out, resume=True, force=True)
    assert tree(out) == before


@pytest.mark.fault("Interruption", "`--resume` with more `--memory`", "the same tiles")
def test_more_memory_does_not_change_the_tiles_of_a_resumed_run(simple):
    source, plan, out = simple
    stopped(plan, source, out)
    header = json.loads((out.with_name(".out.ucpl-work") / "journal").read_bytes().split(b"\n")[0])
    assert run(plan, source, out, resume=True, memory=64 << 20).tiles_resumed > 0
    assert header["tile"] == MEMORY // 2 // 4
    execute(plan, source, Torch(), out.with_name("wanted"))
    assert tree(out) == tree(out.with_name("wanted"))


@pytest.mark.fault("Interruption", "`--resume` with less `--memory`", "refused; the run can still be resumed")
def test_less_memory_than_the_tiles_of_an_interrupted_run_is_refused(simple):
    source, plan, out = simple
    set_failpoints("source-read:10:eio")
    with pytest.raises(UcplError):
        run(plan, source, out, memory=4 * MEMORY)
    set_failpoints("")
    with pytest.raises(UcplError) as caught:
        run(plan, source, out, memory=MEMORY, resume=True)
    assert caught.value.diagnostics[0].code == "E508"
    assert run(plan, source, out, memory=4 * MEMORY, resume=True).tiles_resumed > 0
