"""Odd folders of DeepSpeed, compared with the engines' state."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import ucpl
from tests.cli.command import good
from tests.cli.command import ucpl as command
from ucpl.extents import TensorRef
from ucpl.files.torch_files import read_torch_file
from ucpl.files.values import Value
from ucpl.formats.opening import open_checkpoint

ODD = Path(__file__).parents[2] / "fixtures" / "odd"
NAMES = sorted(folder.name for folder in ODD.iterdir() if folder.is_dir())
WAYS = ["zero1(dp=3)", "zero2(dp=1)", "zero3(dp=3)", "plain()"]


def truth_of(name: str) -> dict[str, Any]:
    found: dict[str, Any] = torch.load(ODD / name / "truth.pt", weights_only=False)
    return found


def plain_of(source: Path, folder: Path) -> dict[str, Any]:
    ucpl.convert(source, folder / "plain.pt", to="plain()")
    found: dict[str, Any] = torch.load(folder / "plain.pt", weights_only=True)
    return found


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one, other)


def module_of(folder: Path, name: str) -> dict[str, Any]:
    root = folder / (folder / "latest").read_text()
    value: dict[str, Any] = torch.load(root / name, weights_only=False)
    return value


Z3 = "zero_pp_rank_0_mp_rank_00_model_states.pt"


@pytest.mark.parametrize("name", NAMES)
def test_plain_is_the_truth_of_what_is_stored(name: str, tmp_path: Path) -> None:
    truth, plain = truth_of(name), plain_of(ODD / name, tmp_path)
    left = {t for t, states in truth["params"].items() if "master" not in states and "lora" in name}
    if name == "toggled_z3":
        left = {"middle.bias"}  # frozen when the engine was made, and not when it was saved
    assert set(plain["params"]) == set(truth["params"]) - left
    for tensor, found in plain["params"].items():
        expected = truth["params"][tensor]
        assert same(found["weight"], expected["weight"]), tensor
        if "master" in expected:
            assert same(found["fp32"], expected["master"]), tensor
            for state in ("exp_avg", "exp_avg_sq") if "states" not in name else ():
                assert same(found[state], expected["state"][state]), (tensor, state)
        else:
            assert set(found) == {"weight"}, tensor
    for buffer, value in truth["buffers"].items():
        assert same(plain["buffers"][buffer], value), buffer


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", NAMES)
def test_there_and_back_is_the_same(name: str, way: str, tmp_path: Path) -> None:
    there = tmp_path / ("there.pt" if way == "plain()" else "there")
    good("convert", ODD / name, there, "--to", way)
    good("compare", ODD / name, there)
    good("verify", there)
    good("convert", there, tmp_path / "back", "--to", f"zero{name[-1]}(dp=2)")
    good("compare", ODD / name, tmp_path / "back")


# ---- values that are not stored
# ---------------------------------------------------------------------------------------


def test_inspect_and_plan_say_what_is_not_stored(tmp_path: Path) -> None:
    owner, alias = "model.base_model.model.transformer.wte.weight", "model.base_model.model.lm_head.weight"
    first, third = (
        good("inspect", ODD / name, "--json").json["not_stored"] for name in ("gpt2_lora_z1", "gpt2_lora_z3")
    )
    assert first[0] == f"{owner}: frozen and left out; its second name {alias} was not, and goes along, but to stage 3"
    assert third[0] == f"{owner}, and {alias}, which is the same: frozen and left out (exclude_frozen_parameters)"
    for lines in (first, third):
        assert lines[1].startswith(
            "frozen parameters (exclude_frozen_parameters): nothing is there of model.base_model"
        )
    printed = good("plan", "--from", ODD / "gpt2_lora_z3", "--to", "zero1(dp=3)").out
    assert f"not stored: {third[0]}" in printed
    printed = good("convert", ODD / "gpt2_lora_z3", tmp_path / "a", "--to", "zero1(dp=3)").out
    assert "load_module_strict=False" in printed and f"not stored    {third[0]}" in printed
    assert good("inspect", ODD / "names_z3", "--json").json["not_stored"] == []


def test_a_target_has_placeholders_and_fields_as_deepspeed_leaves_them(tmp_path: Path) -> None:
    alias = "model.base_model.model.lm_head.weight"
    for source in ("gpt2_lora_z1", "gpt2_lora_z3"):
        for stage, file in ((1, "mp_rank_00_model_states.pt"), (2, "mp_rank_00_model_states.pt"), (3, Z3)):
            target = tmp_path / f"{source}{stage}"
            ucpl.convert(ODD / source, target, to=f"zero{stage}(dp=3)")
            meta = module_of(target, file)
            # an engine asks a dict for all that is frozen in it; None says that there is nothing to ask
            assert meta["frozen_param_shapes"] is None and meta["frozen_param_fragments"] is None
            assert meta["shared_params"] == {alias: "model.base_model.model.transformer.wte.weight"}
            shapes = {name: tuple(tensor.shape) for name, tensor in meta["module"].items()}
            kept = (0,) if stage == 3 else (11, 4) if source == "gpt2_lora_z1" else None
            assert shapes.get(alias) == kept, (source, stage)
            assert len(shapes) == 2 + (kept is not None)


def test_the_second_name_of_what_was_left_out_goes_along(tmp_path: Path) -> None:
    alias = "model.base_model.model.lm_head.weight"
    original = module_of(ODD / "gpt2_lora_z1", "mp_rank_00_model_states.pt")["module"][alias]
    ucpl.convert(ODD / "gpt2_lora_z1", tmp_path / "plain.pt", to="plain()")
    ucpl.convert(tmp_path / "plain.pt", tmp_path / "back", to="zero2(dp=3)")
    assert same(module_of(tmp_path / "back", "mp_rank_00_model_states.pt")["module"][alias], original)
    ucpl.convert(ODD / "gpt2_lora_z1", tmp_path / "three", to="zero3(dp=3)")
    printed = good("compare", ODD / "gpt2_lora_z1", tmp_path / "three").out
    assert alias in printed and "left out" in printed


# ---- states of an optimizer ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["states_z1"])
def test_names_of_states_are_a_namespace_of_their_own(name: str, tmp_path: Path) -> None:
    """States called `weight` and `fp32` keep their names in files."""
    truth, plain = truth_of(name)["params"], plain_of(ODD / name, tmp_path)["params"]
    for tensor, found in plain.items():
        kept = truth[tensor]["state"]
        assert same(found["optimizer.weight"], kept["weight"]) and same(found["optimizer.fp32"], kept["fp32"])
        assert found["none"] is None and found["history"] == [1, 2.5] and found["one"].tolist() == [2.5]
    ucpl.convert(ODD / name, tmp_path / "two", to="zero2(dp=1)")
    root = tmp_path / "two" / (tmp_path / "two" / "latest").read_text()
    shard = Value.of(read_torch_file(root, "zero_pp_rank_0_mp_rank_00_optim_states.pt")).at("optimizer_state_dict")
    state = shard.at("base_optimizer_state", "state", 0).mapping()
    one = state["one"]
    assert set(state) == {"none", "history", "one", "weight", "fp32"}
    assert state["none"] is None and state["history"] == [1, 2.5]
    assert isinstance(one, TensorRef) and one.shape == (1,)


def test_states_without_a_place_in_a_universal_folder_are_named(tmp_path: Path) -> None:
    """DeepSpeed's loader requests `param`, a tensor, from each file but step.pt."""
    printed = command("convert", ODD / "states_z1", tmp_path / "u", "--to", "universal()").err
    names = ("history", "none", "one", "optimizer.fp32", "optimizer.weight")
    assert all(f"--drop {name}" in printed for name in names) and "E471" in printed and "a list" in printed
    assert not (tmp_path / "u").exists()
    drops = [word for name in names for word in ("--drop", name)]
    good("convert", ODD / "states_z1", tmp_path / "u", "--to", "universal()", *drops)
    root = tmp_path / "u" / "global_step3_universal"
    assert {path.name for path in root.glob("zero/*/*.pt")} == {"fp32.pt"}
    for name, kept in truth_of("states_z1")["params"].items():
        found = torch.load(root / "zero" / name / "fp32.pt", weights_only=True)["param"]
        assert same(found, kept["master"])


