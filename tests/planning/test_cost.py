"""The estimated cost of a plan.

Compared with its single moves, and with the counters of a run.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

from hypothesis import given, settings

from tests.cli.command import FIXTURES
from tests.laws import moves as mv
from ucpl import api
from ucpl.extents import STORED, key_text
from ucpl.graph import build
from ucpl.placement import locate
from ucpl.planning import Plan, order
from ucpl.planning.cost import cost_of
from ucpl.testing import Example, layout_pairs, models


def told(plan: Plan) -> dict[str, dict[int, int]]:
    """The same by elements: bytes by rank."""
    here = {(s.file, key_text(s.key)): s for s in plan.sources}
    there = {(t.file, key_text(t.key)): t for t in plan.targets}
    out: dict[str, dict[int, int]] = {name: defaultdict(int) for name in ("read", "sent", "given")}
    for fill in mv.fills(plan):
        source, target = here[fill.source[0]], there[fill.target[0]]
        size = STORED[source.dtype].itemsize
        out["read"][target.rank] += size
        if fill.kind != "check" and source.rank != target.rank:
            out["sent"][target.rank] += size
            out["given"][source.rank] += size
    return out


@given(models().flatmap(layout_pairs))
@settings(max_examples=12)
def test_bytes_by_rank_are_those_of_the_elements(pair: tuple[Example, Example]) -> None:
    source, target = (locate(e.layout()) for e in pair)
    plan = order(build(source, target))
    cost = cost_of(plan)
    for name, ranks in told(plan).items():
        column = getattr(cost, name).tolist()
        assert {r: n for r, n in enumerate(column) if n} == ranks, name
    assert cost.bytes_written == sum(t.numel * STORED[t.dtype].itemsize for t in plan.targets if t.shares is None)
    assert cost.files_written == len({t.file for t in plan.targets})
    assert cost.files_read == len({fill.source[0][0] for fill in mv.fills(plan)})


def test_a_run_reads_what_was_reported(tmp_path: Path) -> None:
    plan = api.plan(str(FIXTURES / "z1_dp4"), "zero3(dp=3)")
    cost = cost_of(plan)
    report = api.apply(plan, FIXTURES / "z1_dp4", tmp_path / "made")
    # Binding to the files adds checks of second names, and removes shared storages: a tie of this small model.
    assert 0.85 * cost.bytes_read <= report.bytes_needed <= 1.15 * cost.bytes_read
    assert cost.bytes_written <= report.bytes_target  # files have heads, too
    assert cost.bytes_sent == int(cost.given.sum())


def test_runs_are_counted_where_columns_are_cut() -> None:
    text = """ucpl 1
model m {
  dim a = 6, b = 8
  dtype f32
  w : a b
}
layout x(tp, dp) of m {
  mesh tp dp
  file weights = torch "{tp}.{dp}"
  w = a@dp b@tp as "w"
}
"""
    one, two = (locate(Example(text, call).layout()) for call in ("x(tp = 1, dp = 1)", "x(tp = 2, dp = 3)"))
    there, back = cost_of(order(build(one, two))), cost_of(order(build(two, one)))
    assert there.seeks.tolist() == [2] * 6  # of each rank, a part of two rows of eight
    assert (there.bytes_sent, there.bytes_read, back.bytes_sent) == (5 * 32, 6 * 32, 5 * 32)
    assert back.seeks.tolist() == [6, 0, 0, 0, 0, 0]  # parts that are runs of their own files
