"""DeepSpeed trains models with thawed, frozen, new or dropped parameters.

About two minutes. Each case is one conversion, with another degree and another stage. In the engine of the new model,
unchanged parameters are bit-equal, the loss of its first step is that of torch alone with the same weights, and it
trains.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from attrs import field, frozen

import ucpl
from tests.interop.parallel import launch, result
from tests.interop.test_deepspeed import JOB, ROOT

pytestmark = pytest.mark.interop

NET: dict[str, Any] = {"model": "net", "dtype": "fp32", "optimizer": "adamw", "groups": 2}
SOURCES: dict[str, dict[str, Any]] = {
    "frozen": {**NET, "freeze": True, "stage": 2},
    "whole": {**NET, "stage": 3, "zero": {"sub_group_size": 60}},
    "bf16": {**NET, "dtype": "bf16", "freeze": True, "stage": 1, "wide_gradients": True},
    "grouped": {**NET, "stage": 1, "zero": {"round_robin_gradients": True}},
}
ROBIN = {"zero": {"round_robin_gradients": True}}
BF16 = {"dtype": "bf16", "wide_gradients": True}


@frozen
class Case:
    """A source, options besides `--to`, and the engine that loads it."""

    source: str
    call: str
    options: tuple[str, ...]
    run: dict[str, Any]
    said: str  # in the output
    new: dict[str, float] = field(factory=dict)


TRAIN = ("--train", "conv.weight=0", "--train", "norm.*")
LORA = {"lora_a": 0.5, "lora_b": 0.0, "tone": 1.0}
CASES = {
    "thawed, to ZeRO-3": Case(
        "frozen", "zero3(dp=3, sub_group_size=60)", TRAIN, {"stage": 3, "zero": {"sub_group_size": 60}},
        "trained by --train conv.weight=0: conv.weight, 90 elements, in group 0 (given), in the model's order",
    ),
    "thawed, in a group of their own": Case(
        "frozen", "zero3(dp=3)", ("--train", "conv.weight=2:0", "--train", "norm.bias=2:0"),
        {"stage": 3, "own_group": ["conv.weight", "norm.bias"]},
        "group 2 is new, behind the others, with the hyper-parameters of 0",
    ),
    "thawed, to none": Case("frozen", "zero0(dp=3)", TRAIN, {"stage": 0}, "step with 3: 2 parameters"),
    "thawed, BF16_Optimizer": Case(
        "bf16", "zero1(dp=3)", TRAIN, {**BF16, "stage": 1}, "fp32 of 2 tensors is made of the weight"
    ),
    "new, to ZeRO-1": Case("whole", "zero1(dp=3)", (), {"model": "wider", "stage": 1}, "`lora_a`", LORA),
    "new, to ZeRO-3": Case("grouped", "zero3(dp=3)", (), {"model": "wider", "stage": 3}, "`lora_b`", LORA),
    "new and thawed, bf16": Case(
        "bf16", "zero1(dp=3)", ("--train", "conv.weight", "--train", "norm.*"),
        {**BF16, "model": "wider", "stage": 1}, "exp_avg_sq with 0", LORA,
    ),
    "dropped, to ZeRO-2": Case(
        "grouped", "zero2(dp=3)", ("--drop", "up.bias", "--drop", "calls"), {**ROBIN, "model": "lean", "stage": 2},
        "left out by --drop up.bias: 1 tensor, 13 elements (up.bias)",
    ),
    "dropped, and a group with them": Case(
        "whole", "zero1(dp=3)", ("--drop", "*.bias", "--drop", "norm.weight", "--drop", "gain"),
        {"model": "bare", "stage": 1, "groups": 1}, "left out: group 1 and its hyper-parameters",
    ),
    "dropped, thawed and frozen at once": Case(
        "bf16", "zero3(dp=3)",
        ("--drop", "norm.bias", "--drop", "head.weight", "--train", "conv.*=0", "--freeze", "embed.weight"),
        {**BF16, "model": "headless", "stage": 3}, "frozen by --freeze embed.weight: 1 tensor, 66 elements",
    ),
}  # fmt: skip
ADDED = ("lora_a : 2 6", "lora_b : 6 2", "tone : 1")


def grown(source: Path, thawed: bool) -> str:
    """The model of a checkpoint with an adapter, edited by hand.

    Lines follow others, and groups get members.
    """
    text, _, _ = ucpl.infer(source).text().partition("layout ")
    dtype = "bf16" if "dtype bf16" in text else "f32"
    lines = "".join(f"  {line} dtype {dtype}\n" for line in ADDED)
    text = re.sub(r"\n  gain .*\n", lambda found: found[0] + lines, text)
    wide, flat = "conv.weight, " * thawed, "norm.bias, " * thawed
    text = text.replace(" is frozen", "") if thawed else text
    text = text.replace('"0" = embed.weight, ', f'"0" = lora_a, lora_b, embed.weight, {wide}')
    return re.sub(r'"1" = gain, (conv.bias, norm.weight, )?', rf'"1" = gain, tone, \g<1>{flat}', text)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("changed")
    jobs = [
        {"do": "train", "world": 2, "run": run, "steps": 3, "folder": str(folder / name), "truth": str(folder / f"{name}.pt"),
         "result": str(folder / f"{name}.json")}
        for name, run in SOURCES.items()
    ]  # fmt: skip
    launch("train", jobs, JOB)
    jobs = []
    for n, (name, case) in enumerate(CASES.items()):
        source, target, options = folder / case.source, folder / f"target{n}", list(case.options)
        if case.new:
            (folder / f"grown{n}.ucpl").write_text(grown(source, "--train" in options))
            options += ["--model", f"{folder}/grown{n}.ucpl:checkpoint"]
            options += [
                word for name, value in case.new.items() for word in ("--fill", f"{name}={value}", "--train", name)
            ]
        command = [sys.executable, "-m", "ucpl", "convert", str(source), str(target), "--to", case.call]
        done = subprocess.run([*command, *options], cwd=ROOT, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, (name, done.stderr)
        assert case.said in done.stdout, (name, done.stdout)
        job = {
            "do": "changed",
            "world": 3,
            "run": {**NET, **case.run},
            "folder": str(target),
            "steps": 3,
            "new": case.new,
        }
        jobs.append({**job, "truth": str(folder / f"{case.source}.pt"), "result": str(folder / f"{name}.json")})
    launch("load", jobs, JOB)
    return folder


@pytest.mark.parametrize("name", CASES)
def test_an_engine_of_the_new_model_trains(name: str, folder: Path) -> None:
    found = result(folder, name)
    assert found["differences"] == []
    assert found["after"][0] == found["first"], "what torch alone computes of these weights"
    for new in CASES[name].run.get("own_group", []):
        assert found["rates"][new] == found["rates"]["embed.weight"], "as the group that it is like"
    assert len(set(found["after"])) == 3 and found["after"][2] < found["after"][0], "it trains"
