"""Restores if the newest generation cannot be read.

The previous or the persisted one is restored, with a report.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path

import pytest

from tests.forking import Command
from tests.vault.states import Truth, call, memory
from ucpl.cli import main
from ucpl.storage.vaults.committed import get_commits, read_job
from ucpl.storage.vaults.domains import LocalDomain
from ucpl.vault.persisted import persist
from ucpl.vault.restore import restore_newest


@pytest.fixture(scope="module")
def truth(tmp_path_factory):
    return Truth(tmp_path_factory.mktemp("truth"), "dp=2", (1, 2, 3))


@pytest.fixture
def home(tmp_path, truth):
    """Steps 2 and 3 are committed without protection; step 1 is persisted."""
    with memory(tmp_path / "job", truth, domains=2, protect="none") as here:
        for step in (1, 2, 3):
            here.save(truth, step)
            here.turn()
            if step == 1:
                persist(here.vault.home, tmp_path / "runs/step-1")
    return tmp_path / "job"


def restore(home: Path, target: Path, *more: object, capsys) -> tuple[int, dict, str]:
    capsys.readouterr()
    status = main(["vault", "restore", str(home), str(target), "--to", call("dp=3"), "--json", *map(str, more)])
    printed = capsys.readouterr()
    return status, json.loads(printed.out) if printed.out else {}, printed.err


def hurt(home: Path, generation: int) -> None:
    """Remove the shard of rank 0."""
    job = read_job(home)
    assert job is not None
    commit = next(one for one in get_commits(home, job) if one.generation == generation)
    LocalDomain(home, 0).arena(0, commit.shards[0].slot).unlink()


@pytest.mark.fault(
    "Vaults",
    "the newest snapshots are lost beyond repair (F9)",
    "the one before, then the persisted ones; each skipped one is named",
)
def test_the_newest_that_can_be_had_is_restored(tmp_path, home, truth, capsys):
    runs = ("--else", tmp_path / "runs")
    status, found, _ = restore(home, tmp_path / "a", *runs, capsys=capsys)
    assert (status, found["step"], found["passed"]) == (0, 3, []) and truth.step_of(tmp_path / "a") == 3
    hurt(home, 3)
    status, found, _ = restore(home, tmp_path / "b", *runs, capsys=capsys)
    assert (status, found["step"], found["source"]) == (0, 2, f"vault:{home}@2") and truth.step_of(tmp_path / "b") == 2
    assert [one["source"] for one in found["passed"]] == [f"vault:{home}@3"] and "rank 0" in found["passed"][0]["why"]
    hurt(home, 2)
    status, found, _ = restore(home, tmp_path / "c", *runs, capsys=capsys)
    assert (status, found["step"], len(found["passed"])) == (0, 1, 2) and truth.step_of(tmp_path / "c") == 1
    assert found["source"] == str(tmp_path / "runs/step-1")
    status, _, said = restore(home, tmp_path / "d", capsys=capsys)
    assert status == 3 and "E691" in said and not (tmp_path / "d").exists()
    assert f"vault:{home}@3 was skipped: " in said
    assert "help: no earlier generation is committed; `ucpl vault restore` restores the newest" in said
    status, _, said = restore(home, tmp_path / "d", "--generation", 3, *runs, capsys=capsys)
    assert status == 3 and "E691" in said  # one that is named is that one
    assert f"help: vault:{home}@2 is the previous generation" in said and "--else FOLDER" in said
    shutil.rmtree(home)
    status, found, _ = restore(home, tmp_path / "e", *runs, capsys=capsys)
    assert (status, found["passed"]) == (0, []) and truth.step_of(tmp_path / "e") == 1
    status, _, said = restore(home, tmp_path / "f", "--else", tmp_path / "nothing", capsys=capsys)
    assert status == 3 and "E692" in said and "no folder step-N" in said


def killed(home: Path, target: Path, trap: str, *more: str) -> int:
    return Command("vault", "restore", home, target, "--to", call("dp=3"), *more, UCPL_FAIL_AT=trap).end()


@pytest.mark.fault(
    "Vaults",
    "a snapshot that kills its reader three times (F20)",
    "the one before it is read, with a message; a named one is read",
)
def test_a_generation_that_ends_whoever_reads_it_is_passed_over(tmp_path, home, truth, capsys):
    """F20."""
    for _ in range(3):
        assert killed(home, tmp_path / "out", "tile-written:1:kill") == -9
    status, found, _ = restore(home, tmp_path / "out", capsys=capsys)
    assert (status, found["step"]) == (0, 2) and truth.step_of(tmp_path / "out") == 2
    assert found["passed"] == [{"source": f"vault:{home}@3", "why": "3 attempts to read it did not end"}]
    status, found, _ = restore(home, tmp_path / "named", "--generation", 3, capsys=capsys)
    assert (status, found["step"]) == (0, 3)  # which is well, and has been read to its end: it is suspect no more
    status, found, _ = restore(home, tmp_path / "again", capsys=capsys)
    assert (status, found["step"], found["passed"]) == (0, 3, [])


@pytest.mark.fault(
    "Vaults",
    "SIGKILL of a restore at tiles and before publishing (F16)",
    "it resumes to the same bytes; the vault is unchanged",
)
@pytest.mark.parametrize("trap", ["tile-written:2:kill", "tile-written:5:kill", "publish-before:1:kill"])
def test_a_restore_that_is_killed_at_any_point_resumes(tmp_path, home, truth, capsys, trap):
    """F16: the bytes are the same, and the vault is unchanged."""
    before = {p: p.read_bytes() for p in home.rglob("*") if p.is_file()}
    target = tmp_path / "out"
    assert killed(home, target, trap) == -9 and not target.exists()
    status, found, said = restore(home, target, capsys=capsys)
    assert (status, found["step"]) == (0, 3), said
    assert truth.step_of(target) == 3
    assert before == {p: p.read_bytes() for p in home.rglob("*") if p.is_file()}


def test_what_cannot_be_counted_is_restored_and_who_is_interrupted_counts_for_nothing(tmp_path, home, monkeypatch):
    """Memory is full, or the vault belongs to another user.

    An interrupt with Ctrl-C is no failed attempt.
    """

    def stop(source: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        restore_newest(home, stop)
    assert not list(home.glob("tries.*"))

    def full(self: Path, text: str) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_text", full)
    read: list[str] = []
    assert restore_newest(home, read.append).step == 3 and read == [f"vault:{home}@3"]
