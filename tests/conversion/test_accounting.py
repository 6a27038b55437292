"""One account of a source: each item is moved, derived, dropped by name or not read, an optimizer too."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import ucpl
from tests.cli.command import ucpl as command

FIXTURES = Path(os.environ.get("UCPL_CHECKPOINTS", Path(__file__).parents[1] / "fixtures"))
RUN = FIXTURES / "deepspeed" / "z1_dp2_bf16"
STATE = {"state": {0: {"exp_avg": torch.ones(4, 3)}}, "param_groups": [{"lr": 0.1, "params": [0]}]}


def accounted(*argv: object) -> dict[tuple[str, str], Any]:
    done = command(*argv, "--json")
    assert done.status == 0, done.err
    made = json.loads(done.out)
    found = made["plan"]["account"]
    assert found["items"] == sum(found[fate] for fate in ("moved", "derived", "dropped", "not_read"))
    if made.get("report"):
        assert made["report"]["account"] == found
    return {(e["fate"], e["kind"]): e for e in found["entries"]}


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    """Weights of a model as `save_pretrained` writes them."""
    (tmp_path / "run").mkdir()
    save_file({"w": torch.ones(4, 3), "b": torch.ones(3)}, tmp_path / "run" / "model.safetensors")
    return tmp_path / "run"


def test_every_item_of_a_run_has_a_fate(tmp_path: Path) -> None:
    """26 parameters and a buffer with their states; `step` of 26, 12 values of the run, 2 of client_state, 2 groups, files."""
    found = accounted("convert", RUN, tmp_path / "model", "--to", "safetensors()")
    assert {key: e["count"] for key, e in found.items() if e["kind"].startswith("tensor")} == {
        ("moved", "tensor weight"): 27,
        ("dropped", "tensor fp32"): 26,
        ("dropped", "tensor exp_avg"): 26,
        ("dropped", "tensor exp_avg_sq"): 26,
    }
    assert sorted(found["dropped", "client_state"]["names"]) == ["foo", "rng"]
    assert found["dropped", "step"]["count"] == 26 and found["dropped", "group"]["names"] == ["0", "1"]
    assert "lr_scheduler" in found["dropped", "value"]["names"]
    found = accounted("plan", "--from", RUN, "--to", "zero1(dp=3)")
    assert not any(fate == "dropped" for fate, _ in found)


@pytest.mark.parametrize("name", ["optimizer.pt", "optimizer.bin", "optimizer_0.bin", "optimizer_1.pt", "optim.pth"])
@pytest.mark.parametrize("target", ["zero1(dp=2)", "dcp(fsdp=2)", "plain()", "universal()"])
def test_a_run_taken_for_weights_is_refused(weights: Path, tmp_path: Path, name: str, target: str) -> None:
    """As transformers' Trainer and Accelerate save without DeepSpeed: their optimizer lies next to the weights."""
    torch.save(STATE, weights / name)
    done = command("convert", weights, tmp_path / "target", "--to", target)
    assert done.status == 3 and "E467" in done.err and name in done.err and "--weights-alone" in done.err
    assert not (tmp_path / "target").exists()
    assert command("plan", "--from", weights, "--to", target).status == 3
    found = accounted("convert", weights, tmp_path / "target", "--to", target, "--weights-alone")
    assert found["not read", "file"]["names"] == [name]


def test_an_export_of_weights_names_the_optimizer(weights: Path, tmp_path: Path) -> None:
    torch.save(STATE, weights / "optimizer.bin")
    for folder in ("optimizer", "empty"):
        (weights / folder).mkdir()
    (weights / "optimizer" / "0.bin").write_bytes(b"1")
    (weights / "optimizer_config.json").write_text("{}")
    done = command("convert", weights, tmp_path / "model", "--to", "safetensors()")
    assert done.status == 0 and "not read      optimizer/, optimizer.bin: its optimizer state" in done.out
    assert "not read      optimizer/, optimizer.bin: its" in command("inspect", weights).out
    assert "empty" not in done.out
    made = ucpl.convert(weights, tmp_path / "again", "safetensors()")
    assert made.report.account is not None and "optimizer.bin" in str(made)


def test_a_plan_keeps_its_account(tmp_path: Path) -> None:
    """Tensors are counted as it was planned; the rest as the source is when the plan is run."""
    shutil.copytree(RUN, tmp_path / "run")
    assert command("plan", "--from", tmp_path / "run", "--to", "safetensors()", "-o", tmp_path / "x.plan").status == 0
    kept = ucpl.load_plan(tmp_path / "x.plan").account
    assert kept is not None and kept == ucpl.plan(str(tmp_path / "run"), "safetensors()").account
    (tmp_path / "run" / "global_step3" / "notes.bin").write_bytes(b"1")
    (tmp_path / "run" / "late.txt").write_text("1")
    found = accounted("apply", tmp_path / "x.plan", tmp_path / "run", tmp_path / "model")
    assert {"late.txt", "global_step3/notes.bin"} <= {*found["not read", "file"]["names"]}


def test_lines_are_few(tmp_path: Path) -> None:
    """`plan` says a line for each reason, and none for each tensor."""
    out = command("plan", "--from", RUN, "--to", "safetensors()").out.splitlines()
    assert len([line for line in out if line.startswith("dropped")]) == 4
    assert len(out) < 40
