"""Folders of older torch, in both directions."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import _version
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict_saver import save

import ucpl
from tests.formats.dcp.test_dcp import held_by_plain


@pytest.fixture
def trained() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 2))
    wide, flat = ([p for p in model.parameters() if (p.ndim > 1) == is_wide] for is_wide in (True, False))
    chosen = torch.optim.AdamW([{"params": wide, "lr": 0.25}, {"params": flat, "weight_decay": 0.5}])
    model(torch.ones(4, 3)).sum().backward()
    chosen.step()
    return model, chosen


@pytest.mark.parametrize("names", ["texts", "numbers"])
def test_groups_that_are_one_value_are_those_of_the_optimizer(
    names: str, trained: tuple[Any, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before torch 2.4, groups are one value."""
    model, chosen = trained
    held: dict[str, Any] = dict(zip(("model", "optim"), get_state_dict(model, chosen), strict=True))
    if names == "numbers":
        held["optim"] = chosen.state_dict()
    monkeypatch.setattr(_version, "_derived_version", "2_3")
    save(held | {"sched": {"last_epoch": 1}}, checkpoint_id=tmp_path / "old", no_dist=True)
    known = pickle.loads((tmp_path / "old" / ".metadata").read_bytes()).state_dict_metadata
    assert {"optim.param_groups", "sched"} <= known.keys()
    ucpl.convert(tmp_path / "old", tmp_path / "made.pt", to="torch_file()")
    made = torch.load(tmp_path / "made.pt", weights_only=True)
    mine, own = made["optimizer"], chosen.state_dict()
    assert [(g["params"], g["lr"], g["weight_decay"]) for g in mine["param_groups"]] == [
        (g["params"], g["lr"], g["weight_decay"]) for g in own["param_groups"]
    ]
    for number, states in own["state"].items():
        assert all(torch.equal(torch.as_tensor(mine["state"][number][k]), v) for k, v in states.items())
    assert made["sched"] == {"last_epoch": 1} and "optim" not in made


def test_a_target_names_no_class_that_older_torch_lacks(trained: tuple[Any, Any], tmp_path: Path) -> None:
    """torch before 2.4 has its enum of memory formats elsewhere."""
    model, _ = trained
    save({"model": model.state_dict()}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    ucpl.convert(tmp_path / "dcp", tmp_path / "made", to="dcp(fsdp=1)")
    text = (tmp_path / "made" / ".metadata").read_bytes()
    assert b"MEM_FORMAT" not in text and b"TensorProperties" in text
    mine, theirs = (pickle.loads((tmp_path / one / ".metadata").read_bytes()) for one in ("made", "dcp"))
    assert mine.state_dict_metadata == theirs.state_dict_metadata
    ucpl.convert(tmp_path / "made", tmp_path / "plain.pt", to="plain()")
    assert torch.equal(held_by_plain(tmp_path / "plain.pt")["model.0.weight"], model.state_dict()["0.weight"])
