"""fp32 masters under another name in DCP.

Proved by bits, stated, or noted.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import ucpl
from tests.formats.dcp.test_dcp import FIXTURES, assert_equal, held_by_plain, truth
from tests.formats.dcp.test_dcp_odd import StateDict, save
from ucpl.conversion.engine import planned
from ucpl.conversion.planning import Asked
from ucpl.conversion.requests import Given
from ucpl.formats.opening import open_checkpoint
from ucpl.registry import format_named

HSDP = FIXTURES / "hsdp_2x2"
MASTERS = {
    name.removeprefix("optim.state.").removesuffix(".master"): tensor
    for name, tensor in truth("hsdp_2x2").items()
    if name.endswith(".master")
}
WIDE = torch.randn(6, 300, generator=torch.Generator().manual_seed(3))


def masters_of(folder: Path, tmp_path: Path) -> dict[str, torch.Tensor]:
    ucpl.convert(folder, tmp_path / "masters.pt", to='plain(master_state="fp32")')
    held = torch.load(tmp_path / "masters.pt", weights_only=True)["params"]
    return {name: states["fp32"] for name, states in held.items()}


def run_in(folder: Path, dtype: torch.dtype, **states: torch.Tensor) -> Path:
    """A folder with one weight of 16 bits, and these states."""
    state: StateDict = {("model", "w"): WIDE.to(dtype), ("optim", "state", "w", "exp_avg"): WIDE.flip(0)}
    state |= {("optim", "state", "w", name): tensor for name, tensor in states.items()}
    state |= {("optim", "param_groups", 0, "params"): ["w"], ("optim", "param_groups", 0, "lr"): 0.1}
    return save(folder, state)


def remarks_of(folder: Path, to: str = "zero1(dp = 2)", call: str = "") -> str:
    return "\n".join(planned(Asked(call or None, to, folder), Given()).odd)


def test_the_true_masters_are_those_of_a_target_and_keep_their_name_where_there_is_a_place(tmp_path: Path) -> None:
    assert "fp32 = state `master`" in remarks_of(HSDP)
    ucpl.convert(HSDP, tmp_path / "zero", to="zero1(dp = 2)")
    assert_equal(masters_of(tmp_path / "zero", tmp_path), MASTERS)
    assert any(p.name.startswith("bf16_zero_") for p in (tmp_path / "zero").rglob("*"))
    ucpl.convert(tmp_path / "zero", tmp_path / "back", to='dcp(fsdp = 3, master_state = "master")')
    ucpl.convert(tmp_path / "back", tmp_path / "back.pt", to="plain()")
    assert_equal(held_by_plain(tmp_path / "back.pt"), truth("hsdp_2x2"))
    ucpl.convert(tmp_path / "back.pt", tmp_path / "again", to="dcp(fsdp = 2)")  # a plain file keeps the name, too
    assert open_checkpoint(tmp_path / "again").state.settings["master_state"].value == "master"
    assert ucpl.compare(HSDP, tmp_path / "again")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["master_param", "fp32_param", "master_weight"])
def test_a_name_of_masters_that_the_bits_prove(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    folder = run_in(tmp_path / "run", dtype, **{name: WIDE})
    opened = open_checkpoint(folder)
    assert opened.state.tensors[0].states == ("exp_avg", "fp32") and opened.remarks == ()
    assert opened.state.settings["master_state"].value == name


def test_a_state_that_may_be_the_master_is_remarked_and_a_call_names_it(tmp_path: Path) -> None:
    folder = run_in(tmp_path / "run", torch.bfloat16, slow=WIDE)
    (remark,) = open_checkpoint(folder).remarks
    assert "may be their master" in remark and 'master_state = "slow"' in remark
    assert remark in remarks_of(folder)
    assert remarks_of(folder, call='dcp(master_state = "slow")') == ""
    ucpl.convert(folder, tmp_path / "zero", to="zero1(dp = 2)", layout='dcp(master_state = "slow")')
    assert_equal(masters_of(tmp_path / "zero", tmp_path), {"w": WIDE})


def test_a_name_without_the_bits_is_no_master_and_is_remarked(tmp_path: Path) -> None:
    wrong = WIDE.clone()
    wrong[5, 299] += 1  # the last element of the last chunk
    folder = run_in(tmp_path / "run", torch.bfloat16, master=wrong)
    opened = open_checkpoint(folder)
    assert opened.state.tensors[0].states == ("exp_avg", "master")
    assert "`w`[5, 299] is not it, rounded to nearest even" in remarks_of(folder)


def test_a_call_can_state_that_there_is_no_master(tmp_path: Path) -> None:
    folder = run_in(tmp_path / "run", torch.bfloat16, master=WIDE)
    made = planned(Asked('dcp(master_state = "fp32")', "zero1(dp = 2)", folder), Given())
    assert made.checkpoint is not None and made.checkpoint.state.tensors[0].states == ("exp_avg", "master")
    assert any("derived from weight" in text for text in made.plan.derived)


def test_moments_alone_are_no_masters_and_no_remark(tmp_path: Path) -> None:
    assert open_checkpoint(run_in(tmp_path / "run", torch.bfloat16)).remarks == ()
    assert remarks_of(FIXTURES / "fsdp2_tp_2x2") == ""


@pytest.mark.parametrize("target", ["dcp(fsdp = 3)", "plain()", "safetensors()", "torch_file()"])
def test_dropped_masters_are_neither_written_nor_compared_with_their_weights(target: str, tmp_path: Path) -> None:
    """The weights were changed on purpose: they are those of the target."""
    folder = run_in(tmp_path / "run", torch.bfloat16, master=WIDE + 1)
    call = 'dcp(master_state = "master")'
    with pytest.raises(ucpl.UcplError, match="E615"):
        ucpl.convert(folder, tmp_path / "both", target, layout=call)
    done = ucpl.convert(folder, tmp_path / "made", target, layout=call, drop=["fp32"])
    assert "fp32 of w: dropped by name" in done.plan.dropped
    opened = open_checkpoint(tmp_path / "made")
    assert {state for tensor in opened.state.tensors for state in tensor.states} <= {"exp_avg"}
    ucpl.convert(tmp_path / "made", tmp_path / "made.pt", "plain()")
    held = torch.load(tmp_path / "made.pt", weights_only=True)["params"]["w"]
    assert torch.equal(held["weight"], WIDE.bfloat16())


def test_masters_by_their_own_name_are_dropped_from_a_folder_that_shards_them(tmp_path: Path) -> None:
    ucpl.convert(HSDP, tmp_path / "made", "dcp(fsdp = 2)", drop=["fp32"])
    wanted = {name: tensor for name, tensor in truth("hsdp_2x2").items() if not name.endswith(".master")}
    ucpl.convert(tmp_path / "made", tmp_path / "made.pt", "plain()")
    assert_equal(held_by_plain(tmp_path / "made.pt"), wanted)


@pytest.mark.parametrize(("call", "wide"), [("dcp(fsdp = 2{})", ", bf16 = 0"), ("torch_file({})", "bf16 = 0")])
def test_advice_says_how_masters_become_the_weights(call: str, wide: str, tmp_path: Path) -> None:
    """An optimizer of torch trains the weights that the job loads."""
    engine = FIXTURES.parent / "deepspeed" / "z1_dp2_bf16"
    told = [advice_of(engine, call.format(more)) for more in ("", wide)]
    assert "bf16 = 0)' has them as the weights" in told[0] and "the masters" not in told[1]
    ucpl.convert(engine, tmp_path / "made", call.format(wide))
    ucpl.convert(tmp_path / "made", tmp_path / "made.pt", "plain()")
    held = torch.load(tmp_path / "made.pt", weights_only=True)["params"]
    masters = masters_of(engine, tmp_path)
    assert_equal({name: held[name]["weight"] for name in masters}, masters)


def advice_of(path: Path, call: str) -> str:
    goal = ucpl.plan(str(path), call).target
    return "\n".join(format_named(goal.framework).advice(open_checkpoint(path), goal))
