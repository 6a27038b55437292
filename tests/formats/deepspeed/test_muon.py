"""Muon's momentum at ZeRO-1 and 2 has uncut tensors."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.formats.deepspeed import deepspeed_stand_ins  # noqa: F401  (classes that pickle looks for)
from ucpl import compare, convert
from ucpl.errors import UcplError, catalogue


def run_of(folder: Path, muon: bool = True) -> Path:
    """Two matrices with Muon, of 12 and 6 elements, and a vector."""
    shapes = {"up": (4, 3), "down": (3, 2), "norm": (5,)}
    params = {name: {"weight": torch.rand(shape)} for name, shape in shapes.items()}
    for name in ("up", "down"):
        params[name]["momentum_buffer"] = torch.rand(shapes[name])
    params["norm"] |= {"exp_avg": torch.rand(5), "exp_avg_sq": torch.rand(5)}
    groups = [
        {"lr": 0.02, "use_muon": muon, "momentum": 0.9, "params": ["up", "down"]},
        {"lr": 0.01, "use_muon": False, "params": ["norm"]},
    ]
    torch.save({"params": params, "buffers": {}, "groups": groups}, folder / "run.pt")
    return folder / "run.pt"


@pytest.mark.parametrize("to", ["zero1(dp=2)", "zero2(dp=4)"])
def test_a_part_that_ends_within_a_tensor_is_refused_with_the_degrees_that_fit(to: str, tmp_path: Path) -> None:
    with pytest.raises(UcplError) as caught:
        convert(run_of(tmp_path), tmp_path / "there", to)
    found = caught.value.diagnostics[0]
    assert found.code == "E471" and catalogue()["E471"].exit_status == 4
    assert "cuts up, which Muon trains" in found.message
    assert "zero3" in found.remedy and ": 1" in found.remedy
    assert not (tmp_path / "there").exists()


@pytest.mark.parametrize(("to", "muon"), [("zero1(dp=1)", True), ("zero3(dp=2)", True), ("zero1(dp=2)", False)])
def test_what_cuts_none_goes_over(to: str, muon: bool, tmp_path: Path) -> None:
    made = run_of(tmp_path, muon)
    convert(made, tmp_path / "there", to)
    assert compare(made, tmp_path / "there")


def test_a_source_whose_parts_cut_a_tensor_is_refused_as_that(tmp_path: Path) -> None:
    """DeepSpeed 0.19.8.

    Each rank keeps the momentum of all tensors that it touches.
    """
    convert(run_of(tmp_path, muon=False), tmp_path / "there", "zero1(dp=2)")
    whole = {0: 12, 1: 18}  # `up` is cut, and is on both ranks completely
    for file in (tmp_path / "there").glob("*/*_optim_states.pt"):
        value = torch.load(file, weights_only=False)
        base = value["optimizer_state_dict"]["base_optimizer_state"]
        base["param_groups"][0]["use_muon"] = True
        base["state"][0]["momentum_buffer"] = torch.rand(whole[int(file.name[len("zero_pp_rank_")])])
        torch.save(value, file)
    with pytest.raises(UcplError, match=r"E457.*cuts up, which Muon trains") as caught:
        convert(tmp_path / "there", tmp_path / "plain", "plain()")
    assert "ZeRO-3" in caught.value.diagnostics[0].message
