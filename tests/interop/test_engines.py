"""`ucpl.load_into` fills DeepSpeed's engines from other degrees, stages and frameworks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from attrs import field, frozen

from tests.interop.parallel import TOLERANCE, launch, result

pytestmark = pytest.mark.interop

JOB = Path(__file__).with_name("engines_job.py")
STEPS = 3
NET = {"model": "net", "optimizer": "adamw"}

# name: (its maker, the run), by two ranks
SOURCES: dict[str, tuple[str, dict[str, Any]]] = {
    "z1_bf16": ("train", {**NET, "stage": 1, "dtype": "bf16"}),
    "z2_frozen": ("train", {**NET, "stage": 2, "dtype": "fp32", "freeze": True, "groups": 3}),
    "z3": ("train", {**NET, "stage": 3, "dtype": "fp32"}),
    "z3_bf16": ("train", {**NET, "stage": 3, "dtype": "bf16"}),
    "z1_nadam": ("train", {**NET, "stage": 1, "dtype": "fp32", "optimizer": "nadam"}),
    "z2_lion": ("train", {**NET, "stage": 2, "dtype": "fp32", "optimizer": "lion", "groups": 1}),
    "z3_fused": ("train", {**NET, "stage": 3, "dtype": "fp32", "optimizer": "fused"}),
    "z1_fp16": ("train", {**NET, "stage": 1, "dtype": "fp16", "fp16": {"initial_scale_power": 8}}),
    "fsdp": ("fsdp_train", {**NET, "dtype": "fp32", "clip": 0.0}),
}


@frozen
class Target:
    """The engine that a source fills, of three ranks."""

    source: str
    run: dict[str, Any] = field(factory=dict)  # differences from the source's
    name: str = ""

    def __str__(self) -> str:
        return f"{self.source}-to-{self.run.get('stage')}" + f"-{self.name}" * bool(self.name)


SCRIPTED = {"scripted": True}
SMALL = {"zero": {"stage3_param_persistence_threshold": 30, "sub_group_size": 40}}
TARGETS = (
    Target("z1_bf16", {"stage": 3}),
    Target("z1_bf16", {"stage": 2, "zero": {"round_robin_gradients": True}}, "round_robin"),
    Target("z1_bf16", {"stage": 1, "wide_gradients": True}, "bf16_optimizer"),
    Target("z2_frozen", {"stage": 3, "warm": True}, "warm"),
    Target("z3", {"stage": 2, "warm": True}, "warm"),
    Target("z3", {"stage": 3, **SMALL}, "small"),
    Target("z3_bf16", {"stage": 1}),
    Target("z1_nadam", {"stage": 3}),
    Target("z2_lion", {"stage": 1}),
    Target("z3_fused", {"stage": 2}),
    Target("z1_fp16", {"stage": 2}),
    Target("fsdp", {"stage": 1, **SCRIPTED}),
    Target("fsdp", {"stage": 2, **SCRIPTED, "zero": {"round_robin_gradients": True}}, "round_robin"),
    Target("fsdp", {"stage": 3, **SCRIPTED}),
)
OFFLOAD = {"offload_optimizer": {"device": "cpu"}}
REFUSED = {
    "offload": ({**NET, "stage": 2, "dtype": "fp32", "zero": OFFLOAD}, "offloads its optimizer"),
    "stage 0": ({**NET, "stage": 0, "dtype": "fp32"}, "ZeRO stage 0"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("engines")
    listed = [{"world": 2, **described(do, run, name, name, out)} for name, (do, run) in SOURCES.items()]
    launch("train", listed, JOB)
    jobs = [described("fill", {**SOURCES[t.source][1], **t.run}, str(t), t.source, out) for t in TARGETS]
    jobs += [described("refuse", run, name, "z3", out) for name, (run, _) in REFUSED.items()]
    jobs.append(described("weights", {**SOURCES["z3_bf16"][1], "stage": 2}, "weights", "z3_bf16", out))
    launch("fill", [{"world": 3, **job} for job in jobs], JOB)
    return out


def described(do: str, run: dict[str, Any], name: str, source: str, out: Path) -> dict[str, Any]:
    job = {"do": do, "run": run, "steps": STEPS, "folder": str(out / source), "truth": str(out / f"{source}.truth")}
    return {**job, "result": str(out / f"{name}.json")}


@pytest.mark.parametrize("name", SOURCES)
def test_sources_learn(folder: Path, name: str) -> None:
    """Losses that are used as a reference must change."""
    found = result(folder, name)
    assert len({*found["before"], *found["after"]}) >= STEPS + 2


@pytest.mark.parametrize("target", TARGETS, ids=str)
def test_an_engine_of_other_ranks_and_stages_is_filled_and_trains_on(folder: Path, target: Target) -> None:
    """Weights, masters, moments, numbers, groups, schedule and counters are bit-equal.

    Losses are those of the continued run.
    """
    source, found = result(folder, target.source), result(folder, str(target))
    assert found["differences"] == []
    wanted = source["after"][: len(found["after"])]
    assert found["after"] == pytest.approx(wanted, rel=0, abs=TOLERANCE.get(SOURCES[target.source][1]["dtype"], 1e-2))


@pytest.mark.parametrize("target", [t for t in TARGETS if t.source != "z2_frozen"], ids=str)
def test_each_byte_is_read_once_in_the_job(folder: Path, target: Target) -> None:
    found = result(folder, str(target))
    assert found["read"] <= found["needed"]


def test_a_dynamic_loss_scale_is_continued(folder: Path) -> None:
    assert result(folder, "z1_fp16-to-2")["scale"] == 2.0**8


def test_weights_alone_are_filled(folder: Path) -> None:
    assert result(folder, "weights")["differences"] == []


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_filled_is_refused(folder: Path, name: str) -> None:
    said = json.loads((folder / f"{name}.json").read_text())["said"]
    assert "E645: the engine " in said
    assert REFUSED[name][1] in said
