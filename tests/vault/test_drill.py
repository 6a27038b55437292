"""`ucpl vault drill` finds planted faults, and none otherwise."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

import pytest

from tests.vault.states import call
from ucpl.cli import main, vault
from ucpl.storage.vaults import memory
from ucpl.vault.drill import MOST, drill
from ucpl.vault.survival import Survival


def told(capsys, *words: object) -> tuple[int, dict]:
    capsys.readouterr()
    status = main(["vault", "drill", *map(str, words), "--json"])
    return status, json.loads(capsys.readouterr().out)


def drilled(top: Path, layout: str, domains: int, protect: str, last: str = "") -> dict:
    """Results by fault, up to the last wanted one.

    Each is (cases, newest, before, refused, wrong).
    """
    found = {}
    with closing(drill(layout, top / "root", domains, protect)[1]) as cases:
        for one in cases:
            found[one.fault] = (one.cases, one.kept, one.before, one.refused, len(one.wrong))
            if one.fault == last:
                break
    assert not (top / "root").exists()
    return found


@pytest.mark.fault(
    "Vaults",
    "`ucpl vault drill`: SIGKILL at each failpoint of a save, then the loss of each domain; 271 cases",
    "the prediction of the plan; a wrong prediction is found",
)
@pytest.mark.parametrize(("domains", "protect"), [(2, "mirror"), (4, "raim5"), (2, "none"), (4, "rs(2, 2)")])
def test_whatever_is_tried_comes_out_as_it_was_foretold(tmp_path, domains, protect):
    found = drilled(tmp_path, call(f"dp={domains}"), domains, protect)
    assert not any(wrong for *_, wrong in found.values())
    assert all(cases == sum(more) for cases, *more in found.values())
    killed = found["all killed, at each point of a save and its commit"]
    assert killed[0] == 10 * domains + 1 - (domains if protect == "none" else 0) and killed[1] == domains
    assert found["the same, and a domain lost"][0] == domains * killed[0]
    assert (found[f"1 of {domains} domains lost"][3] == 0) == (protect != "none")
    two = found[f"2 of {domains} domains lost"]
    assert (two[1] == two[0]) == (protect == "rs(2, 2)")
    assert found["commit records damaged, in all domains but one"][1] == 3 * domains


def test_the_verb_reports_the_results(capsys):
    status, found = told(capsys, call(""), "--domains", 1)
    assert status == 0 and found["protect"] == "none"
    assert {f["fault"] for f in found["faults"]} >= {"1 of 1 domains lost", "state changed right after a save"}
    assert not any(f["wrong"] for f in found["faults"])
    main(["vault", "drill", call(""), "--domains", "1"])
    assert "none with another result than predicted" in capsys.readouterr().out


def test_the_verb_ends_with_no_where_anything_else_comes_out(capsys, monkeypatch):
    monkeypatch.setattr(memory.ChunkedFile, "read", lambda self, low, out: self._got(out, low))
    status, found = told(capsys, call(""), "--domains", 1)
    assert status == 1 and sum(len(f["wrong"]) for f in found["faults"]) == 1


def test_bytes_that_are_not_held_against_digests_are_found(tmp_path, monkeypatch):
    monkeypatch.setattr(memory.ChunkedFile, "read", lambda self, low, out: self._got(out, low))
    fault = "a flipped bit, in saves of ranks and in redundancy"
    assert drilled(tmp_path, call("dp=2"), 2, "mirror", fault)[fault][4] == 4


def test_bytes_that_are_no_step_s_are_found(tmp_path, monkeypatch):
    def zeros(self: object, rank: int, into: memoryview, position: int) -> None:
        into[:] = bytes(len(into))

    monkeypatch.setattr(memory.Memory, "fill", zeros)
    fault = "1 of 2 domains lost"
    assert drilled(tmp_path, call("dp=2"), 2, "mirror", fault)[fault][4] == 2


def test_a_plan_that_foretells_too_little_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr(Survival, "gone", lambda self, lost: ())
    fault = "2 of 3 domains lost"
    assert drilled(tmp_path, call("dp=3"), 3, "raim5", fault)[fault][4] == 3


def test_large_tensors_are_drilled_as_small_ones(tmp_path):
    file = tmp_path / "large.ucpl"
    file.write_text(
        "ucpl 1\nmodel m {\n  dim h = 1048576, k = 65536\n  w : h k dtype bf16\n}\n"
        'layout job(dp) of m {\n  framework torch()\n  mesh dp\n  file weights = memory "w_{dp}"\n  w = h@dp k as "w"\n}\n'
    )
    plan, cases = drill(f"{file}:job(dp=2)", tmp_path / "root", 2, "mirror", lose=1)
    assert max(k.size for kept in plan.foreseen.kept for k in kept) == MOST
    assert not any(d.wrong for d in cases)


def test_a_framework_s_own_layout_is_not_drilled(tmp_path, capsys, monkeypatch):
    model = tmp_path / "m.ucpl"
    model.write_text("ucpl 1\nmodel m {\n  dim h = 8\n  w : h dtype bf16\n  state fp32, exp_avg, exp_avg_sq : f32\n}\n")
    monkeypatch.setattr(vault, "MEMORY", tmp_path)
    before = sorted(tmp_path.iterdir())
    assert main(["vault", "drill", "zero1(dp=2)", "--model", f"{model}:m", "--domains", "2"]) == 2
    assert "E693" in capsys.readouterr().err
    assert sorted(tmp_path.iterdir()) == before  # nothing is left of the drill that did not start
