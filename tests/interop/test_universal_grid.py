"""Universal folders of tp x pp checkpoints, loaded at other degrees.

Takes about two minutes. The loader, `load_universal`, does not restore buffers of any folder.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.interop.parallel import PEER, Source, Target, check, check_spoiled, spoiled, whole, work
from tests.interop.test_deepspeed_grid import ALONE, GRID, NARROW, ONE, SCRIPT

pytestmark = pytest.mark.interop

# 28 words, to a multiple of 6 x tp as Megatron pads them: 30 rows at tp 1, 36 at tp 2, 48 at tp 4
DIVISOR = "make_vocab_size_divisible_by=6"
SOURCES = {"grid": Source(4, GRID), "narrow": Source(4, NARROW), "padded": Source(4, {**GRID, "rows": 36})}
BY = ("universal()",)


def loaded(source: str, world: int, run: dict[str, Any], *via: str, spoiled: bool = False) -> Target:
    """A folder of a source, loaded by engines of such a run."""
    ways = "".join(f" {key}{value}" for key, value in run.items())
    return Target(source, world, "universal()", {**run, "universal": True}, via, spoiled, ways or "the same")


TARGETS = (
    loaded("grid", 2, {"tp": 1, "stages": ONE}),
    loaded("grid", 4, {"tp": 1}),
    loaded("grid", 4, {"stages": ONE}),
    loaded("grid", 4, {}),
    loaded("grid", 4, {"tp": 4, "stages": ONE}),
    loaded("grid", 4, {"stage": 2, **ALONE}),
    loaded("grid", 4, {}, "zero1(tp=1, pp=1, dp=2)"),
    loaded("grid", 4, {}, spoiled=True),
    loaded("grid", 4, {"tp": 1}, PEER),
    Target("grid", 4, "zero1(tp=2, dp=2)", {"keeps_buffers": True, **ALONE}, (PEER,)),
    # And back to files of layers: names give the layers, the call gives the stages and ties.
    Target("grid", 4, "zero1(tp=1, stages=[2, 4], dp=2)", {"tp": 1, "stages": [2, 4]}, BY),
    Target("narrow", 4, 'zero1(tp=2, pp=2, partition="uniform", tied=[0, 5], dp=1, bf16_optimizer=1)', {}, BY),
    Target("grid", 4, "zero1(tp=2, stages=[4, 2], dp=1)", {"keeps_buffers": True, "stages": [4, 2]}, (PEER,)),
    loaded("narrow", 4, {"tp": 1, "stages": [2, 4]}),
    loaded("padded", 4, {"tp": 4, "stages": ONE, "rows": 48}),
    loaded("padded", 4, {"tp": 1, "rows": 30}),
    Target("padded", 4, f"zero1(tp=4, pp=1, {DIVISOR})", {"tp": 4, "stages": ONE, "rows": 48}),
    Target("padded", 4, f"zero1(tp=1, pp=2, dp=2, {DIVISOR})", {"tp": 1, "rows": 30}),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return work(SOURCES, TARGETS, tmp_path_factory.mktemp("universal-grid"), SCRIPT)


@whole(TARGETS)
def test_deepspeed_loads_a_universal_folder_of_a_grid_at_other_degrees_and_trains_on(
    target: Target, folder: Path
) -> None:
    check(target, SOURCES, folder)


@spoiled(TARGETS)
def test_a_changed_moment_is_found(target: Target, folder: Path) -> None:
    check_spoiled(target, SOURCES, folder)
