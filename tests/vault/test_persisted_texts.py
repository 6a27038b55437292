"""The JSON of ranks on a disk, damaged there.

It is never restored as intact, and the tensors are.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from tests.vault.states import Truth, call, memory
from ucpl.cli import main
from ucpl.vault.persisted import SAVED, STATE, found_in, persist, read_ranks_json


@pytest.fixture(scope="module")
def persisted(tmp_path_factory):
    """Two persisted steps with the ranks' JSON; memory is lost."""
    top = tmp_path_factory.mktemp("persisted")
    truth = Truth(top / "truth", "dp=2", (1, 2))
    with memory(top / "job", truth, domains=2, protect="none") as here:
        for step in (2, 1):  # it went back
            for writer in here.writers:
                assert writer.save(step, truth.cut[step][writer.rank], {"position": 1200 + step})
                writer._join()
            here.turn()
            persist(here.vault.home, top / f"runs/step-{step}")
    shutil.rmtree(top / "job")
    return top / "runs", truth


def restored(runs: Path, top: Path, capsys) -> tuple[dict, str, dict]:
    """(the answer, standard error, the ranks' JSON).

    The printed text is compared with the answer.
    """
    out = [str(top / name) for name in ("out", "again")]
    asked = ["vault", "restore", str(top / "job"), "--to", call("dp=1"), "--else", str(runs)]
    shutil.rmtree(top, ignore_errors=True)
    top.mkdir()
    assert main([*asked[:3], out[0], *asked[3:], "--json"]) == 0
    printed = capsys.readouterr()
    assert main([*asked[:3], out[1], *asked[3:]]) == 0
    for_people = capsys.readouterr()
    assert for_people.err == printed.err and bool(printed.err) is ("damaged    " in for_people.out)
    state = top / "out/ucpl/state.json"
    return json.loads(printed.out), printed.err, json.loads(state.read_text()) if state.exists() else {}


DAMAGES = {
    "a digit": lambda data: data.replace(b"1201", b"1301"),
    "a bit": lambda data: bytes([data[0] ^ 1]) + data[1:],
    "cut short": lambda data: data[:20],
    "empty": lambda data: b"",
    "gone": lambda data: None,
}


@pytest.mark.fault(
    "Vaults",
    "damaged JSON of ranks in a persisted snapshot, or its digest",
    "reported and not restored; the tensors are those of the same step",
)
@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", ["state.json", "saved.json"])
def test_damaged_json_of_ranks_is_reported_and_no_older_step_is_restored(tmp_path, persisted, name, damage, capsys):
    whole, truth = persisted
    runs = shutil.copytree(whole, tmp_path / "runs")
    path = runs / "step-1/ucpl" / name
    data = DAMAGES[damage](path.read_bytes())
    is_hurt = data != path.read_bytes()
    if data is None:
        path.unlink()
    else:
        path.write_bytes(data)
    told, said, state = restored(runs, tmp_path / "to", capsys)
    assert (told["step"], truth.step_of(tmp_path / "to/out"), told["silent"]) == (1, 1, [])
    if name == "state.json":
        assert state == {} and told["state"] is None
        assert str(path) in said and "the JSON of the ranks is lost" in said and str(path) in told["damage"]
    else:  # saved.json is intact
        assert state["ranks"] == {"0": {"position": 1201}, "1": {"position": 1201}}
        assert (str(path) in told["damage"]) is (str(path) in said) is (is_hurt and damage != "gone")


def test_what_an_older_version_persisted_is_restored_without_its_digest(tmp_path, persisted, capsys):
    whole, _ = persisted
    runs = shutil.copytree(whole, tmp_path / "runs")
    for step in (1, 2):
        beside = runs / f"step-{step}/ucpl"
        (beside / "saved.json").unlink()
        told = json.loads((beside / "state.json").read_text())
        del told["committed_ms"]
        (beside / "state.json").write_text(json.dumps(told))
    told, said, state = restored(runs, tmp_path / "to", capsys)
    assert (told["step"], told["damage"], said) == (1, "", "") and state["ranks"]["1"] == {"position": 1201}
    (runs / "step-1/ucpl/state.json").write_bytes(b"{")  # the only one that says when it was saved
    told, said, state = restored(runs, tmp_path / "to", capsys)
    assert (told["step"], told["silent"], told["damage"]) == (2, [str(runs / "step-1")], "")
    shutil.rmtree(runs / "step-2")
    told, said, state = restored(runs, tmp_path / "to", capsys)
    assert told["step"] == 1 and "the JSON of the ranks is lost" in said and state == {}


def test_intact_texts_report_no_damage(tmp_path, persisted, capsys):
    told, said, state = restored(persisted[0], tmp_path / "to", capsys)
    assert (told["step"], told["damage"], said) == (1, "", "") and state["ranks"]["0"] == {"position": 1201}


@pytest.mark.parametrize("name", [STATE, SAVED])
def test_nobody_waits_for_the_writer_of_a_pipe(tmp_path, name):
    (tmp_path / "ucpl").mkdir()
    os.mkfifo(tmp_path / name)
    assert read_ranks_json(tmp_path) == {} and found_in(tmp_path, 3).generation < 0
