"""Accelerate and Lightning resume from converted folders around shards.

`save_state`, ModelCheckpoint and `fabric.save` wrote them; `load_state`, `fit(ckpt_path=...)` and `fabric.load` load
the results.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.interop.parallel import Source, Target, check, check_spoiled, result, work

pytestmark = pytest.mark.interop

ACCELERATE = Path(__file__).with_name("accelerate_job.py")
LIGHTNING = Path(__file__).with_name("lightning_job.py")
GPT2: dict[str, Any] = {"model": "gpt2", "stage": 1, "dtype": "fp32"}  # a schedule of the loop's own
LLAMA: dict[str, Any] = {"model": "llama", "stage": 3, "dtype": "fp32", "schedule": True}  # DeepSpeed's schedule
DROPS = {**GPT2, "stage": 2, "dropout": 0.2}  # random numbers have a say in the losses: degrees must be the same
LORA = {**LLAMA, "stage": 2, "schedule": False, "lora": True}  # the adapter alone is saved
NET: dict[str, Any] = {"model": "net", "stage": 2, "dtype": "fp32"}

STATES = {"gpt2": Source(2, GPT2), "llama": Source(2, LLAMA), "drops": Source(2, DROPS), "lora": Source(2, LORA)}
FOLDERS = {"net.ckpt": Source(2, NET), "fabric": Source(2, {**NET, "fabric": True})}
OF_STATES = (
    Target("gpt2", 3, "zero2(dp=3)", {"stage": 2}),
    Target("gpt2", 3, "zero1(dp=3)", {}, spoiled=True),
    Target("gpt2", 1, "zero3(dp=1)", {"stage": 3}),
    Target("llama", 3, "zero1(dp=3)", {"stage": 1}),
    Target("lora", 3, "zero3(dp=3)", {"stage": 3}),
    Target("lora", 1, "zero1(dp=1)", {"stage": 1}),
    Target("drops", 2, "zero2(dp=2)", {}, via=("zero3(dp=3)",)),
)
OF_FOLDERS = (Target("net.ckpt", 3, "zero3(dp=3)", {"stage": 3}), Target("net.ckpt", 1, "zero1(dp=1)", {"stage": 1}))
OF_FABRIC = (Target("fabric", 3, "zero3(dp=3)", {"stage": 3}), Target("fabric", 1, "zero1(dp=1)", {"stage": 1}))


@pytest.fixture(scope="session")
def states(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return work(STATES, OF_STATES, tmp_path_factory.mktemp("accelerate"), ACCELERATE)


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return work(FOLDERS, (*OF_FOLDERS, *OF_FABRIC), tmp_path_factory.mktemp("lightning"), LIGHTNING)


@pytest.mark.parametrize("target", [t for t in OF_STATES if not t.spoiled], ids=str)
def test_accelerate_resumes_from_a_converted_state(target: Target, states: Path) -> None:
    check(target, STATES, states)
    drawn, before = result(states, str(target))["drawn"], result(states, target.source)["drawn"]
    assert drawn == [before[rank % len(before)] for rank in range(target.world)], "random numbers of each rank"


@pytest.mark.parametrize("target", OF_FOLDERS, ids=str)
def test_lightning_resumes_from_a_converted_folder(target: Target, folders: Path) -> None:
    check(target, FOLDERS, folders)


@pytest.mark.parametrize("target", OF_FABRIC, ids=str)
def test_fabric_resumes_from_a_converted_folder(target: Target, folders: Path) -> None:
    check(target, FOLDERS, folders)


@pytest.mark.parametrize("target", [t for t in OF_STATES if t.spoiled], ids=str)
def test_a_changed_moment_is_found(target: Target, states: Path) -> None:
    check_spoiled(target, STATES, states)


@pytest.mark.parametrize("name", STATES)
def test_sources_train_with_accelerate(name: str, states: Path) -> None:
    found = result(states, name)
    assert len({*found["before"], *found["after"]}) == 4


@pytest.mark.parametrize("name", FOLDERS)
def test_sources_train_with_lightning(name: str, folders: Path) -> None:
    found = result(folders, name)
    assert len({*found["before"], *found["after"]}) == 4
