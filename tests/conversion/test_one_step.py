"""Files of two steps have equal keys and shapes.

`convert` and `apply` hold a sample of weights against masters.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cli.command import ucpl
from tests.formats.deepspeed import deepspeed_stand_ins  # noqa: F401  (classes that pickle looks for)
from ucpl import apply, convert
from ucpl.errors import UcplError

FIXTURES = Path(os.environ.get("UCPL_CHECKPOINTS", Path(__file__).parents[1] / "fixtures")) / "deepspeed"
OPTIM = "optimizer_state_dict"


def of_another_step(value: Any) -> None:
    """Weights and masters of a file one step later, and uncounted values."""
    kept = value.get(OPTIM, {}).get("single_partition_of_fp32_groups") or (value.get("module") or value).values()
    for tensor in kept:
        if torch.is_tensor(tensor) and tensor.is_floating_point():
            tensor.detach().add_(0.125)


CASES = {
    "a rank's shard, by an optimizer that counts nothing": ("z1_dp2_sgdm", "zero_pp_rank_1_mp_rank_00_optim_states.pt"),
    "model states": ("z1_dp4", "mp_rank_00_model_states.pt"),
    "a layer": ("pp2_dp2_z1", "layer_02-model_states.pt"),
    "an expert": ("moe_ep2_dp2_z1", "layer_0_expert_1_mp_rank_00_model_states.pt"),
    "weights in bf16": ("z1_dp2_bf16", "mp_rank_00_model_states.pt"),
}


def copied(name: str, to: Path) -> Path:
    return next(shutil.copytree(FIXTURES / name, to).glob("global_step?"))


def edited(file: Path, change: Callable[[Any], None]) -> None:
    value = torch.load(file, weights_only=False)
    change(value)
    torch.save(value, file)


@pytest.mark.fault(
    "Folders of DeepSpeed and Hugging Face",
    "a file of another step",
    "refused: a sample of each weight is compared with its master",
)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("to", ["zero3(dp=3)", "plain()"])
def test_a_file_of_another_step_is_refused(case: str, to: str, tmp_path: Path) -> None:
    name, file = CASES[case]
    if not name.startswith("z"):
        to = "plain()"
    edited(copied(name, tmp_path / "source") / file, of_another_step)
    done = ucpl("convert", tmp_path / "source", tmp_path / "target", "--to", to)
    assert done.status == 3
    assert "error[E615]" in done.err and file in done.err
    assert not (tmp_path / "target").exists()


def test_weights_that_were_changed_on_purpose_are_converted_on_request(tmp_path: Path) -> None:
    edited(copied("z1_dp4", tmp_path / "source") / "mp_rank_00_model_states.pt", of_another_step)
    with pytest.raises(UcplError, match="E615"):
        convert(tmp_path / "source", tmp_path / "target", "plain()")
    convert(tmp_path / "source", tmp_path / "target", "plain()", allow_drift=True)
    found = torch.load(tmp_path / "target" / "plain.pt", weights_only=True)["params"]["temp"]
    assert torch.equal(found["weight"], found["fp32"] + 0.125)


@pytest.mark.fault("Folders of DeepSpeed and Hugging Face", "the same for `apply`", "refused with the same text")
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("to", ["zero3(dp=3)", "plain()"])
def test_a_plan_is_not_applied_to_files_of_two_steps(case: str, to: str, tmp_path: Path) -> None:
    """Made while all was well, by headers alone.

    The source's values are checked when the plan is applied.
    """
    name, file = CASES[case]
    if not name.startswith("z"):
        to = "plain()"
    folder, plan = copied(name, tmp_path / "source"), tmp_path / "it.plan"
    assert ucpl("plan", "--from", tmp_path / "source", "--to", to, "-o", plan).status == 0
    assert ucpl("apply", plan, tmp_path / "source", tmp_path / "whole").status == 0
    edited(folder / file, of_another_step)
    done = ucpl("apply", plan, tmp_path / "source", tmp_path / "target")
    assert done.status == 3
    assert "error[E615]" in done.err and file in done.err and "the weight is not its master" in done.err
    assert not (tmp_path / "target").exists()
    with pytest.raises(UcplError, match="E615"):
        apply(plan, tmp_path / "source", tmp_path / "target")
    assert ucpl("apply", plan, tmp_path / "source", tmp_path / "target", "--allow-drift").status == 0


def test_a_plan_from_specs_alone_knows_masters_too(tmp_path: Path) -> None:
    folder, plan = copied("z1_dp4", tmp_path / "source"), tmp_path / "it.plan"
    spec = tmp_path / "model.ucpl"
    assert ucpl("infer", tmp_path / "source", "-o", spec).status == 0
    named = f"{spec}:checkpoint"
    assert ucpl("plan", "--from", "zero1(dp=4)", "--to", "zero3(dp=3)", "--model", named, "-o", plan).status == 0
    assert ucpl("apply", plan, tmp_path / "source", tmp_path / "whole").status == 0
    edited(folder / "mp_rank_00_model_states.pt", of_another_step)
    done = ucpl("apply", plan, tmp_path / "source", tmp_path / "target")
    assert done.status == 3 and "error[E615]" in done.err and "weight of temp" in done.err


def test_damage_is_named_before_drift(tmp_path: Path) -> None:
    """A flipped bit makes a weight another than its master, too."""
    file = copied("z1_dp2_sgdm", tmp_path / "source") / "mp_rank_00_model_states.pt"
    held = torch.load(file, weights_only=False)["module"]["temp"].numpy().tobytes()
    raw = bytearray(file.read_bytes())
    assert raw.count(held) == 1
    raw[raw.find(held)] ^= 4
    file.write_bytes(raw)
    done = ucpl("convert", tmp_path / "source", tmp_path / "target", "--to", "zero2(dp=3)")
    assert done.status == 3 and "error[E612]" in done.err and "temp" in done.err


@pytest.mark.parametrize("name", ["z3_dp2_subgroup", "z1_dp2_sgdm"])
def test_model_states_of_another_step_are_found_by_the_schedule(name: str, tmp_path: Path) -> None:
    """At stage 3 they hold no weight to compare with masters."""
    folder = copied(name, tmp_path / "source")

    def of_a_step_before(value: Any) -> None:
        value["lr_scheduler"]["_last_lr"] = [0.00833, 0.00417]
        value["global_steps"] -= 1

    for file in folder.glob("*model_states.pt"):
        edited(file, of_a_step_before)
    done = ucpl("convert", tmp_path / "source", tmp_path / "target", "--to", "zero2(dp=3)")
    assert done.status == 3 and "error[E615]" in done.err
    assert "group 0 of the optimizer has the learning rate 0.00769230769, and its schedule gave 0.00833" in done.err
    assert ucpl("convert", tmp_path / "source", tmp_path / "target", "--to", "zero2(dp=3)", "--allow-drift").status == 0
