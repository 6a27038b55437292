"""A run of the Trainer or of Accelerate resumes under another strategy.

Strategies are DDP, FSDP2 and DeepSpeed. Each folder is converted and loaded by the loop's own function; the losses are
those of the uninterrupted run.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import ucpl
from tests.interop.parallel import launch

pytestmark = pytest.mark.interop

SCRIPT = Path(__file__).with_name("strategies_job.py")
CALLS = {
    "ddp": "{}(dp=2)",
    "ddp16": "{}(dp=2)",
    "full": "{}(dp=2, full=1)",
    "sharded": "dcp(fsdp=2)",
    "zero": "zero1(dp=2)",
}
LOOPS = ("trainer", "accelerate")
PAIRS = ["ddp-full", "ddp-sharded", "ddp-zero", "full-ddp", "zero-ddp", "zero-sharded", "sharded-zero", "zero16-ddp16"]
TOLERANCE, LOW = 1e-5, 1e-3  # LOW: in bf16


def job(loop: str, strategy: str, folder: Path, *, resume: bool) -> dict[str, Any]:
    result = str(folder.with_suffix(".json"))
    what = {"strategy": strategy, "folder": str(folder), "resume": resume}
    return {"do": loop, "world": 2, **what, "result": result}


def losses(folder: Path) -> list[float]:
    found = json.loads(folder.with_suffix(".json").read_text())
    assert "error" not in found, found["error"]
    of: list[float] = found["losses"]
    return of


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs under each strategy, and those that resume from them.

    The ranks of all runs are forked from one process for the sources, and one for the targets.
    """
    top = tmp_path_factory.mktemp("strategies")
    pairs = [(loop, pair) for loop in LOOPS for pair in PAIRS]
    begun = dict.fromkeys((loop, pair.split("-")[0]) for loop, pair in pairs)
    launch("strategies", [job(*one, top / "-".join(one), resume=False) for one in begun], SCRIPT)
    for one in pairs:
        convert(*one, top)
    resumed = [job(loop, pair.split("-")[1], top / f"{loop}-{pair}", resume=True) for loop, pair in pairs]
    launch("strategies", resumed, SCRIPT)
    return top


def convert(loop: str, pair: str, folder: Path) -> None:
    here, there = pair.split("-")
    source, target = folder / f"{loop}-{here}", folder / f"{loop}-{pair}"
    names = folder / f"{source.name}.names.json"  # of a folder without config.json
    needs_order = loop == "accelerate" and here == "ddp"
    ucpl.convert(source, target, CALLS[there].format(loop), layout=f'{loop}(order="{names}")' if needs_order else None)


def goes_on(loop: str, pair: str, folder: Path) -> None:
    wanted = losses(folder / f"{loop}-{pair.split('-')[0]}")
    assert losses(folder / f"{loop}-{pair}") == pytest.approx(wanted, abs=LOW if pair.endswith("16") else TOLERANCE)
    assert len({round(loss, 3) for loss in wanted}) > 1


@pytest.mark.parametrize("pair", PAIRS)
def test_the_trainer_resumes_under_another_strategy(pair: str, folder: Path) -> None:
    goes_on("trainer", pair, folder)


@pytest.mark.parametrize("pair", PAIRS)
def test_accelerate_resumes_under_another_strategy(pair: str, folder: Path) -> None:
    goes_on("accelerate", pair, folder)


@pytest.mark.parametrize("loop", LOOPS)
def test_masters_of_an_engine_are_the_weights_of_a_loop(loop: str, folder: Path) -> None:
    """The reference is DeepSpeed's own script for f32 weights."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
    from safetensors.torch import load_file

    engine = folder / f"{loop}-zero16"
    wanted = get_fp32_state_dict_from_zero_checkpoint(str(engine), "pytorch_model" if loop == "accelerate" else None)
    found = load_file(folder / f"{loop}-zero16-ddp16" / "model.safetensors")
    assert found
    for name, weight in found.items():
        assert weight.dtype == wanted[name].dtype == torch.float32
        assert weight.equal(wanted[name]), name
        assert not weight.equal(weight.bfloat16().float()), "a rounded weight"
