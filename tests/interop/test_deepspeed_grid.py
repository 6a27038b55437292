"""Tensor x pipeline x data parallelism and experts: DeepSpeed loads targets.

About four minutes on two quiet cores. Further topologies, and sources of eight ranks, are in further_grid.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.interop.parallel import (
    HOME,
    Source,
    Target,
    check,
    check_source,
    check_spoiled,
    spoiled,
    whole,
    work,
)

pytestmark = pytest.mark.interop

SCRIPT = Path(__file__).with_name("grid_job.py")

# A run with stages is a PipelineModule; one without them is one module with the same names, and an mpu.
GRID: dict[str, Any] = {"tp": 2, "stages": [3, 3], "stage": 1, "dtype": "fp32"}
NARROW = {**GRID, "dtype": "bf16", "wide_gradients": True}  # BF16_Optimizer
STAGED = {**GRID, "tp": 1, "ep": 2, "stages": [2, 4]}
BESIDE: dict[str, Any] = {"tp": 2, "ep": 2, "stage": 1, "dtype": "fp32"}
UNITS: dict[str, Any] = {"tp": 2, "stage": 3, "dtype": "fp32"}
LINE: dict[str, Any] = {"tp": 1, "sp": 2, "stage": 1, "dtype": "fp32"}
ONE, ALONE = [6], {"stages": None}

SOURCES = {
    "grid": Source(4, GRID),  # tp 2, pp 2
    "narrow": Source(4, NARROW),
    "staged": Source(4, STAGED),  # pp 2, ep 2, dp 2
    "beside": Source(4, BESIDE),  # tp 2, ep 2, dp 2
    "units": Source(4, UNITS),  # tp 2, dp 2
    "line": Source(4, LINE),  # sp 2, dp 2
}
TARGETS = (
    Target("grid", 2, "zero1(tp=1, pp=1, dp=2)", {"tp": 1, "stages": ONE}),
    Target("grid", 4, "zero1(tp=1, pp=2, dp=2)", {"tp": 1}),
    Target("grid", 4, "zero1(tp=2, pp=1, dp=2)", {"stages": ONE}),
    Target("grid", 4, "zero1(tp=4, pp=1, dp=1)", {"tp": 4, "stages": ONE}),
    Target("grid", 4, "zero1(tp=2, stages=[4, 2], dp=1)", {"stages": [4, 2]}),
    Target("grid", 4, "zero1(tp=2, pp=2, dp=1)", {}, via=("zero1(tp=4, stages=[2, 1, 3], dp=2)",)),
    Target("grid", 4, "zero3(tp=2, dp=2)", {"stage": 3, **ALONE}),
    Target("grid", 2, "zero3(tp=1, dp=2)", {"tp": 1, "stage": 3, **ALONE}),
    Target("grid", 4, f"{HOME}stored(tp=2, pp=2, dp=1)", {}, via=("zero3(tp=1, dp=2)",)),  # and back to its stages
    Target("grid", 4, "zero1(tp=1, stages=[2, 1, 1, 2], dp=1)", {"tp": 1, "stages": [2, 1, 1, 2]}),
    Target("grid", 6, "zero1(tp=3, pp=2, dp=1)", {"tp": 3}),  # unequal parts
    Target("grid", 4, "zero1(tp=2, pp=1, dp=2)", {"stages": ONE}, spoiled=True),
    Target("narrow", 4, "zero1(tp=1, stages=[2, 1, 1, 2], dp=1)", {"tp": 1, "stages": [2, 1, 1, 2]}),
    Target("narrow", 4, "zero1(tp=1, stages=[2, 4], dp=2)", {"tp": 1, "stages": [2, 4]}),
    Target("narrow", 4, "zero1(tp=4, pp=1, dp=1)", {"tp": 4, "stages": ONE}),
    Target("narrow", 6, "zero1(tp=3, pp=2, dp=1)", {"tp": 3}),
    Target("grid", 4, "zero1(tp=1, pp=2, dp=2, bf16=1, bf16_optimizer=1)", {"tp": 1, "dtype": "bf16"}),
    Target("narrow", 4, "zero3(tp=2, dp=2, bf16=0)", {"stage": 3, "dtype": "fp32", **ALONE}),
    Target("staged", 2, "zero1(pp=1, dp=2, ep=1)", {"ep": 1, "stages": ONE}),
    Target("staged", 4, "zero1(pp=1, dp=4, ep=4)", {"ep": 4, "stages": ONE}),
    Target("staged", 4, "zero1(stages=[3, 3], dp=2, ep=1)", {"ep": 1, "stages": [3, 3]}),
    Target("staged", 4, "zero1(tp=2, pp=2, dp=1, ep=2)", {"tp": 2}),
    Target("staged", 4, "zero1(tp=1, stages=[2, 4], dp=2, ep=2)", {}, via=("zero1(tp=2, stages=[3, 3], dp=2, ep=4)",)),
    Target("beside", 4, "zero1(tp=1, dp=4, ep=4)", {"tp": 1, "ep": 4}),
    Target("beside", 4, "zero1(tp=2, dp=2, ep=1)", {"ep": 1}),
    Target("beside", 2, "zero1(tp=2, dp=1, ep=2)", {}),
    Target("units", 2, "zero3(tp=1, dp=2)", {"tp": 1}),
    Target("units", 4, "zero3(tp=4, dp=1)", {"tp": 4}),
    Target("units", 4, "zero1(tp=2, dp=2)", {"stage": 1}),
    Target("units", 2, "zero2(tp=1, dp=2)", {"tp": 1, "stage": 2}),
    Target("line", 2, "zero1(dp=2)", {"sp": 1}),
    Target("line", 4, "zero1(dp=4)", {"sp": 4}),
    Target("line", 4, "zero3(dp=4)", {"sp": 4, "stage": 3}),
)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return work(SOURCES, TARGETS, tmp_path_factory.mktemp("grid"), SCRIPT)


@whole(TARGETS)
def test_deepspeed_loads_a_grid_at_other_degrees_and_trains_on(target: Target, folder: Path) -> None:
    check(target, SOURCES, folder)


@spoiled(TARGETS)
def test_a_changed_moment_is_found(target: Target, folder: Path) -> None:
    check_spoiled(target, SOURCES, folder)


@pytest.mark.parametrize("name", SOURCES)
def test_sources_train_and_ranks_agree(name: str, folder: Path) -> None:
    check_source(name, folder)
