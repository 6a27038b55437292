"""Full state dicts by names, as torch flattens and loads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_saver import save as save_chunks

import ucpl
from tests.formats.torch_file.tiny import adamw, built, train

FULL = StateDictOptions(full_state_dict=True)
FLAT = StateDictOptions(full_state_dict=True, flatten_optimizer_state_dict=True)
VIAS = ["", "dcp(fsdp=2)", "zero1(dp=2)", "zero3(dp=3)", "plain()"]


def run(options: StateDictOptions) -> tuple[dict[str, Any], dict[str, Any], list[float]]:
    """State dicts after two steps, and the next losses."""
    model = built()
    optimizer = adamw(model)
    train(model, [optimizer], 0, 2)
    weights, states = get_state_dict(model, optimizer, options=options)
    kept: dict[str, Any] = {name: one.clone() for name, one in weights.items() if isinstance(one, torch.Tensor)}
    states = torch.utils._pytree.tree_map(lambda one: one.clone() if isinstance(one, torch.Tensor) else one, states)
    return kept, states, train(model, [optimizer], 2, 2)


def resumed(held: dict[str, Any], options: StateDictOptions = FULL) -> list[float]:
    """The next losses of a job that loads names."""
    model = built(seed=8)
    optimizer = adamw(model)
    set_model_state_dict(model, held["model"], options=options)
    set_optimizer_state_dict(model, optimizer, held["optimizer"], options=options)
    return train(model, [optimizer], 2, 2)


def numbered(held: dict[str, Any]) -> list[float]:
    """The next losses of a job that loads an optimizer of numbers."""
    model = built(seed=8)
    optimizer = adamw(model)
    model.load_state_dict(held["model"])
    optimizer.load_state_dict(held["optimizer"])
    return train(model, [optimizer], 2, 2)


@pytest.mark.parametrize("via", VIAS)
def test_a_full_state_dict_by_names_keeps_its_names(via: str, tmp_path: Path) -> None:
    weights, states, losses = run(FULL)
    torch.save({"model": weights, "optimizer": states, "step": 2}, tmp_path / "one.pt")
    source, call = tmp_path / "one.pt", "torch_file()"
    if via:
        ucpl.convert(source, tmp_path / "via", via)
        source, call = tmp_path / "via", "torch_file(named=1)"
    ucpl.convert(source, tmp_path / "back.pt", call)
    assert resumed(torch.load(tmp_path / "back.pt", weights_only=True)) == losses
    ucpl.convert(source, tmp_path / "numbers.pt", "torch_file(named=0)")
    assert numbered(torch.load(tmp_path / "numbers.pt", weights_only=True)) == losses


@pytest.mark.parametrize("via", VIAS)
@pytest.mark.parametrize("is_at_top", [False, True])
def test_a_flattened_optimizer_is_read(is_at_top: bool, via: str, tmp_path: Path) -> None:
    weights, states, losses = run(FLAT)
    made = weights if is_at_top else {"model": weights}
    torch.save({**made, "optimizer": states, "train_state": {"step": 2}}, tmp_path / "one.pt")
    source = tmp_path / "one.pt"
    if via:
        ucpl.convert(source, tmp_path / "via", via)
        source = tmp_path / "via"
    ucpl.convert(source, tmp_path / "back.pt", "torch_file(named=1)")
    held = torch.load(tmp_path / "back.pt", weights_only=True)
    assert resumed(held) == losses
    assert held["train_state"] == {"step": 2}


def test_chunks_that_torch_joined_into_one_file_are_read(tmp_path: Path) -> None:
    """torchtitan saves the model's names at the top."""
    weights, states, losses = run(StateDictOptions(flatten_optimizer_state_dict=True))
    save_chunks({**weights, "optimizer": states, "train_state": {"step": 2}}, checkpoint_id=tmp_path / "chunks")
    dcp_to_torch_save(tmp_path / "chunks", tmp_path / "one.pt")
    ucpl.convert(tmp_path / "one.pt", tmp_path / "zero", "zero1(dp=2)")
    ucpl.convert(tmp_path / "zero", tmp_path / "back.pt", "torch_file(named=1)")
    assert resumed(torch.load(tmp_path / "back.pt", weights_only=True)) == losses
