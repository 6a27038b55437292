"""Pictures of plans.

The amounts between ranks equal those of the plan's runs, one by one.
"""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from tests.cli.command import ROOT, good, ucpl
from tests.counted import calls
from tests.pictures.drawn import SVG
from ucpl import api
from ucpl.extents import size_of
from ucpl.pictures.flows import grids, plan_picture
from ucpl.pictures.svg_plan import KINDS
from ucpl.planning.plan import Plan

BLOCK = str(ROOT / "docs" / "pictures" / "block.ucpl")
PAIRS = [
    ("zero(tp=2, pp=2, dp=2)", "zero(tp=4, pp=1, dp=3)"),
    ("zero(tp=1, pp=1, dp=20)", "zero(tp=2, pp=4, dp=1)"),
    ("zero(tp=1, pp=1, dp=1)", "zero(tp=1, pp=1, dp=1)"),
]


def plan_of(here: str, there: str, folder: Path) -> Plan:
    good("plan", "--from", f"{BLOCK}:{here}", "--to", f"{BLOCK}:{there}", "-o", folder / "a.plan")
    return api.load_plan(folder / "a.plan")


def told(plan: Plan) -> dict[tuple[int, int], int]:
    """Bytes from rank to rank, run by run and tensor by tensor."""
    out: dict[tuple[int, int], int] = defaultdict(int)
    for m in plan.moves:
        for i in range(len(m)) if m.kind != "check" else ():
            s, t = plan.sources[int(m.source[i])], plan.targets[int(m.target[i])]
            out[s.rank, t.rank] += size_of(t.dtype, int(m.shape[i].prod()))
    return dict(out)


@pytest.mark.parametrize(("here", "there"), PAIRS)
def test_amounts_between_ranks_are_those_of_the_runs(tmp_path: Path, here: str, there: str) -> None:
    plan = plan_of(here, there, tmp_path)
    wanted = told(plan)
    picture = plan_picture(plan)
    assert picture.unit == "B" and picture.written == sum(wanted.values())
    assert picture.own == sum(n for (s, t), n in wanted.items() if s == t)
    for grid in picture.grids:
        for i, (low, high) in enumerate(grid.sources):
            for j, (first, last) in enumerate(grid.targets):
                inside = sum(n for (s, t), n in wanted.items() if low <= s < high and first <= t < last)
                assert int(grid.amount[i, j]) == inside
    assert sum(e.amount for e in picture.entries) == picture.written
    assert sum(w.amount for w in picture.ways if w.kind == "copy") == picture.written


def test_the_grids_of_a_file_have_every_rank_and_all_that_moves(tmp_path: Path) -> None:
    plan = plan_of(*PAIRS[0], tmp_path)
    good("show", tmp_path / "a.plan", "--svg", tmp_path / "a.svg")
    root = ElementTree.parse(tmp_path / "a.svg").getroot()
    (first,) = [g for g in root.iter(f"{SVG}g") if g.attrib.get("data-grid") == "0..8 → 0..12"]
    titles = [t.text or "" for r in first.iter(f"{SVG}rect") for t in r.iter(f"{SVG}title")]
    pairs = [re.match(r"rank (\d+) of the source to rank (\d+) of the target\n([\d,.]+)", t) for t in titles]
    assert {(int(m[1]), int(m[2])) for m in pairs if m} == {(s, t) for s in range(8) for t in range(12)}
    exact = {(int(m[1]), int(m[2])): int(m[3].replace(",", "")) for m in pairs if m}
    assert {k: n for k, n in exact.items() if n} == told(plan)
    # Bars of states: as long as the moves.
    widths = {
        g.attrib["data-state"]: float(next(g.iter(f"{SVG}rect")).attrib["width"])
        for g in root.iter(f"{SVG}g")
        if "data-state" in g.attrib
    }
    assert widths["fp32"] == pytest.approx(2 * widths["weight"], rel=1e-3)


def test_ways_are_distinguished_and_each_has_its_words(tmp_path: Path) -> None:
    (tmp_path / "m.ucpl").write_text(
        "ucpl 1\nmodel m {\n  dim r = 4\n  w : r dtype bf16\n  b : r dtype bf16\n  state fp32, exp_avg : f32\n}\n"
        "layout a(tp) of m {\n  mesh tp\n  file weights = torch \"a_{tp}.pt\"\n  w = r@tp as \"w\"\n  b = r mean @tp as \"b\"\n"
        "  state fp32 = like as \"{key}.{state}\"\n}\n"
        "layout b() of m {\n  file weights = torch \"b.pt\"\n  w = r as \"w\"\n  b = r as \"b\"\n"
        "  state * = flat(pad(each, 8)) as \"{state}\"\n  fill state exp_avg = 0\n}\n"
    )  # fmt: skip
    good(
        "plan",
        "--from",
        f"{tmp_path / 'm.ucpl'}:a(tp=2)",
        "--to",
        f"{tmp_path / 'm.ucpl'}:b()",
        "-o",
        tmp_path / "a.plan",
    )
    ways = {(w.state, w.kind) for w in plan_picture(api.load_plan(tmp_path / "a.plan")).ways}
    assert ("weight", "mean") in ways and ("exp_avg", "fill, which the source lacks") in ways
    assert {kind for _, kind in ways} <= set(KINDS)
    good("show", tmp_path / "a.plan", "--svg", tmp_path / "a.svg")


def test_ranks_are_put_together_and_one_of_the_cells_is_drawn_again() -> None:
    ranks = np.arange(4096)
    found = list(grids(ranks, ranks, np.ones(4096, dtype=np.int64), (4096, 4096)))
    assert [(len(g.sources), int(g.amount.sum())) for g in found] == [(16, 4096), (16, 256), (16, 16)]
    assert found[-1].sources[:2] == ((0, 1), (1, 2))
    (prime, *_) = grids(np.arange(17), np.zeros(17, dtype=np.int64), np.ones(17, dtype=np.int64), (17, 1))
    assert len(prime.sources) <= 16 and prime.sources[-1][1] == 17 and int(prime.amount.sum()) == 17


def test_a_plan_of_thousands_of_ranks_is_a_picture_of_few_calls(tmp_path: Path) -> None:
    llama = str(ROOT / "benchmarks" / "llama.ucpl")
    verbs = [
        "--from",
        f"{llama}:megatron(tp = 8, pp = 8, dp = 64)",
        "--to",
        f"{llama}:megatron(tp = 8, pp = 4, dp = 96)",
    ]
    good("plan", *verbs, "-o", tmp_path / "a.plan")
    plan = api.load_plan(tmp_path / "a.plan")
    picture = plan_picture(plan)
    assert calls(lambda: plan_picture(plan)) < 10_000
    assert picture.ranks == (4096, 3072)
    good("show", tmp_path / "a.plan", "--svg", tmp_path / "a.svg")
    assert (tmp_path / "a.svg").stat().st_size < 400_000


def test_of_a_plan_all_is_drawn_or_nothing(tmp_path: Path) -> None:
    plan_of(*PAIRS[2], tmp_path)
    done = ucpl("show", tmp_path / "a.plan", "--svg", tmp_path / "a.svg", "--rank", "0")
    assert done.status == 2 and "error[E171]" in done.err and not (tmp_path / "a.svg").exists()