def test_dcp_has_states_with_a_dot_in_their_name(tmp_path: Path) -> None:
    good("convert", ODD / "states_z1", tmp_path / "dcp", "--to", "dcp(fsdp=2)")
    good("compare", ODD / "states_z1", tmp_path / "dcp")
    dcp_to_torch_save(tmp_path / "dcp", tmp_path / "one.pt")
    states = torch.load(tmp_path / "one.pt", weights_only=True)["optim"]["state"]
    truth = truth_of("states_z1")["params"]
    assert set(states) == set(truth)
    for name, kept in truth.items():
        assert same(states[name]["optimizer.fp32"], kept["state"]["fp32"])
        assert same(states[name]["optimizer.weight"], kept["state"]["weight"])
        assert states[name]["history"] == [1, 2.5] and states[name]["none"] is None
    printed = command("convert", ODD / "states_z1", tmp_path / "flat", "--to", "dcp(fsdp=2, flat=1)").err
    assert "E471" in printed and "--drop optimizer.weight --drop optimizer.fp32" in printed
    drops = ("--drop", "optimizer.weight", "--drop", "optimizer.fp32")
    good("convert", ODD / "states_z1", tmp_path / "flat", "--to", "dcp(fsdp=2, flat=1)", *drops)
    good("verify", tmp_path / "flat")


