"""A trained parameter without elements keeps its number and states.

DeepSpeed's shards have neither. torch refuses a group that lacks a number.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import ucpl
from tests.cli.command import ucpl as command
from ucpl.api import open_checkpoint


def job(groups: int = 1) -> tuple[Any, torch.optim.Optimizer]:
    """A module and its optimizer."""
    torch.manual_seed(4)
    net = torch.nn.Module()
    net.a, net.none, net.b = (torch.nn.Parameter(torch.randn(*shape)) for shape in ((3, 2), (0, 3), (3, 2)))
    sets = [[net.a, net.none], [net.b]] if groups == 2 else [[net.a, net.none, net.b]]
    return net, torch.optim.AdamW([{"params": one, "lr": 0.1 * (i + 1)} for i, one in enumerate(sets)])


def step(net: Any, optimizer: torch.optim.Optimizer) -> float:
    loss = net.a.square().sum() + (net.b - 1).square().sum() + net.none.sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return float(loss.detach())


def saved(path: Path, groups: int = 1) -> Path:
    net, optimizer = job(groups)
    step(net, optimizer)
    torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict()}, path)
    return path


def losses(path: Path) -> list[float]:
    """Losses of a job that continues from a torch file."""
    net, optimizer = job()
    held = torch.load(path)
    net.load_state_dict(held["model"])
    optimizer.load_state_dict(held["optimizer"])
    assert {*optimizer.state[net.none]} == {"step", "exp_avg", "exp_avg_sq"}
    return [step(net, optimizer) for _ in range(3)]


def as_deepspeed_writes(folder: Path) -> None:
    """Take out the names that ucpl adds to a folder without ZeRO."""
    (path,) = folder.glob("*/mp_rank_00_model_states.pt")
    held = torch.load(path, weights_only=False)
    held["param_shapes"] = None
    torch.save(held, path)


@pytest.mark.parametrize("ways", [["zero1(dp=2)"], ["zero2(dp=3)", "plain()"], ["zero1(dp=2)", "dcp(fsdp=2)"]])
def test_a_job_continues_after_shards_without_them(ways: list[str], tmp_path: Path) -> None:
    start = source = saved(tmp_path / "start.pt")
    for number, way in enumerate(ways):
        ucpl.convert(source, tmp_path / str(number), way)
        source = tmp_path / str(number)
    told = command("convert", source, tmp_path / "end.pt", "--to", "torch_file()")
    assert ("none has no elements" in told.out) == ("dcp" not in ways[-1])
    assert losses(tmp_path / "end.pt") == losses(start)


@pytest.mark.parametrize("source", ["zero1(dp=2)", "torch_file()"])
def test_a_folder_without_zero_has_them(source: str, tmp_path: Path) -> None:
    ucpl.convert(saved(tmp_path / "start.pt"), tmp_path / "shards", source)
    ucpl.convert(tmp_path / "shards", tmp_path / "whole", "zero0(dp=2)")
    as_deepspeed_writes(tmp_path / "whole")
    held = open_checkpoint(tmp_path / "whole")
    assert held.state.groups[0].every == ("a", "none", "b")
    assert held.state.groups[0].members == ("a", "b")
    ucpl.convert(tmp_path / "whole", tmp_path / "end.pt", "torch_file()")
    assert losses(tmp_path / "end.pt") == losses(tmp_path / "start.pt")


def test_one_whose_group_is_not_known_is_named(tmp_path: Path) -> None:
    ucpl.convert(saved(tmp_path / "start.pt", 2), tmp_path / "shards", "zero1(dp=2)")
    for number, target in enumerate(("torch_file()", "zero0(dp=2)")):
        told = command("convert", tmp_path / "shards", tmp_path / str(number), "--to", target)
        assert told.status == 0
        assert "none has no elements, and DeepSpeed's files do not say its group" in told.out
