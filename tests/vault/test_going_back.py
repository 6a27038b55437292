"""A run that goes back to an older step, texts that are damaged, work that was left: what counts last is what is had."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import ucpl
from tests.vault.held import ROOT, Truth, call, memory
from tests.vault.small import job
from ucpl.cli import main
from ucpl.remotes.vaults.counted import committed
from ucpl.vault import Vault
from ucpl.vault.leftovers import DRILLS, WORKS, sweep, work_beside, worked_in
from ucpl.vault.looking import damage, mend_texts
from ucpl.vault.persisting import persist
from ucpl.vault.restoring import keep_state, restored, state_of


@pytest.fixture(scope="module")
def truth(tmp_path_factory):
    return Truth(tmp_path_factory.mktemp("truth"), "dp=2", (1, 2, 3))


def save(here, truth, step: int) -> None:
    """With what each rank gives beside it."""
    for writer in here.writers:
        assert writer.save(step, truth.cut[step][writer.rank], {"at": [step, writer.rank]})
        writer._join()
    here.turn()


def sources(home: Path, persisted: Path | None = None) -> list[str]:
    """In which order they are tried."""
    tried: list[str] = []

    def read(source: str) -> None:
        tried.append(source.rpartition("/")[2])
        ucpl.verify("vault:/nowhere")

    with pytest.raises(ucpl.UcplError):
        restored(home, read, persisted=persisted)
    return tried


def test_a_run_that_went_back_is_restored_as_it_was_saved_last(tmp_path, truth):
    home, runs = tmp_path / "job", tmp_path / "runs"
    with memory(home, truth, domains=2, protect="none") as here:
        for step in (2, 3):
            save(here, truth, step)
            persist(home, runs / f"step-{step}")
        save(here, truth, 1)
        newest = here.vault.committed()
        assert newest is not None and newest.step == 1
        assert sources(home) == ["job@3", "job@2"]
        # Generation 1 was step 2, which memory has no more; what nothing is known of comes behind its step.
        assert sources(home, runs) == ["job@3", "job@2", "step-3", "step-2"]
        (runs / "step-3/ucpl/state.json").unlink()
        assert sources(home, runs) == ["job@3", "job@2", "step-3", "step-2"]
        found: list[str] = []
        assert restored(home, found.append, persisted=runs).step == 1 and found == [f"vault:{home}@3"]


def test_a_persisted_step_that_is_damaged_is_passed_over(tmp_path, truth, capsys):
    home, runs = tmp_path / "job", tmp_path / "runs"
    with memory(home, truth, domains=2, protect="none") as here:
        for step in (1, 2):
            save(here, truth, step)
            persist(home, runs / f"step-{step}")
    shutil.rmtree(home)
    next(path for path in (runs / "step-2").rglob("*.pt")).unlink()
    asked = ["vault", "restore", str(home), str(tmp_path / "out"), "--to", call("dp=1"), "--else", str(runs)]
    assert main(asked) == 0
    assert "step 1 of" in capsys.readouterr().out and truth.step_of(tmp_path / "out") == 1


def test_the_json_is_that_of_what_was_restored(tmp_path, truth, capsys):
    home, runs = tmp_path / "job", tmp_path / "runs"
    with memory(home, truth, domains=2, protect="none") as here:
        for step in (1, 2):
            save(here, truth, step)
            persist(home, runs / f"step-{step}")
        assert here.vault.state(1) == {"at": [2, 1]} and here.vault.state(1, 1) == {"at": [1, 1]}
        assert here.vault.state(1, 7) == {}
        slot = committed(home, here.vault.job)[0].shards[0].slot
        here.vault.domain(0).arena(0, slot).unlink()
        out = tmp_path / "out"
        assert main(["vault", "restore", str(home), str(out), "--to", call("dp=1"), "--json"]) == 0
        told = json.loads(capsys.readouterr().out)
        assert told["step"] == 1 and told["state"] == str(out / "ucpl/state.json")
        found = json.loads((out / "ucpl/state.json").read_text())
        assert found["ranks"] == {"0": {"at": [1, 0]}, "1": {"at": [1, 1]}} and found["step"] == 1
        assert truth.step_of(out) == 1
        file = tmp_path / "one.pt"
        file.touch()
        assert keep_state(state_of(str(runs / "step-2")), file) == tmp_path / "one.pt.state.json"
        assert json.loads((tmp_path / "one.pt.state.json").read_text())["ranks"]["1"] == {"at": [2, 1]}
        assert keep_state(state_of(str(tmp_path)), file) is None


@pytest.mark.parametrize("damaged", ["flipped", "empty", "gone"])
@pytest.mark.parametrize("name", ["job.json", "commit.1.json"])
@pytest.mark.parametrize("by", ["scrub", "serve"])
def test_damaged_texts_are_told_and_mended(tmp_path, name, damaged, by, capsys):
    with job(tmp_path / "job", 3, "raim5") as here:
        here.start("first")
        for number in range(3):
            here.serve(number)
        here.save(1)
        here.turn()
        path = here.path(1, name)
        whole = path.read_bytes()
        here.stop(1)
        if damaged == "gone":
            path.unlink()
        else:
            path.write_bytes(whole[:40] + bytes([whole[40] ^ 1]) + whole[41:] if damaged == "flipped" else b"")
        found = damage(tmp_path / "job")[1]
        assert [(one.chunks, one.can_be_rebuilt) for one in found] == [(0, True)] and found[0].what.startswith("d1: ")
        assert main(["vault", "verify", str(tmp_path / "job")]) == 1 and "can be rebuilt" in capsys.readouterr().out
        if by == "scrub":
            assert (
                main(["vault", "scrub", str(tmp_path / "job")]) == 0 and "mended     1 texts" in capsys.readouterr().out
            )
        else:
            here.serve(1)
        assert path.read_bytes() == whole and mend_texts(tmp_path / "job") == 0
        assert damage(tmp_path / "job")[1] == []


def test_a_server_that_starts_mends_what_is_damaged(tmp_path, truth):
    """The next loss would take with it what alone says that a generation counts."""
    home = tmp_path / "job"
    with memory(home, truth, domains=2, protect="mirror") as here:
        save(here, truth, 1)
        here.vault.domain(0).commit(1).write_bytes(b"{}")
    vault = Vault.at(home)
    with memory(home, truth, domains=2, protect="mirror", run="second"):
        shutil.rmtree(vault.domain(1).folder)
        assert [one.step for one in committed(home, vault.job)] == [1]


def test_work_that_was_left_is_removed_and_that_of_the_living_is_not(tmp_path):
    left, living, file = (work_beside(tmp_path / f"step-{n}") for n in (2, 3, 4))
    elsewhere = tmp_path / ".step-5.another host.0123.ucpl-vault"
    for path in (left, living, elsewhere, tmp_path / "ucpl-drill-a", tmp_path / "other"):
        (path / "in").mkdir(parents=True)
    file.write_text("no folder")
    with worked_in(living):
        assert sweep(tmp_path, WORKS) == [left]
    assert sweep(tmp_path, DRILLS) == [tmp_path / "ucpl-drill-a"]
    assert {path.name for path in tmp_path.iterdir()} == {living.name, file.name, elsewhere.name, "other"}


def test_what_was_persisted_by_another_of_the_same_name_comes_behind(tmp_path, truth):
    """A vault of several hosts is called by one ident each time it is made; once memory is lost, generations tell the order."""
    home, runs = tmp_path / "job", tmp_path / "runs"
    with memory(home, truth, domains=2, protect="none") as here:
        for step in (1, 3, 2):
            save(here, truth, step)
            persist(home, runs / f"step-{step}")
        told = json.loads((runs / "step-3/ucpl/state.json").read_text())
        (runs / "step-3/ucpl/state.json").write_text(json.dumps({**told, "generation": 50}))
        assert sources(home, runs) == ["job@3", "step-2", "job@2", "step-3", "step-1"]
        (runs / "step-3/ucpl/state.json").write_text(json.dumps(told))
    shutil.rmtree(home)
    assert sources(home, runs) == ["step-2", "step-3", "step-1"]  # as they were saved, not by step


def serving(home: Path, runs: Path, *traps: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "ucpl", "vault", "serve", str(home), "--domain", "0"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **({"UCPL_FAIL_AT": traps[0]} if traps else {})}
    return subprocess.Popen(
        [*command, "--every", "1", "--into", str(runs)], env=environment, stdout=subprocess.PIPE, text=True
    )


def wait_for(path: Path) -> None:
    end = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < end, path
        time.sleep(0.02)


def test_a_server_that_was_killed_while_it_wrote_writes_it_once_more(tmp_path, truth):
    """What it left is removed; and a step that was written before a run went back stays beside the new one."""
    home, runs = tmp_path / "job", tmp_path / "runs"
    vault = Vault.make(home, ranks=1)
    work_beside(runs / "step-9").mkdir(parents=True)
    one = Truth(tmp_path / "one", "dp=1", (1, 2))
    with vault.writer(0, layout=one.layout, strict=True, wait=60) as writer:
        killed = serving(home, runs, "vault-persist:1:kill")
        writer.save(1, one.cut[1][0])
        assert killed.wait(60) == -signal.SIGKILL and any(p.name.startswith(".step-1.") for p in runs.glob(WORKS))
        living = serving(home, runs)
        try:
            wait_for(runs / "step-1")
            assert not list(runs.glob(WORKS))
            writer.save(2, one.cut[2][0])
            writer.save(1, one.cut[1][0])
            wait_for(runs / "step-1.generation-3")
            assert one.step_of(runs / "step-1.generation-3") == 1 and one.step_of(runs / "step-2") == 2
        finally:
            living.terminate()
            living.wait(60)


def flip(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[:40] + bytes([data[40] ^ 1]) + data[41:])


@pytest.mark.parametrize("damaged", ["job.json", "commit.1.json", "job.json is gone", "job.json alone"])
def test_gc_keeps_what_is_damaged_and_may_be_all_that_is_left(tmp_path, damaged, capsys):
    home = tmp_path / "root/job"
    with job(home, 2, "mirror") as here:
        here.start("first")
        for number in range(2):
            here.serve(number)
        here.save(1)
        here.turn()
    for number in range(2):
        path = here.path(number, damaged.split()[0])
        if damaged.endswith("gone"):
            path.unlink()
        else:
            flip(path)
        if damaged.endswith("alone"):
            here.path(number, "commit.1.json").unlink()
    before = {path: path.read_bytes() for path in home.rglob("*") if path.is_file()}
    assert main(["vault", "gc", str(tmp_path / "root")]) == 0
    assert "kept" in capsys.readouterr().out
    assert before == {path: path.read_bytes() for path in home.rglob("*") if path.is_file()}
    assert main(["vault", "gc", str(tmp_path / "root"), "--with-state"]) == 0
    assert "removed" in capsys.readouterr().out and not home.exists()


def test_gc_leaves_what_is_no_vaults(tmp_path, capsys):
    """A folder d0 alone makes none, nor does a name that begins as ours do."""
    for name, file in (("data", "r_results.csv"), ("more", "commit.message"), ("empty", "")):
        (tmp_path / name / "d0").mkdir(parents=True)
        if file:
            (tmp_path / name / "d0" / file).write_text("mine")
    Vault.make(tmp_path / "mixed")
    (tmp_path / "mixed/d0/r_results.csv").write_text("mine")
    assert main(["vault", "gc", str(tmp_path), "--with-state"]) == 0
    out = capsys.readouterr().out
    assert "kept       " in out and "mixed" in out and "data" not in out and "empty" not in out
    assert (tmp_path / "data/d0/r_results.csv").exists() and (tmp_path / "mixed/d0/r_results.csv").exists()
    assert (tmp_path / "more/d0/commit.message").exists() and (tmp_path / "empty/d0").exists()


def test_a_vault_of_which_no_text_says_what_it_is_is_called_damaged(tmp_path):
    vault = Vault.make(tmp_path / "job")
    flip(vault.domain(0).job())
    with pytest.raises(ucpl.UcplError, match=r"E692: .*job\.json, which says which job it is of, is damaged"):
        Vault.at(vault.home)


def test_who_finds_what_counts_damaged_everywhere_says_so(tmp_path):
    with job(tmp_path / "job", 2, "mirror") as here:
        here.start("first")
        for number in range(2):
            here.serve(number)
        here.save(1)
        here.turn()
        for number in range(2):
            flip(here.path(number, "commit.1.json"))
    with pytest.raises(ucpl.UcplError, match=r"E692: .* is damaged in each domain: commit\.1\.json"):
        ucpl.verify(f"vault:{tmp_path / 'job'}")
