"""A run that returns to an older step.

The latest save is restored with its JSON, from memory or from a disk.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path

import pytest
from attrs import evolve

import ucpl
from tests.vault.states import Truth, call, memory
from ucpl.cli import main
from ucpl.storage.vaults.committed import get_commits
from ucpl.vault.persisted import Persisted, is_of, persist, ranks_json_text
from ucpl.vault.restore import read_state, restore_newest, write_ranks_json


@pytest.fixture(scope="module")
def truth(tmp_path_factory):
    return Truth(tmp_path_factory.mktemp("truth"), "dp=2", (1, 2, 3))


def save(here, truth, step: int) -> None:
    """A save with the JSON of each rank."""
    for writer in here.writers:
        assert writer.save(step, truth.cut[step][writer.rank], {"at": [step, writer.rank]})
        writer._join()
    here.turn()


def kept(here, truth, step: int, runs: Path) -> None:
    """On a disk, too."""
    save(here, truth, step)
    persist(here.vault.home, runs / f"step-{step}")


def before_times(runs: Path, name: str, written: float = 0, **more: object) -> None:
    """A folder of a version that recorded no commit time.

    written: the time of its text, in seconds.
    """
    path = runs / name / "ucpl/state.json"
    answer = json.loads(path.read_text())
    answer.pop("committed_ms", None)
    path.write_text(json.dumps({**answer, **more}))
    (runs / name / "ucpl/saved.json").unlink(missing_ok=True)
    if written:
        os.utime(path, (written, written))


def sources(home: Path, persisted: Path | None = None) -> list[str]:
    """In which order they are tried."""
    tried: list[str] = []

    def read(source: str) -> None:
        tried.append(source.rpartition("/")[2])
        ucpl.verify("vault:/nowhere")

    with pytest.raises(ucpl.UcplError):
        restore_newest(home, read, persisted=persisted)
    return tried


@pytest.mark.fault("Vaults", "a run that returns to an older step", "the last save is restored, with its JSON")
def test_a_run_that_went_back_is_restored_as_it_was_saved_last(tmp_path, truth):
    home, runs = tmp_path / "job", tmp_path / "runs"
    with memory(home, truth, domains=2, protect="none") as here:
        for step in (2, 3):
            kept(here, truth, step, runs)
        save(here, truth, 1)
        newest = here.vault.committed()
        assert newest is not None and newest.step == 1
        assert sources(home) == ["job@3", "job@2"]
        # Generation 1 was step 2, which was removed from memory. Sources without a time come last.
        assert sources(home, runs) == ["job@3", "job@2", "step-3", "step-2"]
        shutil.rmtree(runs / "step-3/ucpl")
        assert sources(home, runs) == ["job@3", "job@2", "step-2", "step-3"]
        found: list[str] = []
        assert restore_newest(home, found.append, persisted=runs).step == 1 and found == [f"vault:{home}@3"]


def test_a_persisted_step_that_is_damaged_is_passed_over(tmp_path, truth, capsys):
    home, runs = tmp_path / "job", tmp_path / "runs"
    with memory(home, truth, domains=2, protect="none") as here:
        for step in (1, 2):
            kept(here, truth, step, runs)
    shutil.rmtree(home)
    next(path for path in (runs / "step-2").rglob("*.pt")).unlink()
    asked = ["vault", "restore", str(home), str(tmp_path / "out"), "--to", call("dp=1"), "--else", str(runs)]
    assert main(asked) == 0
    assert "step 1 of" in capsys.readouterr().out and truth.step_of(tmp_path / "out") == 1


def test_the_json_is_that_of_what_was_restored(tmp_path, truth, capsys):
    home, runs = tmp_path / "job", tmp_path / "runs"
    with memory(home, truth, domains=2, protect="none") as here:
        for step in (1, 2):
            kept(here, truth, step, runs)
        assert here.vault.state(1) == {"at": [2, 1]} and here.vault.state(1, 1) == {"at": [1, 1]}
        assert here.vault.state(1, 7) == {}
        slot = get_commits(home, here.vault.job)[0].shards[0].slot
        here.vault.domain(0).arena(0, slot).unlink()
        out = tmp_path / "out"
        assert main(["vault", "restore", str(home), str(out), "--to", call("dp=1"), "--json"]) == 0
        printed = json.loads(capsys.readouterr().out)
        assert printed["step"] == 1 and printed["state"] == str(out / "ucpl/state.json")
        found = json.loads((out / "ucpl/state.json").read_text())
        assert found["ranks"] == {"0": {"at": [1, 0]}, "1": {"at": [1, 1]}} and found["step"] == 1
        assert truth.step_of(out) == 1
        file = tmp_path / "one.pt"
        file.touch()
        assert write_ranks_json(read_state(str(runs / "step-2")), file) == tmp_path / "one.pt.state.json"
        assert json.loads((tmp_path / "one.pt.state.json").read_text())["ranks"]["1"] == {"at": [2, 1]}
        assert write_ranks_json(read_state(str(tmp_path)), file) is None


def test_what_was_persisted_by_another_of_the_same_name_comes_behind(tmp_path, truth):
    """A vault of several hosts has the same ident each time.

    After the loss of memory, the generations define the order.
    """
    home, runs = tmp_path / "job", tmp_path / "runs"
    with memory(home, truth, domains=2, protect="none") as here:
        for step in (1, 3, 2):
            kept(here, truth, step, runs)
        beside = runs / "step-3/ucpl"
        told, sealed = json.loads((beside / "state.json").read_text()), (beside / "saved.json").read_bytes()
        (beside / "state.json").write_text(json.dumps({**told, "generation": 50}))
        (beside / "saved.json").unlink()
        assert sources(home, runs) == ["job@3", "step-2", "job@2", "step-3", "step-1"]
        before_times(runs, "step-3", generation=50)
        before_times(runs, "step-1")
        assert sources(home, runs) == ["job@3", "step-2", "job@2", "step-3", "step-1"]
        (beside / "state.json").write_bytes(ranks_json_text(told))
        (beside / "saved.json").write_bytes(sealed)
    shutil.rmtree(home)
    assert sources(home, runs) == ["step-2", "step-3", "step-1"]  # as they were saved, not by step


@pytest.mark.fault(
    "Vaults", "persisted folders without a time, also a stranger's", "named, and last; the others keep their order"
)
def test_a_folder_that_says_nothing_comes_last_and_leaves_the_others_as_they_were_saved(tmp_path, truth, capsys):
    """One stranger's folder or unreadable text used to sort all by step."""
    home, runs = tmp_path / "job", tmp_path / "runs"
    with memory(home, truth, domains=2, protect="none") as here:
        for step in (1, 3, 2):
            kept(here, truth, step, runs)
    shutil.rmtree(home)
    for name in ("step-0", "step-7"):
        (runs / name).mkdir()
    shutil.rmtree(runs / "step-1/ucpl")
    assert sources(home, runs) == ["step-2", "step-3", "step-7", "step-1", "step-0"]
    asked = ["vault", "restore", str(home), str(tmp_path / "out"), "--to", call("dp=1"), "--else", str(runs)]
    assert main(asked) == 0
    printed = capsys.readouterr().out
    assert "step 2 of" in printed and truth.step_of(tmp_path / "out") == 2
    assert printed.count("says when it was saved") == 3 and f"behind     {runs / 'step-7'}: " in printed
    assert main([*asked[:3], str(tmp_path / "again"), *asked[4:], "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["silent"] == [str(runs / f"step-{n}") for n in (7, 1, 0)]


@pytest.mark.fault(
    "Vaults",
    "a recreated vault next to folders of the one before; a clock set back",
    "the last commit is restored, whatever its step or number",
)
@pytest.mark.parametrize("clock", ["", "is set back"])
def test_of_two_vaults_what_was_saved_last_comes_first_whatever_its_step(tmp_path, truth, clock, monkeypatch):
    """The machine was lost, and the run returned to an older step.

    Its new vault starts again at generation one.
    """
    home, runs = tmp_path / "job", tmp_path / "runs"
    with memory(home, truth, domains=2, protect="none") as here:
        for step in (2, 3):
            kept(here, truth, step, runs)
    shutil.rmtree(home)
    with memory(home, truth, domains=2, protect="none") as here:
        kept(here, truth, 1, runs)
        if clock:
            monkeypatch.setattr(time, "time_ns", lambda: 1)
        save(here, truth, 2)
        persist(here.vault.home, runs / "step-2.generation-2")
        assert sources(home, runs) == ["job@2", "step-2.generation-2", "job@1", "step-1", "step-3", "step-2"]
    shutil.rmtree(home)
    for name in ("step-2", "step-3"):  # as a copy may have it
        os.utime(runs / name / "ucpl/state.json", (1e10, 1e10))
    assert sources(home, runs) == ["step-2.generation-2", "step-1", "step-3", "step-2"]


def test_what_older_versions_persisted_comes_by_generation_and_between_vaults_as_it_was_written(tmp_path, truth):
    """After all those with a commit time.

    Within a vault the order is that of the saves, also for late persists.
    """
    home, runs = tmp_path / "job", tmp_path / "runs"
    with memory(home, truth, domains=2, protect="none") as here:
        for step in (3, 2, 1):
            kept(here, truth, step, runs)
        for name, written in (("step-3", 900.0), ("step-2", 100.0), ("step-1", 200.0)):
            before_times(runs, name, written)
        assert sources(home, runs) == ["job@3", "step-1", "job@2", "step-2", "step-3"]
    shutil.rmtree(home)
    with memory(home, truth, domains=2, protect="none") as here:
        save(here, truth, 3)
        persist(here.vault.home, runs / "step-3.generation-1")
    shutil.rmtree(home)
    assert sources(home, runs) == ["step-3.generation-1", "step-1", "step-2", "step-3"]
    before_times(runs, "step-3.generation-1", 150.0)
    assert sources(home, runs) == ["step-1", "step-3.generation-1", "step-2", "step-3"]


def test_generations_that_an_older_version_committed_are_as_old_as_their_texts(tmp_path, truth):
    home, runs = tmp_path / "job", tmp_path / "runs"
    with memory(home, truth, domains=2, protect="none") as here:
        kept(here, truth, 3, runs)
    shutil.rmtree(home)
    with memory(home, truth, domains=2, protect="none") as here:
        for step in (1, 2):
            save(here, truth, step)
        for one in get_commits(home, here.vault.job):
            for number in range(2):
                here.vault.domain(number).commit(one.generation).write_bytes(evolve(one, at=0).sealed())
        assert [one.at for one in get_commits(home, here.vault.job)] == [0, 0]
        assert sources(home, runs) == ["job@2", "job@1", "step-3"]
        for number in range(2):
            os.utime(here.vault.domain(number).commit(1), (100.0, 100.0))
        assert sources(home, runs) == ["job@2", "step-3", "job@1"]


def test_a_generation_of_the_same_number_is_written_where_another_vault_of_that_ident_wrote_one(tmp_path, truth):
    """A vault of several hosts has the same ident each time.

    A starting server took the existing folder for its own.
    """
    with memory(tmp_path / "job", truth, domains=2, protect="none") as here:
        save(here, truth, 1)
        commit, ours = here.vault.committed(), here.vault.job
    assert commit is not None and commit.at > 0
    found = Persisted(tmp_path, 1, ours.ident, 1, commit.at)
    assert is_of(found, commit, ours) and is_of(evolve(found, at=0), commit, ours)
    assert not is_of(evolve(found, at=commit.at - 1), commit, ours) and not is_of(
        evolve(found, vault="x"), commit, ours
    )
