"""Folders of Megatron-FSDP (--ckpt-format fsdp_dtensor): names, halves, groups.

megatron-core 0.16.1 and ucpl wrote them.
"""

from __future__ import annotations

import json
import shutil
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

import ucpl
from tests.formats.megatron.test_megatron_core import FIXTURES, drawn, plain_of
from ucpl.errors import UcplError
from ucpl.formats.megatron.fsdp_reading import halves_of
from ucpl.formats.opening import open_checkpoint

OWN = "fsdp_tp2"  # of Megatron-FSDP itself
DENSE, EXPERTS = "dist_stacked_tp2_pp2_fully", "dist_stacked_moe_tp2_ep2"
States = dict[str, dict[str, torch.Tensor]]


def held(folder: Path, made: Path) -> tuple[States, dict[str, torch.Tensor]]:
    """Parameters and buffers, with steps, under the names of modules."""
    ucpl.convert(folder, made.with_suffix(".chunks"), to="dcp(fsdp=1)")
    ucpl.convert(made.with_suffix(".chunks"), made, to="plain()")
    read = torch.load(made, weights_only=True)
    return read["params"], read["buffers"]


def keys(step: Path) -> dict[str, object]:
    """Each name of `.metadata`, with the nested dicts that it comes from."""
    told = FileSystemReader(str(step)).read_metadata()
    assert told.planner_data is not None and told.planner_data.keys() == told.state_dict_metadata.keys()
    return dict(told.planner_data)


def test_a_plain_file_has_what_is_stored_under_the_names_of_the_files(tmp_path: Path) -> None:
    """Halves stay separate, without 16-bit weights, also by a plan."""
    told = json.loads((FIXTURES / f"{OWN}.truth.json").read_text())["truth"]
    ucpl.save_plan(ucpl.plan(str(FIXTURES / OWN), "plain()"), tmp_path / "a.plan")
    ucpl.apply(tmp_path / "a.plan", FIXTURES / OWN, tmp_path / "plain.pt")
    params = torch.load(tmp_path / "plain.pt", weights_only=True)["params"]
    assert params.keys() == {*told["model"]}
    for name, states in params.items():
        is_half = name.endswith(("_w", "_v"))
        rows, *rest = states["weight"].shape
        for state, suffix in (("weight", ""), ("exp_avg", ".exp_avg"), ("exp_avg_sq", ".exp_avg_sq")):
            wanted = drawn(f"{name[:-2] if is_half else name}{suffix}", [rows * (1 + is_half), *rest])
            half = slice(rows, None) if name.endswith("_v") else slice(rows)
            assert torch.equal(states[state], wanted[half]), (name, state)
        assert states["step"] == 1 and "fp32" not in states


def test_each_value_is_as_megatron_wrote_it(tmp_path: Path) -> None:
    """A trained tensor is its master; a linear_fc1 is joined.

    Its weight is the master in 16 bits.
    """
    told = json.loads((FIXTURES / f"{OWN}.truth.json").read_text())["truth"]
    params, buffers = held(FIXTURES / OWN, tmp_path / "plain.pt")
    whole = {n.removeprefix("module.").removesuffix("_w").removesuffix("_v") for n in told["model"]}
    assert params.keys() == whole and not buffers
    for name, states in params.items():
        shape = list(states["fp32"].shape)
        assert torch.equal(states["fp32"], drawn(f"module.{name}", shape)), name
        assert torch.equal(states["weight"], states["fp32"].bfloat16()), name
        for state in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(states[state], drawn(f"module.{name}.{state}", shape)), (name, state)
        assert int(states["step"]) == 1
    groups = open_checkpoint(FIXTURES / OWN).state.groups
    assert [(g.hyper["wd_mult"], len(g.members)) for g in groups] == [(1.0, 6), (0.0, 4)]


@pytest.mark.parametrize("dp", [1, 3])
def test_a_target_has_the_names_that_megatron_asks_for(tmp_path: Path, dp: int) -> None:
    ucpl.convert(FIXTURES / OWN, tmp_path / "made", to=f"megatron_fsdp(dp={dp})")
    assert keys(tmp_path / "made") == keys(FIXTURES / OWN)
    assert len(list((tmp_path / "made").glob("*.distcp"))) == dp
    assert equal(held(FIXTURES / OWN, tmp_path / "a.pt"), held(tmp_path / "made", tmp_path / "b.pt"))


def equal(one: tuple[States, dict[str, torch.Tensor]], other: tuple[States, dict[str, torch.Tensor]]) -> bool:
    def flat(params: States, buffers: dict[str, torch.Tensor]) -> dict[tuple[str, str], torch.Tensor]:
        states = {(n, s): torch.as_tensor(v) for n, found in params.items() for s, v in found.items()}
        return {**states, **{(n, ""): tensor for n, tensor in buffers.items()}}

    first, second = flat(*one), flat(*other)
    return first.keys() == second.keys() and all(torch.equal(first[k], second[k]) for k in first)


