"""Values that one rank's file has and another's has not.

The account names each, whatever the format.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ucpl
from tests.conversion.test_accounting import FIXTURES, MARK
from tests.formats.deepspeed import deepspeed_stand_ins  # noqa: F401  (classes that pickle looks for)
from ucpl.api import open_checkpoint

Z1 = "deepspeed/z1_dp2_bf16"
Z3 = "deepspeed/z3_dp2_subgroup"
SHARD_0 = "global_step3/bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"
SHARD_1 = SHARD_0.replace("rank_0", "rank_1", 1)
MODEL = "global_step3/mp_rank_00_model_states.pt"
MODEL_1 = "global_step3/zero_pp_rank_1_mp_rank_00_model_states.pt"
LEGACY, LEGACY_1 = "megatron/legacy_adam", "iter_0000010/mp_rank_00_001/model_optim_rng.pt"
UNIVERSAL, SHARED = "universal/z3_dp4/global_step3_universal", "zero/optimizer_state.pt"
UNIVERSAL_1 = "zero_pp_rank_1_mp_rank_00_model_states.pt"
TP, INFO = "deepspeed/tp2_dp2_z1_uneven", "universal_checkpoint_info"
BUCKETS = "iter_0000010/mp_rank_00_000/distrib_optim.pt"


def shard(value: Any) -> Any:
    return value["optimizer_state_dict"]


def groups(value: Any) -> Any:
    return value["param_groups"]


def add(value: Any) -> None:
    value.update({MARK: 1})


def more(held: Any) -> None:
    held.append({**held[0], "params": [], MARK: 1})


# Name of the case -> (fixture, file, change, the rest of the account's name besides the mark).
PLANTS: dict[str, tuple[str, str, Callable[[Any], object], str]] = {
    "a shard's ds_config": (Z1, SHARD_0, lambda v: add(v["ds_config"]), "ds_config"),
    "a section of it": (Z1, SHARD_1, lambda v: add(v["ds_config"]["zero_optimization"]), "zero_optimization"),
    "a slice": (Z1, SHARD_0, lambda v: add(shard(v)["param_slice_mappings"][0]), "param_slice_mappings/0"),
    "a slice's attribute": (
        Z1, SHARD_1,
        lambda v: vars(next(iter(shard(v)["param_slice_mappings"][1].values()))).update({MARK: 1}),
        "param_slice_mappings/1",
    ),
    "a loss scaler": (Z1, SHARD_1, lambda v: vars(shard(v)["loss_scaler"]).update({MARK: 1}), "loss_scaler"),
    "a shard's group": (Z1, SHARD_1, lambda v: add(groups(shard(v)["base_optimizer_state"])[0]), "param_groups/0"),
    "names of a later stage": (
        "deepspeed/pp2_dp2_z1", MODEL.replace("rank_00", "rank_01"), lambda v: add(v["shared_params"]), "shared_params/",
    ),
    "fragments of frozen parameters": (
        "deepspeed/z2_dp3_frozen", MODEL, lambda v: v["frozen_param_fragments"].update({MARK: torch.ones(2)}),
        "frozen_param_fragments/",
    ),
    "handles of flat parameters": (
        "dcp/fsdp1_local_w4", "rank_3.pt", lambda v: add(v["flat_meta"][""]), "rank_3.pt: flat_meta/",
    ),
    "states of flat parameters": ("dcp/fsdp1_local_w4", "rank_3.pt", lambda v: add(v["optim"]["state"]), "optim/state/"),
    "the model of another tensor-parallel rank": (LEGACY, LEGACY_1, lambda v: add(v["model"]), "model/"),
    "degrees": (Z1, MODEL, lambda v: add(v["checkpoint_parallel_dimensions"]), "checkpoint_parallel_dimensions"),
    "a rank's schedule": (Z3, MODEL_1, lambda v: add(v["lr_scheduler"]), "lr_scheduler"),
    "a rank's ds_config": (Z3, MODEL_1, lambda v: add(v["ds_config"]), "ds_config"),
    "an optimizer without ZeRO": (
        "deepspeed/z0_dp2_bf16", MODEL, lambda v: add(v["optimizer"]["optimizer_state_dict"]), "optimizer_state_dict",
    ),
    "its states": (
        "deepspeed/z0_dp2_bf16", MODEL, lambda v: add(v["optimizer"]["optimizer_state_dict"]["state"]), "/state/",
    ),
    "content of torch_dist": ("megatron/dist_moe", "common.pt", lambda v: add(v["content_metadata"]), "content_metadata"),
    "a chain": ("megatron/dist_moe", "common.pt", lambda v: add(v["optimizer"]), "optimizer/"),
    "one of a chain": ("megatron/dist_moe", "common.pt", lambda v: add(v["optimizer"][1]), "optimizer/1/"),
    "its optimizer": ("megatron/dist_moe", "common.pt", lambda v: add(v["optimizer"][0]["optimizer"]), "optimizer/0/"),
    "common states": (
        "megatron/dist_muon", "common.pt", lambda v: add(v["optimizer"][1]["optimizer"]["state"]), "/state/",
    ),
    "states by number": ("megatron/dist_old", "common.pt", lambda v: add(v["optimizer"]["param_state"]), "param_state/"),
    "a legacy rank": (LEGACY, LEGACY_1, add, "mp_rank_00_001"),
    "its arguments": (LEGACY, LEGACY_1, lambda v: vars(v["args"]).update({MARK: 1}), "args"),
    "its optimizer's states": (
        LEGACY, LEGACY_1, lambda v: add(v["optimizer"][0]["optimizer"]["state"]), "/state/",
    ),
    "its groups": (
        LEGACY, LEGACY_1, lambda v: add(groups(v["optimizer"][0]["optimizer"])[0]), "param_groups/0",
    ),
    "client_state of a rank of a universal folder": (UNIVERSAL, UNIVERSAL_1, add, "of rank 1"),
    "a universal folder's optimizer": (
        UNIVERSAL, SHARED, lambda v: add(v["optimizer_state_dict"]), "optimizer_state_dict/",
    ),
    "its numbers": (
        UNIVERSAL, SHARED, lambda v: add(v["optimizer_state_dict"]["state"]), "optimizer_state_dict/state/",
    ),
    "its second groups": (
        UNIVERSAL, SHARED, lambda v: v.update(param_groups=[{**g, MARK: 1} for g in groups(v)]), "param_groups/0",
    ),
    "legacy buckets": ("megatron/legacy_buckets", BUCKETS, add, "distrib_optim.pt"),
}  # fmt: skip


def planted(tmp_path: Path, run: str, name: str, change: Callable[[Any], object]) -> Path:
    source = Path(shutil.copytree(FIXTURES / run, tmp_path / "run"))
    value = torch.load(source / name, weights_only=False)
    change(value)
    torch.save(value, source / name)
    return source


def names_of(source: Path, target: str) -> list[str]:
    account = ucpl.plan(str(source), target).account
    assert account is not None
    return [name for entry in account.of("dropped", "not read") for name in entry.names]


@pytest.mark.parametrize("what", PLANTS)
def test_what_one_file_has_alone_is_named(tmp_path: Path, what: str) -> None:
    run, name, change, where = PLANTS[what]
    assert not any(MARK in one for one in names_of(FIXTURES / run, "plain()"))
    found = [one for one in names_of(planted(tmp_path, run, name, change), "plain()") if MARK in one]
    if what == "its second groups":  # each of them
        assert len(found) == 2
        found = found[:1]
    assert len(found) == 1 and where in found[0]


def first_map(info: Any) -> Any:
    return next(iter(info["affine_map"]["params"].values()))


CUTS: dict[str, Callable[[Any], object]] = {
    "": add,
    "affine_map/": lambda info: add(info["affine_map"]),
    "affine_map/params/": lambda info: add(info["affine_map"]["params"]),
    "/ranks/1/": lambda info: add(first_map(info)["ranks"][1]),
    "/pieces/0/": lambda info: add(first_map(info)["ranks"][0]["pieces"][0]),
    "parameter_with_sub_params/1/": lambda info: add(info["parameter_with_sub_params"][1]),
    "sub_param_shard_widths/": lambda info: add(info["sub_param_shard_widths"]),
    "autotp_unsupported_parameter_patterns/": lambda info: add(info["autotp_unsupported_parameter_patterns"]),
}


@pytest.mark.parametrize("where", CUTS)
def test_a_key_of_the_cuts_is_moved_or_named(tmp_path: Path, where: str) -> None:
    """A target describes its own cuts.

    Other values are named, in the model states of both ranks.
    """

    def change(value: Any) -> None:
        CUTS[where](value[INFO])

    source = planted(tmp_path, TP, MODEL, change)
    change_too = torch.load(source / MODEL.replace("rank_00", "rank_01"), weights_only=False)
    change(change_too)
    torch.save(change_too, source / MODEL.replace("rank_00", "rank_01"))
    assert not any(MARK in one for one in names_of(source, "plain()"))
    for n, target in enumerate(("zero1(dp=1)", "zero1(dp=1, tp=2)", "universal()", "safetensors()")):
        ucpl.convert(source, tmp_path / f"{n}", target)
        found = [one for one in names_of(source, target) if MARK in one]
        held = [file for file in (tmp_path / f"{n}").rglob("*model_states.pt") if MARK.encode() in file.read_bytes()]
        assert len(found) == (0 if held else 1), target
        assert all(f"{where}{MARK} of {INFO}" in one for one in found)


@pytest.mark.parametrize("is_alike", [True, False])
def test_cuts_that_a_shard_repeats_are_compared(tmp_path: Path, is_alike: bool) -> None:
    """A model may give its parameters universal_checkpoint_info: a shard has a copy."""
    info = torch.load(FIXTURES / TP / MODEL, weights_only=False)[INFO]
    shard_file = sorted(file.name for file in (FIXTURES / TP / "global_step3").glob("*optim_states.pt"))[0]
    copy = {**info, "universal_checkpoint_version": info["universal_checkpoint_version"] if is_alike else 7}
    source = planted(tmp_path, TP, f"global_step3/{shard_file}", lambda v: shard(v).update({INFO: copy}))
    found = [one for one in names_of(source, "zero1(dp=1)") if INFO in one]
    assert [one.rpartition("/")[2] for one in found] == ([] if is_alike else ["universal_checkpoint_version"])


@pytest.mark.parametrize(
    ("target", "mine"), [("universal(stage=3, files=4)", 1), ("zero3(dp=4)", 1), ("zero3(dp=2)", 0)]
)
def test_a_rank_of_a_universal_folder_keeps_its_client_state(tmp_path: Path, target: str, mine: int) -> None:
    """DeepSpeed's engine at stage 3 loads a rank's own file.

    It does so from universal folders, too.
    """
    source = planted(tmp_path, UNIVERSAL, UNIVERSAL_1, add)
    ucpl.convert(source, tmp_path / "target", target)
    files = sorted((tmp_path / "target").rglob("*model_states.pt"))
    assert [MARK in torch.load(file, weights_only=False) for file in files] == [
        n == mine == 1 for n in range(len(files))
    ]
    found = ucpl.compare(source, tmp_path / "target")
    assert found, found.differences
    assert any(MARK in str(one) for one in found.unsaid) is (mine == 0)


def test_client_state_of_further_ranks_is_compared(tmp_path: Path) -> None:
    source = planted(tmp_path, UNIVERSAL, UNIVERSAL_1, add)
    for a, b in ((source, FIXTURES / UNIVERSAL), (FIXTURES / UNIVERSAL, source)):
        (found,) = ucpl.compare(a, b).differences
        assert f"client_state of rank 1.{MARK}" in str(found)


@pytest.mark.parametrize(
    ("run", "name", "path", "said"),
    [
        (Z1, SHARD_1, ("optimizer_state_dict", "base_optimizer_state"), "base_optimizer_state/param_groups/2"),
        ("megatron/dist_moe", "common.pt", ("optimizer", 0, "optimizer"), "param_groups/"),
        ("megatron/dist_old", "common.pt", ("optimizer", "optimizer"), "param_groups/2"),
    ],
)
def test_one_group_more_in_one_file_is_named(tmp_path: Path, run: str, name: str, path: Any, said: str) -> None:
    def change(value: Any) -> None:
        for step in path:
            value = value[step]
        more(groups(value))

    found = names_of(planted(tmp_path, run, name, change), "plain()")
    assert any(said in one for one in found), found


@pytest.mark.parametrize(
    ("target", "fate"), [("zero1(dp=2)", "dropped"), ("zero3(dp=2)", "moved"), ("megatron_core(dp=2)", None)]
)
def test_a_group_that_trains_nothing_is_moved_where_it_is_in_the_target(
    tmp_path: Path, target: str, fate: str | None
) -> None:
    source = tmp_path
    for rank in (0, 1):
        name = f"global_step3/zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        (tmp_path / "run").mkdir(exist_ok=True)
        if rank == 0:
            shutil.copytree(FIXTURES / Z3, tmp_path / "run", dirs_exist_ok=True)
        source = tmp_path / "run"
        value = torch.load(source / name, weights_only=False)
        more(groups(shard(value)["optimizer_state_dict"]))
        torch.save(value, source / name)
    try:
        account = ucpl.plan(str(source), target).account
    except ucpl.UcplError as error:
        assert fate is None and error.diagnostics[0].code == "E549"
        return
    assert account is not None
    ucpl.convert(source, tmp_path / "target", target)
    there = open_checkpoint(tmp_path / "target").state.groups
    assert len(there) == sum(e.count for e in account.of("moved") if e.kind == "group")
    assert any(e.names == ("2",) for e in account.of("dropped") if e.kind == "group") is (fate == "dropped")


def test_keys_of_loss_scaling_are_counted_each(tmp_path: Path) -> None:
    """ZeRO-0 keeps numbers; ZeRO shards keep an object made of known ones."""

    def change(value: Any) -> None:
        value["optimizer"][MARK] = 1

    source = planted(tmp_path, "deepspeed/z0_dp2_bf16", MODEL, change)
    assert f"{MARK} of the loss scaling" in names_of(source, "zero1(dp=2)")
    assert not any(MARK in one for one in names_of(source, "zero0(dp=1)"))
    lost = {one for one in names_of(source, "safetensors()") if "of the loss scaling" in one}
    assert {one.split()[0] for one in lost} == {MARK, "cur_iter", "cur_scale", "dynamic_loss_scale"}


def test_loss_scaling_of_megatron_core_is_named(tmp_path: Path) -> None:
    def change(value: Any) -> None:
        value["optimizer"]["grad_scaler"] = {"scale": torch.ones(1), "growth_tracker": 3}

    source = planted(tmp_path, "megatron/dist_old", "common.pt", change)
    assert "common.pt: optimizer/grad_scaler" in names_of(source, "plain()")


def test_each_value_of_a_rank_s_extra_state_is_named(tmp_path: Path) -> None:
    """As verl saves random numbers and schedules, a file a rank."""
    source = Path(shutil.copytree(FIXTURES / "dcp" / "fsdp1_params_w3", tmp_path / "run"))
    for rank in range(3):
        torch.save({"rng": {"cpu": torch.arange(4)}, MARK: 1}, source / f"extra_state_world_size_3_rank_{rank}.pt")
    found = [one for one in names_of(source, "plain()") if "extra_state" in one]
    files = [f"extra_state_world_size_3_rank_{rank}.pt" for rank in range(3)]
    assert sorted(found) == sorted(f"{file}{more}" for file in files for more in ("", ": rng", f": {MARK}"))


@pytest.mark.parametrize("change", ["group", "key"])
def test_groups_of_other_ranks_of_fsdp_are_compared(tmp_path: Path, change: str) -> None:
    def edit(value: Any) -> None:
        held = groups(value)
        if change == "group":
            more(held)
        else:
            held[0][MARK] = 1

    source = planted(tmp_path, "dcp/fsdp1_params_w3", "optim_world_size_3_rank_1.pt", edit)
    (found,) = (one for one in names_of(source, "plain()") if "rank_1.pt" in one)
    assert found.split("param_groups/")[1] == ("1" if change == "group" else f"0/{MARK}")


def test_tied_tensors_are_not_called_wrong() -> None:
    for name in ("fsdp2_w4", "fsdp1_local_w4", "hsdp_2x2"):
        opened = open_checkpoint(FIXTURES / "dcp" / name)
        assert not any("tied" in text for text in opened.remarks)


def test_a_file_that_a_release_may_not_write_is_not_asked_for_again(tmp_path: Path) -> None:
    source = Path(shutil.copytree(FIXTURES / "megatron" / "dist_old", tmp_path / "run"))
    (source / "common.pt").unlink()
    with pytest.raises(ucpl.UcplError) as caught:
        open_checkpoint(source)
    (found,) = caught.value.diagnostics
    assert found.code == "E400" and "copy" not in (found.remedy or "") and "ucpl formats" in (found.remedy or "")


def test_a_key_in_a_chain_leaves_its_groups(tmp_path: Path) -> None:
    source = planted(tmp_path, "megatron/dist_moe", "common.pt", lambda v: add(v["optimizer"]))
    there, known = (open_checkpoint(path).state for path in (source, FIXTURES / "megatron" / "dist_moe"))
    assert there.groups == known.groups and there.scalars == known.scalars and known.groups
