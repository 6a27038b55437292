"""Layers of pipelines are dealt to other stages; DeepSpeed loads and trains."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from tests.interop import parallel_models
from tests.interop.parallel import STEPS, Source, Target, check, check_spoiled, result, spoiled, whole, work
from ucpl.extents.pipeline import balanced, uniform

pytestmark = pytest.mark.interop

UNIFORM: dict[str, Any] = {"pp": 2, "method": "uniform", "dtype": "fp32", "optimizer": "adamw"}
WEIGHED = {**UNIFORM, "pp": 3, "method": "parameters", "dtype": "bf16", "groups": 1}
WHOLE = {**UNIFORM, "pp": 1, "optimizer": "nadam", "zero": {"round_robin_gradients": True, "parameter_alignment": True}}
WIDE = {**UNIFORM, "dtype": "bf16", "wide_gradients": True}  # BF16_Optimizer
# Without ZeRO no file has the layers of a stage, or the ties. Clipped, its norms differ from ZeRO's.
PLAIN = {**UNIFORM, "stage": 0, "clip": 0.0}

SOURCES = {
    "uniform": Source(4, UNIFORM),  # dp 2
    "weighed": Source(3, WEIGHED),  # dp 1
    "whole": Source(2, WHOLE),  # dp 2
    "wide": Source(2, WIDE),  # dp 1
    "numbered": Source(4, PLAIN),  # dp 2
}
TARGETS = (
    Target("uniform", 2, "zero1(pp=1, dp=2)", {"pp": 1}),
    Target("uniform", 3, "zero1(pp=3, dp=1)", {"pp": 3}),
    Target("uniform", 4, "zero1(pp=2, dp=2)", {}, via=("zero1(pp=3, dp=1)",)),
    Target("uniform", 4, 'zero1(pp=2, dp=2, partition="uniform")', {}, via=("zero1(pp=1, dp=3)",)),
    Target("uniform", 3, 'zero1(pp=3, dp=1, partition="parameters")', {"pp": 3, "method": "parameters"}),
    Target("uniform", 2, "zero1(pp=1, dp=2)", {"pp": 1}, spoiled=True),
    Target("weighed", 2, "zero1(pp=2, dp=1)", {"pp": 2}),
    Target("weighed", 2, "zero1(pp=1, dp=2)", {"pp": 1}),
    Target("weighed", 3, "zero1(stages=[3, 2, 2], dp=1)", {"pp": 3, "method": "uniform"}),
    Target("wide", 4, "zero1(pp=2, dp=2)", {}),
    Target("wide", 1, "zero1(pp=1, dp=1)", {"pp": 1}),
    Target("numbered", 2, "zero1(pp=2, dp=1)", {"stage": 1}),
    Target("numbered", 3, 'zero0(pp=3, dp=1, partition="uniform")', {"pp": 3}),
    Target("numbered", 4, "zero0(pp=2, dp=2)", {}, via=("zero1(pp=1, dp=3)",)),
    Target("whole", 4, 'zero1(pp=2, dp=2, partition="uniform")', {"pp": 2}),
    Target("whole", 3, 'zero1(pp=3, dp=1, partition="uniform")', {"pp": 3}),
)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return work(SOURCES, TARGETS, tmp_path_factory.mktemp("pipelines"))


@whole(TARGETS)
def test_deepspeed_loads_a_pipeline_at_other_stages_and_trains_on(target: Target, folder: Path) -> None:
    check(target, SOURCES, folder)


@spoiled(TARGETS)
def test_a_changed_moment_is_found(target: Target, folder: Path) -> None:
    check_spoiled(target, SOURCES, folder)


@pytest.mark.parametrize("name", SOURCES)
def test_sources_train_and_only_what_is_not_tied_drifts(name: str, folder: Path) -> None:
    found = result(folder, name)
    assert len({*found["before"], *found["after"]}) == STEPS + 2
    assert {d.split()[2].rpartition("/")[0] for d in found["apart"]} == (
        {parallel_models.LOOSE} if SOURCES[name].run["pp"] > 1 else set()
    )


def test_layers_are_dealt_as_deepspeed_deals_them() -> None:
    from deepspeed.runtime.utils import partition_balanced, partition_uniform

    draw = random.Random(7)
    for _ in range(500):
        weights = [draw.choice([0, 0, 12, 12, draw.randint(1, 60)]) for _ in range(draw.randint(1, 12))]
        stages = draw.randint(1, 5)
        assert uniform(len(weights), stages) == tuple(partition_uniform(len(weights), stages))
        assert balanced(weights, stages) == tuple(map(int, partition_balanced(weights, stages)))
