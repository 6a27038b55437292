"""verl's FSDPCheckpointManager loads converted folders, and trains on.

Jobs of gloo have 2, 3 and 4 ranks. With VERL=FOLDER, verl's own source does; else its statements (verl_job).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from attrs import field, frozen

import ucpl
from tests.interop.parallel import launch, result
from ucpl.errors import UcplError

pytestmark = pytest.mark.interop

JOB = Path(__file__).with_name("verl_job.py")
STEPS = 3
TOLERANCE = 1e-5  # fp32
NET = {"model": "net", "optimizer": "adamw"}  # tied, a gain of one element, a convolution, buffers
CUT = {"model": "cut", "optimizer": "adamw"}
ENGINE = {**NET, "dtype": "fp32", "clip": 0.0}

# name: (ranks, its maker, the run)
SOURCES: dict[str, tuple[int, str, dict[str, Any]]] = {
    "verl": (4, "verl_train", NET),
    "hsdp": (4, "verl_train", {**CUT, "copies": 2}),
    "fsdp": (2, "fsdp_train", NET),
    "frozen_sgd": (2, "fsdp_train", {**CUT, "freeze": True, "optimizer": "sgd"}),
    "zero1": (2, "engine_train", {**ENGINE, "stage": 1}),
    "zero3": (2, "engine_train", {**ENGINE, "stage": 3}),
}


@frozen
class Target:
    source: str
    call: str
    world: int
    do: str = "verl_load"
    run: dict[str, Any] = field(factory=dict)  # differences from the source's

    def __str__(self) -> str:
        return f"{self.source}-{''.join(c if c.isalnum() else '_' for c in self.call).strip('_')}-w{self.world}"


CPU = 'device="cpu"'
BARE = {"sched": False}  # the schedule of another framework's run is the script's own affair
TARGETS = (
    Target("verl", f"verl(fsdp=4, {CPU})", 4),
    Target("verl", f"verl(fsdp=2, {CPU})", 2),
    Target("verl", f"verl(fsdp=3, {CPU})", 3),
    Target("verl", 'dcp(fsdp=3, prefix="model.")', 3, "fsdp_load", BARE),
    Target("verl", "zero1(dp=3)", 3, "engine_load", {**ENGINE, "stage": 1}),
    Target("hsdp", f"verl(fsdp=3, {CPU})", 3, run={"copies": 1}),
    Target("hsdp", f"verl(fsdp=2, ddp=2, {CPU})", 4),
    Target("fsdp", f"verl(fsdp=4, {CPU})", 4, run=BARE),
    Target("frozen_sgd", f"verl(fsdp=3, {CPU})", 3, run=BARE),
    Target("zero1", f"verl(fsdp=3, {CPU})", 3, run=BARE),
    Target("zero3", f"verl(fsdp=4, {CPU})", 4, run=BARE),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("verl")
    launch("train", [described(world, do, run, name, name, out) for name, (world, do, run) in SOURCES.items()], JOB)
    jobs = []
    for target in TARGETS:
        try:
            ucpl.convert(out / target.source, out / str(target), target.call)
        except UcplError as error:
            (out / f"{target}.json").write_text(json.dumps({"error": f"{target.call}: {error}"}))
            continue
        run = {**SOURCES[target.source][2], **target.run}
        jobs.append(described(target.world, target.do, run, str(target), target.source, out))
    launch("load", jobs, JOB)
    return out


def described(world: int, do: str, run: dict[str, Any], name: str, source: str, out: Path) -> dict[str, Any]:
    places = {"folder": str(out / name), "truth": str(out / f"{source}.truth"), "result": str(out / f"{name}.json")}
    return {"world": world, "do": do, "run": run, "steps": STEPS, **places}


@pytest.mark.parametrize("target", TARGETS, ids=str)
def test_verl_loads_what_was_converted_and_trains_on(folder: Path, target: Target) -> None:
    """State bit-equal; losses of an uninterrupted run, bit-equal at equal degrees."""
    source, found = result(folder, target.source), result(folder, str(target))
    assert len({*source["before"], *source["after"]}) >= STEPS + 2
    assert found["differences"] == []
    tolerance = 0.0 if (target.world, target.run) == (SOURCES[target.source][0], {}) else TOLERANCE
    wanted = source["after"][: len(found["after"])]
    assert found["after"][: len(wanted)] == pytest.approx(wanted, rel=0, abs=tolerance)