# ---- values in two places, or in none
# ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["names_z1", "names_z3"])
def test_a_module_and_a_buffer_under_two_names(name: str, tmp_path: Path) -> None:
    opened = open_checkpoint(ODD / name)
    assert opened.state.aliases == {"norms.1.weight": "norms.0.weight", "norms.1.bias": "norms.0.bias"}
    assert [t.name for t in opened.state.tensors if t.kind == "buffer"] == ["calls", "counted"]
    ucpl.convert(ODD / name, tmp_path / "three", to="zero3(dp=3)")
    shapes = {n: tuple(t.shape) for n, t in module_of(tmp_path / "three", Z3)["module"].items() if torch.is_tensor(t)}
    assert shapes["counted"] == shapes["calls"] == (3,) and shapes["norms.1.weight"] == (0,)


def test_what_was_frozen_and_thawed_between_steps(tmp_path: Path) -> None:
    kinds = {t.name: t.kind for t in open_checkpoint(ODD / "toggled_z2").state.tensors}
    assert kinds["norms.0.weight"] == "parameter" and kinds["middle.bias"] == kinds["middle.weight"] == "frozen"
    ucpl.convert(ODD / "toggled_z2", tmp_path / "two", to="zero2(dp=3)")
    fragments = module_of(tmp_path / "two", "mp_rank_00_model_states.pt")["frozen_param_fragments"]
    weights = truth_of("toggled_z2")["params"]
    assert all(same(fragments[name], weights[name]["weight"]) for name in ("middle.bias", "middle.weight"))
    said = good("inspect", ODD / "toggled_z3", "--json").json["not_stored"]
    assert said == ["middle.bias: in no group of the optimizer and not frozen, and stage 3 saves no such parameter"]


# ---- tags -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tag", ["run 1", "exp/a b/step 3"])
def test_a_tag_with_spaces_and_folders_among_others(tag: str, tmp_path: Path) -> None:
    for other in (tag, "best"):
        shutil.copytree(ODD / "names_z1" / "global_step3", tmp_path / "save" / other)
    (tmp_path / "save" / "latest").write_text(f"{tag}\n")
    good("convert", tmp_path / "save", tmp_path / "three", "--to", "zero3(dp=3)")
    assert (tmp_path / "three" / "latest").read_text() == tag
    assert (tmp_path / "three" / tag / Z3).is_file()
    good("compare", ODD / "names_z1", tmp_path / "three")


def test_extra_state_of_a_module_goes_along(tmp_path: Path) -> None:
    ucpl.convert(ODD / "names_z1", tmp_path / "plain.pt", to="plain()")
    ucpl.convert(tmp_path / "plain.pt", tmp_path / "three", to="zero3(dp=3)")
    assert module_of(tmp_path / "three", Z3)["module"]["_extra_state"] == {"seen": [1, (2, 3.5)], "note": "kept"}


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("name", ["z1_dp4", "pp2_dp2_z1", "z2_dp3_frozen"])
def test_nothing_is_reported_as_excluded_without_evidence(name: str, stage: int, tmp_path: Path) -> None:
    """Stage 1 and pipelines state no frozen parameters, with or without some.

    None would mean that they were excluded.
    """
    here = ODD.parent / "deepspeed" / name
    ucpl.convert(here, tmp_path / "x", to=f"zero{stage}(dp=2)")
    assert "not stored" not in good("inspect", tmp_path / "x").out
    file = next((tmp_path / "x").glob("*/*rank_0*model_states.pt" if stage == 3 else "*/mp_rank_00*"))
    made = read_torch_file(file.parent, file.name)
    held = Value.of(made).mapping()
    assert ("frozen_param_shapes" in held) == (name == "z2_dp3_frozen")


def test_a_moment_of_one_element_and_a_number_are_unchanged(tmp_path: Path) -> None:
    """From ZeRO-0, with states per parameter: others decide between `[1]` and `[]`."""
    ucpl.convert(ODD / "names_z1", tmp_path / "whole", to="zero0(dp=1)")
    (file,) = (tmp_path / "whole").glob("*/mp_rank_00_model_states.pt")
    value = torch.load(file, weights_only=False)
    value["module"]["*"] = value["module"]["*"][:1].clone()
    for shapes in value.get("param_shapes") or []:
        shapes.update({name: torch.Size([1]) for name in shapes if name == "*"})
    states = value["optimizer"]["state"]
    states[0] |= {name: states[0][name][:1].clone() for name in ("exp_avg", "exp_avg_sq")}
    for held in states.values():
        held |= {"count": torch.tensor(7.0), "many": 3}
    torch.save(value, file)
    for stage, dp in ((1, 2), (2, 1), (3, 2)):
        ucpl.convert(tmp_path / "whole", tmp_path / f"cut{stage}", to=f"zero{stage}(dp={dp})")
        ucpl.convert(tmp_path / f"cut{stage}", tmp_path / f"back{stage}", to="zero0(dp=1)")
        after = module_of(tmp_path / f"back{stage}", file.name)["optimizer"]["state"]
        assert after.keys() == states.keys()
        for number, held in states.items():
            assert after[number].keys() == held.keys()
            for name, one in held.items():
                found = after[number][name]
                assert type(found) is type(one), (number, name)
                assert same(found, one) if torch.is_tensor(one) else found == one, (number, name)
