"""More cases of test_deepspeed_grid.py: `make interop TESTS=tests/interop/further_grid.py`.

They take too long for every run. Sources of four and eight ranks in both forms of ZeRO-1, each to common topologies,
and back; sequence parallelism from ZeRO-3. Nine minutes on two cores, which up to eight processes share.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.interop.parallel import HOME, Source, Target, check, work
from tests.interop.test_deepspeed_grid import ALONE, GRID, LINE, NARROW, ONE

pytestmark = pytest.mark.interop

SCRIPT = Path(__file__).with_name("grid_job.py")
FOUR = [2, 1, 1, 2]
LINE_UNITS: dict[str, Any] = {**LINE, "stage": 3}

SOURCES = {
    "grid": Source(4, GRID),  # tp 2, pp 2
    "narrow": Source(4, NARROW),
    "wide": Source(8, GRID),  # tp 2, pp 2, dp 2
    "wide_narrow": Source(8, NARROW),
    "line_units": Source(4, LINE_UNITS),  # sp 2, dp 2
}


def everywhere(source: str, bf16: bool) -> tuple[Target, ...]:
    """The topologies of one source.

    ZeRO-3 is in the dtype of the source, without its form of BF16_Optimizer.
    """
    there = "zero3(tp=1, dp=4)"
    return (
        Target(source, 2, "zero1(tp=1, pp=1, dp=2)", {"tp": 1, "stages": ONE}),
        Target(source, 4, "zero1(tp=4, pp=1, dp=1)", {"tp": 4, "stages": ONE}),
        Target(source, 4, "zero1(tp=1, stages=[2, 1, 1, 2], dp=1)", {"tp": 1, "stages": FOUR}),
        Target(source, 8, "zero1(tp=2, pp=1, dp=4)", {"stages": ONE}),
        Target(source, 6, "zero1(tp=3, pp=2, dp=1)", {"tp": 3}),
        Target(source, 4, there, {"tp": 1, "stage": 3, **ALONE, **({"wide_gradients": False} if bf16 else {})}),
        Target(source, 8, f"{HOME}stored(tp=2, pp=2, dp=2)", {}, via=(there,)),
    )


TARGETS = (
    *everywhere("wide", False),
    *everywhere("wide_narrow", True),
    Target("grid", 4, "zero1(tp=1, stages=[2, 1, 1, 2], dp=1)", {"tp": 1, "stages": FOUR}),
    Target("grid", 8, "zero1(tp=2, pp=1, dp=4)", {"stages": ONE}),
    Target("narrow", 8, "zero1(tp=2, pp=1, dp=4)", {"stages": ONE}),
    Target("narrow", 6, "zero1(tp=3, pp=2, dp=1)", {"tp": 3}),
    Target("narrow", 2, "zero1(tp=1, pp=1, dp=2)", {"tp": 1, "stages": ONE}),
    Target("line_units", 4, "zero1(dp=4)", {"sp": 4, "stage": 1}),
    Target("line_units", 4, "zero3(dp=4)", {"sp": 4}),
    Target("line_units", 4, "zero3(dp=4)", {"sp": 4, "zero": {"reduce_scatter": False}}, loaded="summed"),
    Target("line_units", 2, "zero2(dp=2)", {"sp": 1, "stage": 2}),
)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return work(SOURCES, TARGETS, tmp_path_factory.mktemp("further"), SCRIPT)


@pytest.mark.parametrize("target", TARGETS, ids=str)
def test_deepspeed_loads_further_topologies_and_trains_on(target: Target, folder: Path) -> None:
    check(target, SOURCES, folder)