@pytest.mark.parametrize("through", ["megatron_core(tp=2)", "megatron_legacy(tp=2)"])
def test_through_megatrons_other_forms_and_back(tmp_path: Path, through: str) -> None:
    ucpl.convert(FIXTURES / OWN, tmp_path / "other", to=through)
    ucpl.convert(tmp_path / "other", tmp_path / "back", to="megatron_fsdp(dp=2)")
    assert equal(held(FIXTURES / OWN, tmp_path / "a.pt"), held(tmp_path / "back", tmp_path / "b.pt"))
    step = next((tmp_path / "back").glob("iter_*"), tmp_path / "back")
    asked = {name for name in keys(FIXTURES / OWN) if name.startswith(("model.", "optimizer."))}
    assert asked <= keys(step).keys()


def test_a_folder_of_another_form_and_back(tmp_path: Path) -> None:
    """Stacks are layers, with masters; torch itself reads each half."""
    ucpl.convert(FIXTURES / DENSE, tmp_path / "made", to="megatron_fsdp(dp=3)")
    params, _ = plain_of(DENSE, tmp_path / "plain")
    whole = params["decoder.layers.mlp.linear_fc1.weight"]
    for state, lead, end in (
        ("fp32", "model.", ""),
        ("exp_avg", "optimizer.state.module.module.", ".exp_avg"),
    ):
        gate, up = whole[state][1].chunk(2, 0)
        for half, wanted in (("_w", gate), ("_v", up)):
            name = f"{lead}module.decoder.layers.1.mlp.linear_fc1.weight{half}{end}"
            read = {name: torch.empty(wanted.shape)}
            (step,) = (tmp_path / "made").glob("iter_*")
            load(read, storage_reader=FileSystemReader(str(step)), no_dist=True)
            assert torch.equal(read[name], wanted), name
    ucpl.convert(tmp_path / "made", tmp_path / "back", to="megatron_core()")
    back, _ = held(tmp_path / "back", tmp_path / "back.pt")
    assert len(back) == 15
    for name, states in back.items():
        number = next((int(step) for step in name.split(".") if step.isdecimal()), None)
        stack = name if number is None else name.replace(f".{number}.", ".")
        for state in ("fp32", "exp_avg", "exp_avg_sq"):
            wanted = params[saved(stack)][state]
            assert torch.equal(states[state], wanted if number is None else wanted[number]), (name, state)


def saved(name: str) -> str:
    """The stack of a module of Megatron-Core's own blocks."""
    return name.replace("input_layernorm.", "self_attention.linear_qkv.layer_norm_").replace(
        "pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_"
    )


def test_experts_as_a_grouped_mlp_has_them(tmp_path: Path) -> None:
    """Weights alone are as they are: no master is made of them."""
    ucpl.convert(FIXTURES / EXPERTS, tmp_path / "apart", to="megatron_fsdp()")
    ucpl.convert(FIXTURES / EXPERTS, tmp_path / "made", to="megatron_fsdp(dp=2, grouped=1)")
    (apart,), (step,) = ((tmp_path / n).glob("iter_*") for n in ("apart", "made"))
    lead = "model.module.decoder.layers.1.mlp.experts."
    assert f"{lead}local_experts.3.linear_fc1.weight_v" in keys(apart)
    assert {f"{lead}linear_fc1.weight3_v", f"{lead}linear_fc2.weight0"} <= keys(step).keys()
    assert not any("local_experts" in name or name.startswith("optimizer.") for name in keys(step))
    assert equal(held(apart, tmp_path / "a.pt"), held(step, tmp_path / "b.pt"))


def test_a_half_without_the_other_is_refused(tmp_path: Path) -> None:
    shape = (4, 2)
    with pytest.raises(UcplError) as refused:
        halves_of({"module.a.mlp.linear_fc1.weight_w": shape}, "module.", tmp_path)
    assert refused.value.diagnostics[0].code == "E521"
    with pytest.raises(UcplError, match=r"\[4, 2\].*\[3, 2\]"):
        both = {"module.a.mlp.linear_fc1.weight_w": shape, "module.a.mlp.linear_fc1.weight_v": (3, 2)}
        halves_of(both, "module.", tmp_path)


def test_a_run_with_a_tracker_is_opened_at_its_newest_iteration(tmp_path: Path) -> None:
    shutil.copytree(FIXTURES / OWN, tmp_path / "run" / "iter_0000010")
    (tmp_path / "run" / "latest_checkpointed_iteration.txt").write_text("10")
    found = open_checkpoint(tmp_path / "run")
    assert (found.format, found.tag) == ("megatron_fsdp", "iter_0000010")
    assert open_checkpoint(FIXTURES / OWN).state.settings["owner"].value == "module.module.module."


