"""Tensors without elements: plans lack them, and modules need them to load."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.formats.deepspeed import deepspeed_stand_ins  # noqa: F401  (classes that pickle looks for)
from ucpl import UcplError, compare, convert, verify


def file_of(folder: Path) -> Path:
    """A plain file with empty tensors: trained, frozen, and a buffer."""
    full = {"weight": torch.arange(10.0).view(5, 2), "exp_avg": torch.ones(5, 2)}
    value = {
        "params": {
            "w": full,
            "nothing": {"weight": torch.zeros(0, 4), "exp_avg": torch.zeros(0, 4)},
            "frozen": {"weight": torch.zeros(3, 0, dtype=torch.bfloat16)},
        },
        "buffers": {"seen": torch.zeros(0, 3, dtype=torch.int64), "calls": torch.ones(2)},
        "groups": [{"lr": 0.1, "params": ["nothing", "w"]}],
    }
    torch.save(value, folder / "made.pt")
    return folder / "made.pt"


@pytest.mark.parametrize("via", ["zero1(dp=3)", "zero3(dp=2)", "plain()"])
def test_they_come_back_with_shape_and_dtype(via: str, tmp_path: Path) -> None:
    made = file_of(tmp_path)
    convert(made, tmp_path / "there", via)
    assert verify(tmp_path / "there")
    convert(tmp_path / "there", tmp_path / "back.pt", "plain()")
    assert compare(made, tmp_path / "back.pt")
    found = torch.load(tmp_path / "back.pt", weights_only=True)
    shapes = {name: (states["weight"].dtype, tuple(states["weight"].shape)) for name, states in found["params"].items()}
    assert shapes == {
        "w": (torch.float32, (5, 2)),
        "nothing": (torch.float32, (0, 4)),
        "frozen": (torch.bfloat16, (3, 0)),
    }
    assert found["buffers"]["seen"].dtype == torch.int64 and found["buffers"]["seen"].shape == (0, 3)
    assert [group["params"] for group in found["groups"]] == [["nothing", "w"] if via == "plain()" else ["w"]]
    assert "empty_tensors" not in found["envelope"]["blobs"]


def test_a_module_has_them(tmp_path: Path) -> None:
    convert(file_of(tmp_path), tmp_path / "there", "zero1(dp=2)")
    file = next((tmp_path / "there").glob("*/mp_rank_00_model_states.pt"))
    module = torch.load(file, weights_only=False)["module"]
    assert {name: tuple(t.shape) for name, t in module.items()} == {
        "w": (5, 2),
        "nothing": (0, 4),
        "frozen": (3, 0),
        "seen": (0, 3),
        "calls": (2,),
    }


@pytest.mark.parametrize("via", ["zero1(dp=2)", "dcp(fsdp=2)", "safetensors()", "plain()"])
def test_a_second_name_of_one_is_separate(via: str, tmp_path: Path) -> None:
    value = torch.load(file_of(tmp_path)) | {"aliases": {"also": "frozen", "tied": "w"}}
    torch.save(value, tmp_path / "made.pt")
    convert(tmp_path / "made.pt", tmp_path / "there", via)
    convert(tmp_path / "there", tmp_path / "back.pt", "plain()")
    found = torch.load(tmp_path / "back.pt", weights_only=True)
    # DCP and safetensors do not record the kind of a tensor without elements.
    also = found["params"]["also"]["weight"] if "also" in found["params"] else found["buffers"]["also"]
    assert also.shape == (3, 0) and also.dtype == torch.bfloat16
    assert found["aliases"].keys() <= {"tied"}


def test_a_second_name_of_no_tensor_is_refused(tmp_path: Path) -> None:
    torch.save(torch.load(file_of(tmp_path)) | {"aliases": {"also": "absent"}}, tmp_path / "made.pt")
    with pytest.raises(UcplError, match="a second name of it"):
        verify(tmp_path / "made.pt")


@pytest.mark.parametrize("stage", [1, 2])
def test_two_of_them_share_no_memory(stage: int, tmp_path: Path) -> None:
    """DeepSpeed takes all tensors at address 0 for one.

    It writes second names to `shared_params`.
    """
    value = torch.load(file_of(tmp_path), weights_only=True)
    value["params"]["other"] = {"weight": torch.zeros(3, 0, 2)}
    torch.save(value, tmp_path / "made.pt")
    convert(tmp_path / "made.pt", tmp_path / "there", f"zero{stage}(dp=2)")
    file = next((tmp_path / "there").glob("*/mp_rank_00_model_states.pt"))
    meta = torch.load(file, weights_only=False)
    meta["shared_params"] = {"other": "nothing"}
    torch.save(meta, file)
    for target in ("plain()", "zero1(dp=3)", "universal()", "dcp(fsdp=2)"):
        convert(tmp_path / "there", tmp_path / "again", target, force=True)
        assert compare(tmp_path / "made.pt", tmp_path / "again")
    convert(tmp_path / "there", tmp_path / "back.pt", "plain()")
    found = torch.load(tmp_path / "back.pt", weights_only=True)
    assert found["aliases"] == {} and found["params"]["other"]["weight"].shape == (3, 0, 2)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_parameter_without_dims_has_states_of_its_own(stage: int, tmp_path: Path) -> None:
    states = {"weight": torch.tensor(2.5), "exp_avg": torch.tensor(0.5), "step": torch.tensor(3.0)}
    full = {"weight": torch.ones(2, 2), "exp_avg": torch.ones(2, 2), "step": torch.tensor(3.0)}
    value = {"params": {"scale": states, "w": full}, "groups": [{"lr": 0.1, "params": ["scale", "w"]}]}
    torch.save(value, tmp_path / "made.pt")
    convert(tmp_path / "made.pt", tmp_path / "there", f"universal(stage={stage})")
    assert verify(tmp_path / "there") and compare(tmp_path / "made.pt", tmp_path / "there")
    convert(tmp_path / "there", tmp_path / "back.pt", "plain()")
    found = torch.load(tmp_path / "back.pt", weights_only=True)["params"]["scale"]
    assert {name: (t.shape, t.item()) for name, t in found.items()} == {
        "weight": ((), 2.5), "fp32": ((), 2.5), "exp_avg": ((), 0.5), "step": ((), 3.0),
    }  # fmt: skip
