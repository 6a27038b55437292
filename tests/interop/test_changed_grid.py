"""Thawed, frozen or dropped parameters on pipelines, tp ranks and experts.

Each case is one conversion at other degrees. Unchanged values are bit-equal in the engine, newly trained ones begin as
stated, the loss of the first step is that of torch alone with the same weights, and training continues. About a minute
and a half on two quiet cores.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from attrs import frozen

from tests.interop.parallel import ROOT, STEPS, launch, result

pytestmark = pytest.mark.interop

JOB = Path(__file__).with_name("grid_job.py")
FROZEN = ["2.attention.qkv.weight", "3.between.scale", "2.mlp.grow.weight"]
EXPERTS = "1.mlp.moe.deepspeed_moe.experts.deepspeed_experts.*"
FALL = f"{EXPERTS}.fall.weight"
# On two ranks of four experts, the last of each: DeepSpeed names it in no param_shapes.
LAST, ITS = EXPERTS.replace("*", "1.*"), [EXPERTS.replace("*", f"{number}.rise.*") for number in (1, 3)]
RUN: dict[str, Any] = {"stage": 1, "dtype": "fp32"}
SOURCES: dict[str, dict[str, Any]] = {
    "pipeline": {**RUN, "tp": 1, "stages": [3, 3], "frozen": FROZEN},
    "cut": {**RUN, "tp": 2, "frozen": FROZEN},
    "grid": {**RUN, "tp": 2, "stages": [3, 3], "frozen": FROZEN},
    "experts": {**RUN, "tp": 1, "ep": 2, "frozen": [*FROZEN[:2], FALL, LAST]},
}


@frozen
class Case:
    """A source, options besides `--to`, and the engine that loads it."""

    source: str
    call: str
    options: tuple[str, ...]
    world: int
    run: dict[str, Any]  # differences from the source's
    said: str  # in the output


def options(word: str, names: list[str]) -> tuple[str, ...]:
    return tuple(x for name in names for x in (f"--{word}", name))


WHOLE: dict[str, Any] = {"frozen": []}
BIASES, LATER = "*.attention.out.bias", ["1.attention.qkv.*", "3.before.scale"]
LESS: dict[str, Any] = {"lean": [BIASES], "frozen": [*FROZEN, *LATER]}
CASES = {
    "pipeline, thawed": Case(
        "pipeline", "zero1(stages=[2, 4], dp=1)", options("train", FROZEN), 2, {**WHOLE, "stages": [2, 4]},
        "trained by --train 2.attention.qkv.weight: 2.attention.qkv.weight, 1,152 elements",
    ),
    "pipeline, dropped and frozen": Case(
        "pipeline", "zero1(pp=1, dp=2)", (*options("drop", [BIASES]), *options("freeze", LATER)), 2,
        {**LESS, "stages": [6]}, f"left out by --drop {BIASES}: 3 tensors, 72 elements",
    ),
    "cut, thawed": Case(
        "cut", "zero1(tp=4, dp=1)", options("train", FROZEN), 4, {**WHOLE, "tp": 4},
        "trained by --train 3.between.scale: 3.between.scale, 24 elements",
    ),
    "cut, thawed, to ZeRO-3": Case(
        "cut", "zero3(tp=2, dp=2)", options("train", FROZEN), 4, {**WHOLE, "stage": 3}, "2.mlp.grow.weight, 960 elements",
    ),
    "cut, dropped and frozen": Case(
        "cut", "zero2(tp=1, dp=2)", (*options("drop", [BIASES]), *options("freeze", LATER)), 2,
        {**LESS, "tp": 1, "stage": 2}, "frozen by --freeze 1.attention.qkv.*: 2 tensors, 1,200 elements",
    ),
    "grid, thawed, dropped and frozen": Case(
        "grid", "zero1(tp=1, pp=2, dp=2)",
        (*options("train", FROZEN), *options("drop", [BIASES]), *options("freeze", LATER)), 4,
        {"tp": 1, "lean": [BIASES], "frozen": LATER}, "trained by --train 2.mlp.grow.weight",
    ),
    "experts, thawed": Case(
        "experts", "zero1(dp=4, ep=4)", options("train", [*FROZEN[:2], FALL, *ITS]), 4, {**WHOLE, "ep": 4},
        f"trained by --train {FALL}: {EXPERTS.replace('*', '0')}.fall.weight and 3 more, 672 elements",
    ),
    "experts, dropped and frozen": Case(
        "experts", "zero1(dp=2, ep=1)",
        (*options("drop", ["3.mlp*.rise.bias"]), *options("freeze", ["3.mlp*.fall.weight", *LATER])), 2,
        {"ep": 1, "lean": ["3.mlp*.rise.bias"], "frozen": [*FROZEN[:2], FALL, *ITS, "3.mlp*.fall.weight", *LATER]},
        "left out by --drop 3.mlp*.rise.bias: 4 tensors, 28 elements",
    ),
    "experts, more of them frozen": Case(
        "experts", "zero1(dp=2, ep=2)", options("freeze", [f"3.mlp*experts.{number}.*" for number in (1, 3)]), 2,
        {"frozen": [*FROZEN[:2], FALL, LAST, "3.mlp*experts.1.*"]}, "frozen by --freeze 3.mlp*experts.1.*: 3 tensors",
    ),
    "experts, a layer of them dropped": Case(
        "experts", "zero1(dp=4, ep=2)", options("drop", ["1.mlp.*"]), 4,
        {"lean": ["1.mlp.*"], "frozen": FROZEN[:2]}, "left out by --drop 1.mlp.*: 13 tensors",
    ),
}  # fmt: skip


def convert(case: Case, folder: Path, target: Path) -> None:
    command = [sys.executable, "-m", "ucpl", "convert", str(folder / case.source), str(target), "--to", case.call]
    done = subprocess.run([*command, *case.options], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert case.said in done.stdout, done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("changed_grid")
    jobs: list[dict[str, Any]] = [
        {"do": "train", "world": 4, "run": run, "steps": STEPS, "folder": str(folder / name),
         "truth": str(folder / f"{name}.pt"), "result": str(folder / f"{name}.json")}
        for name, run in SOURCES.items()
    ]  # fmt: skip
    launch("train", jobs, JOB)
    jobs = []
    for n, (name, case) in enumerate(CASES.items()):
        convert(case, folder, folder / f"target{n}")
        job: dict[str, Any] = {
            "do": "changed",
            "world": case.world,
            "run": {**SOURCES[case.source], **case.run},
            "folder": str(folder / f"target{n}"),
        }
        job |= {"steps": STEPS, "truth": str(folder / f"{case.source}.pt"), "result": str(folder / f"{name}.json")}
        jobs.append(job)
    launch("load", jobs, JOB)
    return folder


@pytest.mark.parametrize("name", CASES)
def test_an_engine_of_the_new_model_trains_at_other_degrees(name: str, folder: Path) -> None:
    case, found = CASES[name], result(folder, name)
    assert found["differences"] == []
    assert bool(found["gone"]) == ("lean" in case.run)
    source = result(folder, case.source)
    first = found["alone"] or source["after"][0]
    if found["alone"] or "lean" not in case.run:
        assert found["after"][0] == pytest.approx(first, rel=0, abs=1e-5), "what torch alone computes of these weights"
    assert len(set(found["after"])) == 3, "it trains"


@pytest.mark.parametrize("name", SOURCES)
def test_sources_train(name: str, folder: Path) -> None:
    found = result(folder, name)
    assert len({*found["before"], *found["after"]}) == STEPS + 2 and found["apart"] == []
