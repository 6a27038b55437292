"""The differences of two plans.

None for equal plans, and each planted difference by its name.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from attrs import evolve

from tests.cli.command import FIXTURES, good, ucpl
from ucpl import api
from ucpl.planning import Plan
from ucpl.planning.difference import difference
from ucpl.planning.files import load_plan, save_plan

SOURCE = FIXTURES / "z1_dp4"


@pytest.fixture(scope="module")
def plan() -> Plan:
    return api.plan(str(SOURCE), "zero3(dp=3)")


def test_a_plan_and_its_file_do_the_same(plan: Plan, tmp_path: Path) -> None:
    save_plan(plan, tmp_path / "a.plan")
    save_plan(evolve(plan, name="other"), tmp_path / "b.plan")
    assert not difference(plan, load_plan(tmp_path / "a.plan"))
    done = good("diff", tmp_path / "a.plan", tmp_path / "b.plan")
    assert "the same" in done.out and "other" in done.out and done.status == 0
    assert good("diff", tmp_path / "a.plan", tmp_path / "b.plan", "--json").json["equal"] is True


def test_moves_in_other_tables_are_the_same(plan: Plan) -> None:
    assert not difference(plan, plan.of(moves=plan.moves))


def test_an_element_from_elsewhere_is_another_plan(plan: Plan) -> None:
    first = plan.moves[0]
    offset = first.source_offset.copy()
    offset[0] += 1
    found = difference(plan, plan.of(moves=[first.replace(source_offset=offset), *plan.moves[1:]]))
    target = plan.targets[int(first.target[0])]
    assert found and len(found.made) == 1 and target.file in found.made[0] and not found.reads and not found.writes


def test_a_row_less_is_another_plan(plan: Plan) -> None:
    first = plan.moves[0]
    less = plan.of(moves=[first.take(np.arange(len(first)) > 0), *plan.moves[1:]])
    found = difference(plan, less)
    ((state, kind, ours, theirs),) = found.tallies
    assert (state, kind) == (first.state, first.kind) and ours[1] - theirs[1] == int(first.shape[0].prod())


def test_other_degrees_and_states_are_reported(plan: Plan, tmp_path: Path) -> None:
    other = api.plan(str(SOURCE), "zero3(dp=2)")
    save_plan(plan, tmp_path / "a.plan")
    save_plan(evolve(other, dropped=(*other.dropped, "x of y: dropped by name")), tmp_path / "b.plan")
    done = ucpl("diff", tmp_path / "a.plan", tmp_path / "b.plan")
    assert done.status == 1 and done.out.endswith("different\n")
    for text in (
        "setting    target dp: 3, and 2",
        "writes     by the first alone",
        "x of y: dropped by name",
        "target     zero3",
    ):
        assert text in done.out, text
    told = ucpl("diff", tmp_path / "a.plan", tmp_path / "b.plan", "--json").json
    assert told["equal"] is False and len(told["costs"]) == 2 and told["writes"]["first"]
    assert ucpl("diff", tmp_path / "a.plan", tmp_path / "none.plan").status == 5
