"""Steps in targets of DeepSpeed and Megatron if the source counts none."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve

from tests.cli.command import ucpl as command
from ucpl import compare, convert
from ucpl.extents import Scalar, TrainState
from ucpl.formats.run_steps import iteration_of

FIXTURES = Path(__file__).parents[1] / "fixtures"


def trained(path: Path, steps: tuple[int, ...], optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW) -> Path:
    """A torch file whose groups were trained for these steps."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 3 + i) for i in range(len(steps))))
    optim = optimizer([{"params": [*layer.parameters()]} for layer in model], lr=0.01)  # type: ignore[call-arg]
    for step in range(max(steps)):
        for layer, most in zip(model, steps, strict=True):
            for one in layer.parameters():
                one.grad = torch.rand_like(one) if step < most else None
        optim.step()
    torch.save({"model": model.state_dict(), "optimizer": optim.state_dict()}, path)
    return path


def counters(folder: Path) -> tuple[str, Any, Any, Any]:
    """The step's folder, and the counters of its model states."""
    tag = next(folder.glob("latest*")).read_text()
    held = torch.load(folder / tag / "mp_rank_00_model_states.pt", weights_only=False)
    return (tag, *(held.get(key) for key in ("global_steps", "skipped_steps", "global_samples")))


SOURCES = {"a torch file": ("global_step4", 4), "dcp/fsdp2_w4": ("global_step7", 7)}
SOURCES["accelerate/without_engine"] = "pytorch_model", 3  # the name that Accelerate loads


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize(("to", "more"), [("zero2(dp=2)", ""), ("zero0(dp=1)", ""), ("universal()", "_universal")])
def test_deepspeed_counts_the_steps_of_the_optimizer(tmp_path: Path, source: str, to: str, more: str) -> None:
    own = trained(tmp_path / "ckpt.pt", (4,)) if source == "a torch file" else FIXTURES / source
    convert(own, tmp_path / "made", to=to)
    tag, steps = SOURCES[source]
    assert counters(tmp_path / "made") == (tag + more, steps, 0, None)
    assert compare(own, tmp_path / "made")


def test_the_largest_number_of_steps_is_the_run_s(tmp_path: Path) -> None:
    own = trained(tmp_path / "ckpt.pt", (2, 5))
    done = command("convert", own, tmp_path / "made", "--to", "zero1(dp=2)")
    assert "its optimizer has 2 for some parameters and 5 for others: global_steps is 5" in done.out
    assert counters(tmp_path / "made") == ("global_step5", 5, 0, None)


def test_a_run_without_steps_begins_at_0(tmp_path: Path) -> None:
    convert(trained(tmp_path / "ckpt.pt", (3,), torch.optim.SGD), tmp_path / "made", to="zero1(dp=2)")
    assert counters(tmp_path / "made") == ("global_step0", 0, 0, 0)


def test_megatron_s_iteration_is_that_of_a_run_or_of_its_optimizer() -> None:
    state = TrainState(
        "torch", scalars={"step": {"a": 2, "b": Scalar("f32", (), struct.pack("<f", 4)), "c": float("nan")}}
    )
    assert iteration_of(state) == 4
    assert iteration_of(evolve(state, blobs={"global_steps": 6})) == 6
    assert iteration_of(evolve(state, blobs={"global_steps": 6}, carried={"iteration": 5})) == 5
    assert iteration_of(TrainState("torch", carried={"iteration": True})) == 0


def test_megatron_s_iteration_is_the_run_s_counter(tmp_path: Path) -> None:
    """Its optimizer has done one step, and the run has counted 10."""
    source = FIXTURES / "megatron" / "dist_of_0_19"
    convert(source, tmp_path / "made", to="zero1(dp=2)")
    assert counters(tmp_path / "made") == ("global_step10", 10, 0, None)
    found = compare(source, tmp_path / "made")
    assert found and "global_steps: 10 in B, nothing in A (the iteration of the run)" in map(str, found.unsaid)


def test_a_trainer_of_another_step_than_its_optimizer_is_reported(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(FIXTURES / "trainer" / "without_engine", tmp_path / "checkpoint-3"))
    text = "trainer_state.json is of step 6, the shards are of step 3"
    assert text not in command("inspect", folder).out
    held = json.loads((folder / "trainer_state.json").read_text())
    (folder / "trainer_state.json").write_text(json.dumps({**held, "global_step": 6}))
    assert text in command("inspect", folder).out
    torch.save(
        {"scale": 1024.0}, folder / "scaler.pt"
    )  # its steps are fewer than the Trainer's, by those with an overflow
    assert text not in command("inspect", folder).out
