"""Experts (deepspeed.moe) are dealt to other ranks; DeepSpeed loads and trains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.interop.parallel import OLDER, Source, Target, check, check_source, check_spoiled, spoiled, whole, work

pytestmark = pytest.mark.interop

PAIRS: dict[str, Any] = {"ep": 2, "stage": 1, "dtype": "fp32", "optimizer": "adamw"}
ALONE = {**PAIRS, "ep": 4, "stage": 2, "optimizer": "nadam", "zero": {"round_robin_gradients": True}}
NARROW = {**PAIRS, "dtype": "bf16", "groups": 1}

SOURCES = {
    "pairs": Source(4, PAIRS),  # four ranks; two hold the same experts
    "alone": Source(4, ALONE),
    "narrow": Source(2, NARROW),
}
TARGETS = (
    Target("pairs", 4, "zero1(dp=4, ep=1)", {"ep": 1}),
    Target("pairs", 4, "zero1(dp=4, ep=4)", {"ep": 4}),
    Target("pairs", 2, "zero1(dp=2, ep=2)", {}),
    Target("pairs", 2, "zero2(dp=2, ep=1)", {"ep": 1, "stage": 2}),
    Target("pairs", 2, "zero1(dp=2, ep=2)", {}, via=(OLDER,)),
    Target("pairs", 4, "zero1(dp=4, ep=2)", {}, via=("zero2(dp=8, ep=4)", "zero1(dp=3, ep=1)")),
    Target("pairs", 4, "zero1(dp=4, ep=1)", {"ep": 1}, spoiled=True),
    Target("alone", 4, "zero2(dp=4, ep=2)", {"ep": 2}),
    Target("alone", 4, "zero1(dp=4, ep=1)", {"ep": 1, "stage": 1}),
    Target("alone", 2, "zero2(dp=2, ep=2)", {"ep": 2}),
    Target("narrow", 4, "zero1(dp=4, ep=4)", {"ep": 4}),
    Target("narrow", 2, "zero1(dp=2, ep=1)", {"ep": 1}),
)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return work(SOURCES, TARGETS, tmp_path_factory.mktemp("experts"))


@whole(TARGETS)
def test_deepspeed_loads_experts_on_other_ranks_and_trains_on(target: Target, folder: Path) -> None:
    check(target, SOURCES, folder)


@spoiled(TARGETS)
def test_a_changed_moment_is_found(target: Target, folder: Path) -> None:
    check_spoiled(target, SOURCES, folder)


@pytest.mark.parametrize("name", SOURCES)
def test_sources_train_and_ranks_agree(name: str, folder: Path) -> None:
    check_source(name, folder)
