"""Plans for a loss.

The layouts that fit, their order, and plans equal to those of `ucpl plan`.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from tests.cli.command import FIXTURES, good, ucpl

TEXT = """ucpl 1

model m {
  dim l = 4, h = 12, f = 24
  dtype f32
  w : l f h
  n : l h
  state m : f32
}

layout x(tp, pp, dp) of m {
  mesh pp dp tp
  index l = l@pp
  assert dp < 6, "dp = {dp} is too many"
  file weights = torch "w_{tp}_{pp}"
  file optim   = torch "o_{tp}_{pp}_{dp}"
  w[l] = f@tp h as "w.{l}"
  n[l] = h      as "n.{l}"
  state * = pad(flat(each), dp)@dp in optim as "{state}"
}
"""
CALL = "own.ucpl:x(tp=2, pp=2, dp=4)"  # 16 ranks


@pytest.fixture
def spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.ucpl").write_text(TEXT)
    return tmp_path


def test_what_fits_uses_most_ranks_and_moves_least(spec: Path) -> None:
    done = good("contingency", "--from", CALL, "--lose", "1..2", "--unit", "node=2", "--keep", "tp", "--json").json
    assert done["ranks"] == 16 and [loss["left"] for loss in done["losses"]] == [14, 12]
    for loss in done["losses"]:
        ranks = [c["ranks"] for c in loss["choices"]]
        assert ranks == sorted(ranks, reverse=True) and all(n <= loss["left"] for n in ranks)
        tied = [(c["ranks"], c["cost"]["sent"]) for c in loss["choices"]]
        assert all(a[0] > b[0] or a[1] <= b[1] for a, b in pairwise(tied))
        assert all(c["degrees"]["dp"] < 6 and 4 % c["degrees"]["pp"] == 0 for c in loss["choices"])
    assert done["losses"][1]["choices"][0]["ranks"] == 12


def test_kept_axes_stay_and_a_rank_has_room(spec: Path) -> None:
    line = ("contingency", "--from", CALL, "--lose", "1", "--unit", "node=4", "--keep", "tp, pp")
    done = good(*line, "--json").json
    (loss,) = done["losses"]
    assert [c["degrees"] for c in loss["choices"]] == [{"tp": 2, "pp": 2, "dp": 3}]
    held = loss["choices"][0]["held"]
    assert held == (2 * 12 * 12 + 2 * 12) * 4 + (2 * 12 * 12 + 2 * 12) // 3 * 4
    assert good(*line, "--room", f"{held}").status == 0
    none = ucpl(*line, "--room", f"{held - 1}", "--json")
    assert none.status == 1 and none.json["losses"][0]["choices"] == []
    assert f"has room for {held - 1:,}" in none.json["losses"][0]["refused"][0]["why"]


def test_plans_are_written_and_are_those_of_the_verb(spec: Path) -> None:
    out = good("contingency", "--from", CALL, "--unit", "node=4", "--keep", "tp,pp", "-o", "plans").out
    assert sorted(p.name for p in (spec / "plans").iterdir()) == ["contingency.json", "lose-1-tp2-pp2-dp3.plan"]
    assert "lose-1-tp2-pp2-dp3.plan" in out and "12 (100.0%)" in out and "1 node" in out
    good("plan", "--from", CALL, "--to", "own.ucpl:x(tp=2, pp=2, dp=3)", "-o", "same.plan")
    assert good("diff", "plans/lose-1-tp2-pp2-dp3.plan", "same.plan").status == 0


def test_a_checkpoint_that_lost_a_rank(tmp_path: Path) -> None:
    done = good(
        "contingency", "--from", FIXTURES / "z1_dp4", "--unit", "rank=1", "-o", tmp_path / "plans", "--json"
    ).json
    (choice,) = done["losses"][0]["choices"]
    assert choice["degrees"]["dp"] == 3 and choice["ranks"] == 3
    good("apply", tmp_path / "plans" / choice["plan"], FIXTURES / "z1_dp4", tmp_path / "on-3")
    assert good("compare", FIXTURES / "z1_dp4", tmp_path / "on-3").status == 0


def test_what_cannot_be_asked(spec: Path) -> None:
    for more in (("--lose", "0"), ("--lose", "4..2"), ("--unit", "8"), ("--lose", "1..1000"), ("--keep", "tp,pp,dp")):
        done = ucpl("contingency", "--from", CALL, *more)
        assert done.status == 2 and "E171" in done.err, more
    done = ucpl("contingency", "--from", CALL, "--keep", "tp,node")
    assert (
        done.status == 2 and "--keep node: " in done.err and "has no such degree" in done.err and "it has " in done.err
    )
    done = ucpl("contingency", "--from", CALL, "--room", "0")
    assert "error[E173]: --room 0: no size" in done.err
    done = ucpl("contingency", "--from", CALL, "--lose", "16")
    assert done.status == 1 and "nothing fits" in done.out
