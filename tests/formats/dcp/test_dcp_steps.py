"""Folders around chunks: OLMo-core's step and slime's run.

OLMo-core's Checkpointer writes the step; slime's run has a tracker of iterations.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

import ucpl
from tests.cli.command import ucpl as command
from ucpl.formats.opening import open_checkpoint


def state_of(*, flat: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 4)).sum().backward()
    optimizer.step()
    return get_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=flat))


@pytest.fixture
def step(tmp_path: Path) -> Path:
    """OLMo-core's step: chunks, each rank's trainer state, and a version."""
    weights, states = state_of(flat=True)
    top = tmp_path / "step3"
    save({"model": weights, "optim": states}, checkpoint_id=top / "model_and_optim")
    (top / "train").mkdir()
    torch.save({"global_step": 3}, top / "train" / "rank0.pt")
    (top / ".metadata.json").write_text(json.dumps({"version": "3.0.0"}))
    return top


def test_a_step_of_olmo_core_is_read_with_its_files_and_written_again(step: Path, tmp_path: Path) -> None:
    assert open_checkpoint(step).root == step / "model_and_optim"
    ucpl.convert(step, tmp_path / "out", "dcp(fsdp=2)")
    weights, states = state_of(flat=True)
    wanted: dict[str, Any] = {"model": weights, "optim": states}
    held = {
        top: {key: torch.zeros_like(one) if isinstance(one, torch.Tensor) else one for key, one in tree.items()}
        for top, tree in wanted.items()
    }
    load(held, checkpoint_id=tmp_path / "out" / "model_and_optim")
    assert all(
        torch.equal(held[top][key], one)
        for top, tree in wanted.items()
        for key, one in tree.items()
        if isinstance(one, torch.Tensor)
    )
    assert torch.load(tmp_path / "out" / "train" / "rank0.pt") == {"global_step": 3}
    assert (tmp_path / "out" / ".metadata.json").is_file()
    assert ucpl.compare(step, tmp_path / "out")
    assert command("verify", tmp_path / "out").status == 0


def test_a_step_without_other_files_is_a_step(step: Path) -> None:
    (step / ".metadata.json").unlink()
    (step / "train" / "rank0.pt").unlink()
    assert {t.name for t in open_checkpoint(step).state.tensors} == {"weight", "bias"}


@pytest.mark.parametrize("said", ["3", "4", "x", ""])
def test_a_tracker_leads_to_the_iteration_of_a_run(said: str, tmp_path: Path) -> None:
    weights, states = state_of(flat=False)
    run = tmp_path / "run"
    save({"model_state": {"model": weights}}, checkpoint_id=run / "iter_0000003" / "model")
    save({"optim_state": {"optim": states}}, checkpoint_id=run / "iter_0000003" / "optimizer")
    (run / "latest_checkpointed_iteration.txt").write_text(said)
    if said != "3":
        with pytest.raises(ucpl.UcplError, match="E435"):
            open_checkpoint(run)
        return
    ucpl.convert(run, tmp_path / "all.pt", "plain()")
    held = torch.load(tmp_path / "all.pt", weights_only=True)["params"]
    assert torch.equal(held["weight"]["exp_avg"], states["state"]["weight"]["exp_avg"])
