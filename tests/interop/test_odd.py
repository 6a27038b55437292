"""Unusual runs of DeepSpeed, converted, loaded at another degree and stage.

Some two minutes on two quiet cores: one process group for the sources, one for each degree of targets.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.interop.parallel import Source, Target, check, result, work

pytestmark = pytest.mark.interop

# DeepSpeed makes the groups of ZeRO++ once a process, for all engines in it.
ODD_JOB = Path(__file__).with_name("odd_job.py")


def of(odd: str, stage: int, dtype: str = "fp32") -> Source:
    return Source(2, {"odd": odd, "stage": stage, "dtype": dtype})


SOURCES = {
    "gpt2_lora_z1": of("gpt2_lora", 1),
    "gpt2_lora_z2": of("gpt2_lora", 2),
    "gpt2_lora_z3": of("gpt2_lora", 3),
    "llama_lora_z1_bf16": of("llama_lora", 1, "bf16"),
    "llama_lora_z3": of("llama_lora", 3),
    "toggled_z2": of("toggled", 2),
    "states_z1": of("states", 1),
    "hpz": Source(4, {"odd": "names", "stage": 3, "dtype": "fp32", "hpz": 2}),  # ZeRO++
}


def to(source: str, stage: int, dp: int, *via: str) -> Target:
    return Target(source, dp, f"zero{stage}(dp={dp})", {"stage": stage}, via)


TARGETS = (
    to("gpt2_lora_z1", 3, 3),
    to("gpt2_lora_z2", 1, 1),
    to("gpt2_lora_z2", 2, 3, "zero3(dp=4)", "plain()"),
    to("gpt2_lora_z3", 2, 3),
    to("llama_lora_z1_bf16", 3, 3),
    to("llama_lora_z3", 1, 3),
    to("llama_lora_z3", 3, 1),
    to("toggled_z2", 1, 3),
    to("states_z1", 3, 3),
    to("states_z1", 2, 1, "plain()"),
    Target("hpz", 4, "zero3(dp=4)", {}, ("zero1(dp=3)",)),
    Target("hpz", 3, "zero2(dp=3)", {"stage": 2, "hpz": 0}),
)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return work(SOURCES, TARGETS, tmp_path_factory.mktemp("odd"), ODD_JOB)


@pytest.mark.parametrize("target", TARGETS, ids=str)
def test_deepspeed_loads_what_was_converted_and_trains_on(target: Target, folder: Path) -> None:
    check(target, SOURCES, folder)


@pytest.mark.parametrize("name", SOURCES)
def test_sources_train(name: str, folder: Path) -> None:
    """Losses that are used as a reference must change."""
    found: dict[str, Any] = result(folder, name)
    assert len({*found["before"], *found["after"]}) == len(found["before"]) + 2
