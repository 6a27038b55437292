"""Names with wraps in targets whose readers leave wraps out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch.distributed.checkpoint.state_dict_loader import load

import ucpl
from tests.cli.command import ucpl as command
from ucpl.api import open_checkpoint
from ucpl.files.wrappers import bare
from ucpl.registry import format_named

SHAPES = {"block._orig_mod.weight": (5, 7), "block._orig_mod.bias": (5,), "head.weight": (3, 5), "scale": ()}


def source(folder: Path) -> tuple[Path, dict[str, dict[str, torch.Tensor]]]:
    """A run with names as `module.state_dict()` of a compiled block has them."""
    torch.manual_seed(0)
    held = {
        name: {"weight": torch.randn(shape), "exp_avg": torch.randn(shape), "exp_avg_sq": torch.rand(shape)}
        for name, shape in SHAPES.items()
    }
    params = {name: {**states, "step": torch.tensor(3.0)} for name, states in held.items()}
    groups = [{"lr": 0.1, "params": list(SHAPES)[:3]}, {"lr": 0.2, "params": ["scale"]}]
    path = folder / "wrapped.pt"
    torch.save({"format": "ucpl-plain", "version": 1, "params": params, "groups": groups}, path)
    return path, held


@pytest.mark.parametrize("target", ["dcp(fsdp = 2)", "dcp(fsdp = 3, flat = 1)", "torch_file()", "zero1(dp = 2)"])
def test_a_target_keeps_the_names_of_its_source(target: str, tmp_path: Path) -> None:
    path, held = source(tmp_path)
    via = tmp_path / "zero"
    ucpl.convert(path, via, "zero2(dp = 3)")
    ucpl.convert(via, tmp_path / "made", target)
    for one, other in ((path, tmp_path / "made"), (tmp_path / "made", path)):
        assert ucpl.compare(one, other, weights=True)
    if target.startswith("dcp"):
        sd: dict[str, Any] = {"model": {name: torch.zeros(shape) for name, shape in SHAPES.items()}}
        load(sd, checkpoint_id=tmp_path / "made")
        assert all(torch.equal(sd["model"][name], held[name]["weight"]) for name in SHAPES)
        ucpl.convert(tmp_path / "made", tmp_path / "again", "dcp(fsdp = 5)")
        assert ucpl.compare(tmp_path / "again", path, weights=True)
    if target.startswith("torch"):
        found = torch.load(tmp_path / "made" / "checkpoint.pt", weights_only=True)["model"]
        assert {name: one.tolist() for name, one in found.items()} == {n: s["weight"].tolist() for n, s in held.items()}


@pytest.mark.parametrize("target", ["dcp(fsdp = 2)", "torch_file()", "safetensors_shards(fsdp = 2)"])
def test_weights_alone_keep_their_names(target: str, tmp_path: Path) -> None:
    _, held = source(tmp_path)
    (tmp_path / "hf").mkdir()
    save_file({name: states["weight"] for name, states in held.items()}, tmp_path / "hf" / "model.safetensors")
    ucpl.convert(tmp_path / "hf", tmp_path / "made", target)
    assert ucpl.compare(tmp_path / "hf", tmp_path / "made")


def test_names_that_differ_by_more_than_wraps_are_a_difference(tmp_path: Path) -> None:
    path, _ = source(tmp_path)
    value = torch.load(path, weights_only=True)
    value["params"] = {name.replace("block", "stem"): one for name, one in value["params"].items()}
    value["groups"][0]["params"] = [name.replace("block", "stem") for name in value["groups"][0]["params"]]
    torch.save(value, tmp_path / "other.pt")
    ucpl.convert(tmp_path / "other.pt", tmp_path / "made", "dcp(fsdp = 2)")
    assert not ucpl.compare(path, tmp_path / "made")


def test_a_dcp_target_says_which_dicts_have_its_names(tmp_path: Path) -> None:
    """Names of get_state_dict have no wraps."""
    path, _ = source(tmp_path)
    value = torch.load(path, weights_only=True)
    value["params"] = {bare(name): one for name, one in value["params"].items()}
    for group in value["groups"]:
        group["params"] = [bare(name) for name in group["params"]]
    torch.save(value, tmp_path / "bare.pt")
    for one, is_said in ((path, True), (tmp_path / "bare.pt", False)):
        goal = ucpl.plan(str(one), "dcp(fsdp = 2)").target
        notes = format_named(goal.framework).advice(open_checkpoint(one), goal)
        assert any("get_state_dict" in text and "block._orig_mod.weight" in text for text in notes) == is_said
    done = command("convert", str(path), str(tmp_path / "made"), "--to", "dcp(fsdp=2)")
    assert "asks for names without them" in " ".join(done.out.split())
