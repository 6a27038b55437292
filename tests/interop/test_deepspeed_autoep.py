"""AutoEP with models of transformers: experts are dealt to other ranks.

DeepSpeed writes, ucpl converts, and DeepSpeed loads plainly and trains. Takes about five minutes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.interop.parallel import Source, Target, check, check_source, check_spoiled, spoiled, whole, work

pytestmark = pytest.mark.interop

PAIRS: dict[str, Any] = {"ep": 2, "auto": "mixtral", "stage": 1, "dtype": "fp32", "optimizer": "adamw"}
NARROW = {**PAIRS, "auto": "qwen3_moe", "stage": 2, "dtype": "bf16", "groups": 1, "data_first": True}

SLICED = {**PAIRS, "stage": 3, "zero": {"sub_group_size": 300}}  # several sub-groups, of experts too

SOURCES = {
    "pairs": Source(4, PAIRS),  # four ranks; two hold the same experts
    "narrow": Source(4, NARROW),  # its first layer is dense
    "sliced": Source(4, SLICED),  # no expert has a file: ranks with the same experts have slices
}
TARGETS = (
    Target("pairs", 4, "zero1(dp=4, ep=4)", {"ep": 4}),
    Target("pairs", 2, "zero2(dp=2, ep=1)", {"ep": 1, "stage": 2}),
    Target("pairs", 4, "zero1(dp=4, ep=2)", {}, via=("zero2(dp=8, ep=4)", "zero1(dp=3, ep=1)")),
    Target("pairs", 2, "zero1(dp=2, ep=2)", {}, spoiled=True),
    Target("narrow", 4, "zero1(dp=4, ep=1)", {"ep": 1, "stage": 1}),
    Target("sliced", 4, "zero3(dp=4, ep=4)", {"ep": 4}),
    Target("sliced", 2, "zero3(dp=2, ep=1)", {"ep": 1}),
    Target("sliced", 4, "zero3(dp=4, ep=2)", {}, via=("zero1(dp=8, ep=4)", "zero3(dp=3, ep=1, sub_group_size=300)")),
    Target("sliced", 4, "zero1(dp=4, ep=2)", {"stage": 1}),
    Target("narrow", 4, "zero3(dp=4, ep=2)", {"stage": 3}),
)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return work(SOURCES, TARGETS, tmp_path_factory.mktemp("autoep"))


@whole(TARGETS)
def test_deepspeed_loads_experts_of_autoep_on_other_ranks_and_trains_on(target: Target, folder: Path) -> None:
    check(target, SOURCES, folder)


@spoiled(TARGETS)
def test_a_changed_moment_is_found(target: Target, folder: Path) -> None:
    check_spoiled(target, SOURCES, folder)


@pytest.mark.parametrize("name", SOURCES)
def test_sources_train_and_ranks_agree(name: str, folder: Path) -> None:
    check_source(name, folder)
