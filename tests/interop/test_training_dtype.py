"""DeepSpeed trains in one dtype; an engine of another loads.

About two minutes. The reference is the state of the engine that wrote, its masters rounded by torch: with masters
nothing else is lost, so that fp32 → bf16 → fp32 continues with exactly the losses of an uninterrupted run.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from attrs import field, frozen

from tests.interop.parallel import convert, launch, result
from tests.interop.test_deepspeed import FP32, JOB, STEPS

pytestmark = pytest.mark.interop

SCALE = {
    "fp16": {"initial_scale_power": 8, "hysteresis": 1}
}  # a section of ds_config that fp32 and bf16 runs have, too
WHOLE = {**FP32, **SCALE}
FROZEN = {**WHOLE, "dtype": "bf16", "freeze": True, "groups": 3, "zero": {"sub_group_size": 40}}
DEALT = {**WHOLE, "dtype": "fp16", "zero": {"round_robin_gradients": True, "parameter_alignment": True}}
WIDE = {**WHOLE, "dtype": "bf16", "wide_gradients": True}  # BF16_Optimizer
LOW = {**WHOLE, "dtype": "bf16", "bf16": {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}}

# name: (stage, the run); on two ranks
SOURCES: dict[str, tuple[int, dict[str, Any]]] = {
    "z1_fp32": (1, WHOLE),
    "z0_fp32": (0, WHOLE),
    "z3_bf16": (3, FROZEN),
    "bf16_optimizer": (1, WIDE),
    "z2_fp16": (2, DEALT),
    "z3_low": (3, LOW),  # masters and moments in bf16
}
NEAR = 1e-2  # of losses in 16 bits
FLAGS = {"fp32": "bf16=0, fp16=0", "bf16": "bf16=1", "fp16": "fp16=1"}


@frozen
class Target:
    source: str
    stage: int
    dp: int
    dtype: str
    via: str = field(default="")  # a layout on the way

    def __str__(self) -> str:
        way = f"-{self.via.partition('(')[0]}" if self.via else ""
        return f"{self.source}{way}-zero{self.stage}_dp{self.dp}_{self.dtype}"

    @property
    def run(self) -> dict[str, Any]:
        kept = {key: value for key, value in SOURCES[self.source][1].items() if key != "bf16" or self.dtype == "bf16"}
        return {**kept, "stage": self.stage, "dtype": self.dtype}


TARGETS = (
    Target("z1_fp32", 3, 3, "bf16"),
    Target("z1_fp32", 2, 2, "fp16"),
    Target("z1_fp32", 0, 2, "bf16"),
    Target("z1_fp32", 1, 2, "fp32", via="zero2(dp=3, bf16=1)"),
    Target("z0_fp32", 1, 3, "bf16"),
    Target("z0_fp32", 0, 2, "fp16"),
    Target("z3_bf16", 1, 3, "fp32"),
    Target("z3_bf16", 2, 2, "fp16"),
    Target("bf16_optimizer", 0, 3, "fp32"),
    Target("bf16_optimizer", 3, 2, "fp32"),
    Target("bf16_optimizer", 1, 3, "bf16", via="zero3(dp=2, fp16=1)"),
    Target("z2_fp16", 1, 3, "bf16"),
    Target("z2_fp16", 3, 2, "fp32"),
    Target("z3_low", 1, 2, "fp16"),
    Target("z3_low", 2, 3, "fp32"),
    Target("z3_low", 2, 2, "bf16"),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dtype")
    jobs: list[dict[str, Any]] = []
    for name, (stage, run) in SOURCES.items():
        job = {"do": "train", "world": 2, "run": {**run, "stage": stage}, "steps": STEPS, "folder": str(folder / name)}
        jobs.append({**job, "truth": str(folder / f"{name}.truth"), "result": str(folder / f"{name}.json")})
    launch("train", jobs, JOB)
    jobs = []
    for target in TARGETS:
        here, there, result_file = folder / target.source, folder / str(target), str(folder / f"{target}.json")
        error = convert(here, folder / f"{target}.via", target.via) if target.via else ""
        here = folder / f"{target}.via" if target.via else here
        error = error or convert(here, there, f"zero{target.stage}(dp={target.dp}, {FLAGS[target.dtype]})")
        if error:
            Path(result_file).write_text(json.dumps({"error": error}))
            continue
        job = {"do": "recast", "world": target.dp, "run": target.run, "steps": STEPS, "folder": str(there)}
        jobs.append({**job, "truth": str(folder / f"{target.source}.truth"), "result": result_file})
    launch("load", jobs, JOB)
    return folder


@pytest.mark.parametrize("target", TARGETS, ids=str)
def test_an_engine_of_another_dtype_loads_it_and_trains_on(target: Target, folder: Path) -> None:
    """Weights are rounded masters; masters, moments, rates, steps and buffers are equal."""
    source, found = result(folder, target.source), result(folder, str(target))
    assert found["differences"] == []
    assert found["scale"] == ([True, 256.0] if target.dtype == "fp16" else [False, 1.0])
    if target.via and target.dtype == "fp32":
        assert found["after"] == source["after"], "as if it had never been another"
        return
    # Without ZeRO, DeepSpeed's 16-bit wrapper clips by another norm: the second loss is one of its own steps.
    compared = 1 if target.stage == 0 and target.dtype != "fp32" else 2
    assert found["after"][:compared] == pytest.approx(source["after"][:compared], rel=0, abs=NEAR)
    assert len({*found["after"]}) == 2
