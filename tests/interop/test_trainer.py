"""transformers' Trainer resumes from a converted checkpoint-3.

It uses `train(resume_from_checkpoint=...)`. `from_pretrained` of the same folder is the same model.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.interop.parallel import Source, Target, check, check_spoiled, result, spoiled, whole, work

pytestmark = pytest.mark.interop

SCRIPT = Path(__file__).with_name("trainer_job.py")
GPT2: dict[str, Any] = {"model": "gpt2", "stage": 1, "dtype": "fp32"}  # tied embeddings, the Trainer's own schedule
LLAMA: dict[str, Any] = {"model": "llama", "stage": 3, "dtype": "fp32", "schedule": True}  # DeepSpeed's schedule
DROPS = {**GPT2, "stage": 2, "dropout": 0.2}  # random numbers have a say in the losses: degrees must be the same

# PEFT's LoRA: the model is frozen, and left out of the checkpoint (exclude_frozen_parameters).
LORA = {**LLAMA, "stage": 2, "lora": True}
TIED = {**GPT2, "stage": 3, "lora": True}

CUT = {**LLAMA, "stage": 1, "tp": 2}  # DeepSpeed's AutoTP

SOURCES = {
    "gpt2": Source(2, GPT2), "llama": Source(2, LLAMA), "drops": Source(2, DROPS), "lora": Source(2, LORA),
    "tied": Source(2, TIED), "cut": Source(2, CUT),
}  # fmt: skip
TARGETS = (
    Target("gpt2", 3, "zero2(dp=3)", {"stage": 2}),
    Target("gpt2", 1, "zero3(dp=1)", {"stage": 3}),
    Target("gpt2", 3, "universal()", {"universal": True}),
    Target("gpt2", 3, "zero1(dp=3)", {}, spoiled=True),
    Target("llama", 3, "zero3(dp=3)", {}),
    Target("llama", 1, "zero1(dp=1, bf16=1)", {"stage": 1, "dtype": "bf16"}),  # and the weights next to the shards
    Target("llama", 2, "zero1(tp=2, dp=1)", {"stage": 1, "tp": 2}),  # by the class that config.json in the folder names
    Target("cut", 2, "zero2(tp=1, dp=2)", {"stage": 2, "tp": 1}),
    Target("cut", 4, "zero1(tp=2, dp=2)", {}),
    Target("lora", 3, "zero3(dp=3)", {"stage": 3}),
    Target("lora", 1, "zero1(dp=1)", {"stage": 1}),
    Target("tied", 3, "zero1(dp=3)", {"stage": 1}),
    Target("drops", 2, "zero2(dp=2)", {}, via=("zero3(dp=3)",)),
)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return work(SOURCES, TARGETS, tmp_path_factory.mktemp("trainer"), SCRIPT)


@whole(TARGETS)
def test_the_trainer_resumes_from_a_converted_folder(target: Target, folder: Path) -> None:
    check(target, SOURCES, folder)


@spoiled(TARGETS)
def test_a_changed_moment_is_found(target: Target, folder: Path) -> None:
    check_spoiled(target, SOURCES, folder)


@pytest.mark.parametrize("name", SOURCES)
def test_sources_train(name: str, folder: Path) -> None:
    found = result(folder, name)
    assert len({*found["before"], *found["after"]}) == 6
