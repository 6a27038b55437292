"""Megatron-FSDP (fsdp_dtensor) loads Megatron-Core's other forms and trains.

The way back works, too. GPTModels in bf16, four ranks. All targets are loaded strictly: every name of a folder is
requested, and every requested name exists.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from attrs import frozen

import ucpl
from tests.interop.parallel import launch, result, spoil_chunk
from ucpl.errors import UcplError

pytestmark = pytest.mark.interop

JOB = Path(__file__).with_name("megatron_job.py")
WORLD = 4
STEPS = 3
TOLERANCE = 3e-2  # of losses of about 4.5, in bf16

HALF = {"dtype": "bf16", "layers": 2}
# Under tensor parallelism 0.16.1 takes a model whose matrices have rows of like lengths alone.
EVEN = {**HALF, "hidden": 16, "kv": 4, "ffn": 32, "vocab": 48, "expert_ffn": 16}
MIXTURE = {**EVEN, "experts": 4, "shared": 6}
FSDP, MANY = {"format": "fsdp_dtensor"}, {"format": "torch_dist"}
# name: (the run, how it is saved)
RUNS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "dist": ({**HALF, "tp": 2, "pp": 2}, MANY),
    "even": ({**EVEN, "tp": 2, "pp": 2}, MANY),
    "dist_tied": ({**HALF, "tie": True, "tp": 2, "swiglu": False, "bias": True, "qkv_bias": False}, MANY),
    "dist_mixture": ({**MIXTURE, "ep": 2, "pp": 2}, MANY),
    "legacy": ({**EVEN, "pp": 2}, {"format": "legacy"}),
    "fsdp": ({**EVEN, "fsdp": True}, FSDP),
    "fsdp_tp": ({**EVEN, "tp": 2, "fsdp": True}, FSDP),
    "fsdp_mixture": ({**MIXTURE, "ep": 2, "fsdp": True}, FSDP),
}


@frozen
class Target:
    """A target of a folder, and the run that loads it."""

    saved: str
    call: str
    run: dict[str, Any]
    spoiled: bool = False  # one moment is changed: the check must fail

    def __str__(self) -> str:
        call = re.sub("[^a-z0-9]+", "_", self.call).strip("_")
        degrees = "_".join(f"{k}{v}" for k, v in self.run.items() if k in ("tp", "pp", "ep"))
        return "-".join(x for x in (self.saved, call, degrees, "spoiled" * self.spoiled) if x)


ONTO = {"fsdp": True, "tp": 1, "pp": 1, "ep": 1}
CORE = {"fsdp": False}
TARGETS = (
    Target("dist", "megatron_fsdp(dp=4)", ONTO),
    Target("dist", "megatron_fsdp(dp=4)", ONTO, spoiled=True),
    Target("even", "megatron_fsdp()", {**ONTO, "tp": 2}),
    Target("dist_tied", "megatron_fsdp(dp=3)", ONTO),
    Target("dist_mixture", "megatron_fsdp(dp=2, tp=2)", {**ONTO, "ep": 4}),
    Target("legacy", "megatron_fsdp(dp=4)", {**ONTO, "tp": 2}),
    Target("fsdp", "megatron_fsdp(dp=2)", {"tp": 2}),
    Target("fsdp", "megatron_core(tp=2)", {**CORE, "tp": 2}),
    Target("fsdp_tp", "megatron_core()", {**CORE, "tp": 1, "pp": 2}),
    Target("fsdp", "megatron_legacy(tp=2, pp=2)", {**CORE, "tp": 2, "pp": 2}),
    Target(
        "fsdp_mixture", "megatron_core()", {**CORE, "pp": 2}
    ),  # at the same tp and pp Megatron asks for random states
    Target("fsdp_mixture", "megatron_fsdp(dp=4)", {"ep": 4}),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("megatron_fsdp")
    listed = []
    for name, (run, form) in RUNS.items():
        job = {"do": "train", "world": WORLD, "run": run, "steps": STEPS, "saves": {str(out / name): form}}
        listed.append({**job, "truth": str(out / f"{name}.truth"), "result": str(out / f"{name}.json")})
    launch("train", listed, JOB)
    listed = []
    for target in TARGETS:
        there, told = out / f"{target}.made", out / f"{target}.json"
        try:
            ucpl.convert(out / target.saved, there, target.call)
        except UcplError as error:
            told.write_text(json.dumps({"error": f"{target.call}: {error}"}))
            continue
        if target.spoiled:
            (step,) = there.glob("iter_*")
            spoil_chunk(step, "optimizer.state.module.module.module.decoder.final_layernorm.weight.exp_avg")
        job = {"do": "load", "world": WORLD, "run": {**RUNS[target.saved][0], **target.run}, "folder": str(there)}
        listed.append({**job, "truth": str(out / f"{target.saved}.truth"), "result": str(told)})
    launch("load", listed, JOB)
    return out


@pytest.mark.parametrize("name", RUNS)
def test_sources_learn(folder: Path, name: str) -> None:
    """Losses that are used as a reference must change."""
    found = result(folder, name)
    assert len({*found["before"], *found["after"]}) == STEPS + 3


@pytest.mark.parametrize("target", [t for t in TARGETS if not t.spoiled], ids=str)
def test_megatron_loads_it_and_trains_on(folder: Path, target: Target) -> None:
    """State bit-equal, no missing or extra keys; losses of an uninterrupted run."""
    source, found = result(folder, target.saved), result(folder, str(target))
    assert found["differences"] == []
    assert found["after"] == pytest.approx(source["after"], rel=0, abs=TOLERANCE)


def test_a_moment_that_was_changed_is_found(folder: Path) -> None:
    (target,) = (t for t in TARGETS if t.spoiled)
    assert result(folder, str(target))["differences"] == ["/decoder.final_layernorm.weight/exp_avg differs"]
