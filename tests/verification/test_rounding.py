"""`compare` of two training dtypes.

The rounded weights, the number of elements, the distance, and the equality of the rest.

Torch counts the expected numbers in the files.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import ucpl
from tests.cli.command import FIXTURES
from tests.cli.command import ucpl as command
from tests.formats.deepspeed import deepspeed_stand_ins  # noqa: F401  (classes that pickle looks for)


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    ucpl.convert(folder, folder.parent / f"{folder.name}.pt", to="plain()", force=True)
    params: dict[str, Any] = torch.load(folder.parent / f"{folder.name}.pt", weights_only=True)["params"]
    return {name: states["weight"] for name, states in params.items()}


def linked(name: str, tmp_path: Path) -> Path:
    (tmp_path / "a").symlink_to((FIXTURES / name).resolve())
    return tmp_path / "a"


@pytest.mark.parametrize(
    ("name", "to"),
    [
        ("z1_dp4", "zero2(dp=3, bf16=1)"),
        ("z1_dp2_bf16", "zero1(dp=3, bf16=0)"),
        ("z1_dp2_bf16opt", "zero0(dp=2, fp16=1)"),
        ("tp2_dp2_z1_uneven", "zero1(dp=1, fp16=1)"),
        ("moe_ep2_dp2_z1", "zero2(ep=1, bf16=1)"),
    ],
)
def test_what_was_rounded_is_counted_and_the_rest_is_equal(name: str, to: str, tmp_path: Path) -> None:
    source = linked(name, tmp_path)
    ucpl.convert(source, tmp_path / "b", to=to)
    weights = {side: weights_of(tmp_path / side) for side in ("a", "b")}
    for first, second in (("a", "b"), ("b", "a")):
        found = ucpl.compare(tmp_path / first, tmp_path / second)
        assert found, [str(d) for d in found.differences]
        ours, theirs = weights[first], weights[second]
        assert {r.name for r in found.rounded} == set(ours)
        for one in found.rounded:
            a, b = ours[one.name].double(), theirs[one.name].double()
            assert (one.elements, one.differ) == (a.numel(), int((a != b).sum())), one.name
            assert one.largest == float((a - b).abs().max()) and not one.is_lost
        assert sum(r.differ for r in found.rounded) > 100


def test_what_has_no_master_is_lost(tmp_path: Path) -> None:
    """A frozen weight that was rounded: that is a difference.

    One whose values all fit is none.
    """
    ucpl.convert(FIXTURES / "z2_dp3_frozen", tmp_path / "b", to="zero2(dp=2, bf16=1)")
    found = ucpl.compare(FIXTURES / "z2_dp3_frozen", tmp_path / "b")
    assert [str(d) for d in found.differences] == ["weight of wpe.weight: f32 in A, bf16 in B"]
    assert [r.name for r in found.rounded if r.is_lost] == ["wpe.weight"]
    ucpl.convert(tmp_path / "b", tmp_path / "c", to="zero2(dp=1, bf16=0)")
    again = ucpl.compare(tmp_path / "b", tmp_path / "c")
    assert again and not next(r for r in again.rounded if r.name == "wpe.weight").differ


@pytest.mark.parametrize("side", ["a", "b"])
def test_one_weight_that_is_not_its_master_rounded_is_named(side: str, tmp_path: Path) -> None:
    """By hand and with torch, in the files of either side.

    The next number of that type.
    """
    for there, to in (("a", "zero1(dp=2)"), ("b", "zero1(dp=2, bf16=1)")):
        ucpl.convert(FIXTURES / "z1_dp4", tmp_path / there, to=to)
    (file,) = (tmp_path / side).glob("*/mp_rank_00_model_states.pt")
    value = torch.load(file, weights_only=False)
    weight = value["module"]["blocks.1.mlp.down.weight"]
    bits = weight.view(torch.int16 if weight.dtype == torch.bfloat16 else torch.int32)
    bits[3, 5] += 1
    torch.save(value, file)
    found = ucpl.compare(tmp_path / "a", tmp_path / "b")
    assert {(d.kind, d.element) for d in found.differences} == {("value", "blocks.1.mlp.down.weight[3, 5]")}


def test_a_changed_moment_is_a_difference_in_two_dtypes_too(tmp_path: Path) -> None:
    ucpl.convert(FIXTURES / "z1_dp4", tmp_path / "b", to="zero2(dp=2, bf16=1)")
    file = min((tmp_path / "b").glob("*/bf16_zero_pp_rank_0_*"))
    value = torch.load(file, weights_only=False)
    value["optimizer_state_dict"]["base_optimizer_state"]["state"][0]["exp_avg"][7] += 0.5
    torch.save(value, file)
    (found,) = ucpl.compare(FIXTURES / "z1_dp4", tmp_path / "b").differences
    assert (found.kind, found.state) == ("value", "exp_avg")


def test_the_loss_scale_of_fp16_is_no_difference(tmp_path: Path) -> None:
    ucpl.convert(FIXTURES / "z1_dp2_bf16", tmp_path / "b", to="zero2(dp=2, fp16=1)")
    for a, b, side in (
        (FIXTURES / "z1_dp2_bf16", tmp_path / "b", "B"),
        (tmp_path / "b", FIXTURES / "z1_dp2_bf16", "A"),
    ):
        found = ucpl.compare(a, b)
        said = [(u.name, u.value, u.side) for u in found.unsaid if u.name == "loss_scaler"]
        assert found and said == [("loss_scaler", "dynamic, at 65536.0", side)]


def test_of_one_dtype_nothing_is_rounded(tmp_path: Path) -> None:
    """Weights alone say nothing of training.

    Another type is a difference, as usual.
    """
    for name, dtype in (("a", torch.float32), ("b", torch.bfloat16)):
        (tmp_path / name).mkdir()
        save_file({"w": torch.ones(4, dtype=dtype)}, tmp_path / name / "model.safetensors")
    found = ucpl.compare(tmp_path / "a", tmp_path / "b")
    assert [str(d) for d in found.differences] == ["weight of w: f32 in A, bf16 in B"] and not found.rounded


def test_the_command_says_it(tmp_path: Path) -> None:
    ucpl.convert(FIXTURES / "z1_dp4", tmp_path / "b", to="zero1(dp=2, bf16=1)")
    done = command("compare", FIXTURES / "z1_dp4", tmp_path / "b")
    assert done.status == 0 and done.out.splitlines()[-1].startswith("equal ")
    assert "rounded       weights of 26 tensors: f32 in A, bf16 in B; 10,6" in done.out and "in wte.weight" in done.out
    done = command("compare", FIXTURES / "z1_dp4", tmp_path / "b", "--json")
    assert done.json["equal"] and len(done.json["rounded"]) == 26
    assert {"name", "a", "b", "elements", "differ", "largest", "is_lost"} == set(done.json["rounded"][0])