def test_what_megatron_fsdp_would_not_load_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UcplError) as refused:
        ucpl.convert(FIXTURES / "dist_muon", tmp_path / "made", to="megatron_fsdp()")
    assert refused.value.diagnostics[0].code == "E471" and "momentum_buffer" in str(refused.value)
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    "names",
    [
        ("mlp.linear_fc1.weight", "mlp.linear_fc1.weight_w", "mlp.linear_fc1.weight_v"),
        ("mlp.linear_fc1.weight_w", "mlp.linear_fc1.weight_v", "mlp.linear_fc1.weight"),
        ("mlp.experts.linear_fc2.weight1", "mlp.experts.local_experts.1.linear_fc2.weight"),
    ],
    ids=["whole and halves", "halves and whole", "two dialects"],
)
def test_two_names_of_one_tensor_are_refused(tmp_path: Path, names: tuple[str, ...]) -> None:
    """The one would be read as the other."""
    with pytest.raises(UcplError, match="are both") as refused:
        halves_of({f"module.{name}": (4, 2) for name in names}, "module.", tmp_path)
    assert refused.value.diagnostics[0].code == "E521"


def test_halves_without_rows_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UcplError) as refused:
        halves_of({f"module.mlp.linear_fc1.weight{half}": () for half in ("_w", "_v")}, "module.", tmp_path)
    assert refused.value.diagnostics[0].code == "E521"


def test_layers_in_a_wrapper_are_not_megatrons_by_that_alone(tmp_path: Path) -> None:
    """DDP has a prefix, too; only Megatron-Core's linear layers identify it."""
    weight = {f"module.decoder.layers.0.{name}": torch.ones(3, 2) for name in ("fc1", "self_attn.q")}
    save({"model": weight}, checkpoint_id=str(tmp_path / "made"), no_dist=True)
    assert open_checkpoint(tmp_path / "made").format == "dcp"


@pytest.mark.parametrize(
    "name",
    [
        "embedding.word_embeddings.weight",
        "output_layer.weight",
        "decoder.final_layernorm.weight",
        "decoder.layers.0.input_layernorm.weight",
        "decoder.layers.0.mixer.in_proj.weight",
        "encoder.layers.0.mlp.router.weight",
        "mtp.layers.0.eh_proj.weight",
    ],
)
def test_a_target_of_any_module_of_megatrons_is_opened(name: str, tmp_path: Path) -> None:
    """Weights alone, without an optimizer's name or a linear layer."""
    torch.save({"params": {name: {"weight": torch.ones(4, 4)}}}, tmp_path / "s.pt")
    ucpl.convert(tmp_path / "s.pt", tmp_path / "made", to="megatron_fsdp(dp=2)")
    found = open_checkpoint(tmp_path / "made")
    assert (found.format, [t.name for t in found.state.tensors]) == ("megatron_fsdp", [name])
    assert ucpl.verify(tmp_path / "made")


@pytest.mark.parametrize("stages", [1, 2])
def test_layers_of_several_stages_under_the_same_names_are_refused(tmp_path: Path, stages: int) -> None:
    """Each stage numbers its layers from 0.

    4 layers of a run, 2 in its folder.
    """
    names = [f"module.decoder.layers.{n}.mlp.linear_fc2.weight" for n in range(2)]
    arguments = Namespace(num_layers=4, pipeline_model_parallel_size=stages)
    saved_by = {"model": {name: torch.ones(3, 2) for name in names}, "args": arguments}
    save(saved_by, checkpoint_id=str(tmp_path / "made"), no_dist=True)
    if stages == 1:
        assert open_checkpoint(tmp_path / "made").format == "megatron_fsdp"
        return
    with pytest.raises(UcplError, match="4 layers on 2 stages, and the folder has 2") as refused:
        open_checkpoint(tmp_path / "made")
    assert refused.value.diagnostics[0].code == "E544"


@pytest.mark.parametrize("has_masters", [True, False])
def test_a_run_in_fp32_stays_one(tmp_path: Path, *, has_masters: bool) -> None:
    """Its weights are its masters, without a prefix of a 16-bit module."""
    names = ["embedding.word_embeddings.weight", "decoder.final_layernorm.weight"]
    states: dict[str, dict[str, Any]] = {n: {"weight": torch.randn(6, 4), "exp_avg": torch.randn(6, 4)} for n in names}
    for one in states.values():
        one |= {"exp_avg_sq": torch.rand(6, 4), "step": 3, **({"fp32": one["weight"].clone()} if has_masters else {})}
    torch.save({"params": states, "groups": [{"lr": 0.1, "params": names}]}, tmp_path / "one.pt")
    ucpl.convert(tmp_path / "one.pt", tmp_path / "made", to="megatron_fsdp(dp=2)")
    (step,) = (tmp_path / "made").glob("iter_*")
    assert "optimizer.state.module.module.decoder.final_layernorm.weight.exp_avg" in keys(step)
    params, _ = held(tmp_path / "made", tmp_path / "plain.pt")
    for name, one in states.items():
        assert all(torch.equal(params[name][s], one[s]) for s in ("weight", "exp_avg", "exp_avg_sq")), name
        assert torch.equal(params[name]["fp32"], one["weight"])
