"""Experts (deepspeed.moe): files, global and local numbers, and flat buffers."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.files.refusals import refusal
from tests.formats.deepspeed import deepspeed_stand_ins  # noqa: F401  (classes that pickle looks for)
from tests.formats.deepspeed.test_deepspeed_writing import (
    assert_described_by,
    assert_same_flats,
    assert_written_as_by_deepspeed,
)
from tests.gathered import plain_bytes, plain_of
from ucpl.api import compare, convert, infer, open_checkpoint, plan
from ucpl.planning.plan import Plan

FIXTURES = Path(__file__).parents[2] / "fixtures" / "deepspeed"
ONE = FIXTURES / "moe_ep2_dp2_z1"  # one layer of four experts, on two ranks
TWO = FIXTURES / "moe_ep2_dp4_z1"  # layers of four and of eight, on four ranks
AUTO = FIXTURES / "autoep_ep2_dp4_z1"
OLDER = [FIXTURES / "moe_of_0.9.5", FIXTURES / "moe_of_0.17.6"]
BOTH = pytest.mark.parametrize("path", [ONE, TWO], ids=lambda p: p.name)
STEP = "global_step3"
MARK = ".deepspeed_moe.experts.deepspeed_experts."


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return shutil.copytree(TWO, tmp_path / "save")


def loaded(folder: Path, name: str) -> Any:
    return torch.load(folder / STEP / name, weights_only=False)


def edited(folder: Path, name: str, change: Callable[[Any], None]) -> Path:
    value = loaded(folder, name)
    change(value)
    torch.save(value, folder / STEP / name)
    return folder


def assert_is_truth(path: Path, truth: Path) -> None:
    found = torch.load(path / "plain.pt", weights_only=False)
    every = {**found["params"], **{name: {"weight": t} for name, t in found.get("buffers", {}).items()}}
    expected = torch.load(truth / "truth_full.pt", weights_only=False)["params"]
    assert expected.keys() <= every.keys()
    assert sum(MARK in name for name in every) == sum(MARK in name for name in expected)
    for name, states in expected.items():
        for state, value in states.items():
            assert torch.equal(every[name][state], value), (name, state)


@pytest.mark.parametrize("path", [ONE, TWO, *OLDER], ids=lambda p: p.name)
def test_plain_is_the_truth(path: Path, tmp_path: Path) -> None:
    """Truth; in `moe_ep2_dp4_z1` it has only weights, which are the masters.

    These are trained in fp32.
    """
    (tmp_path / "plain.pt").write_bytes(plain_bytes(path))
    assert_is_truth(tmp_path, path)
    for states in plain_of(path)["params"].values():
        if "fp32" in states:
            assert torch.equal(states["weight"], states["fp32"])


@BOTH
def test_the_inferred_text_converts_identically(path: Path, tmp_path: Path) -> None:
    spec = tmp_path / "found.ucpl"
    spec.write_text(infer(path).text())
    assert "mesh expert: pp edp ep tp" in spec.read_text()
    assert_described_by(spec, path)


@BOTH
def test_at_its_own_degrees_a_target_is_what_deepspeed_wrote(path: Path) -> None:
    assert_written_as_by_deepspeed(path)


@BOTH
@pytest.mark.parametrize("call", ["zero1(dp=4, ep=1)", "zero2(dp=4, ep=4)", "zero1(dp=6, ep=2)", "zero2(dp=1, ep=1)"])
def test_there_and_back(path: Path, call: str, tmp_path: Path) -> None:
    convert(path, tmp_path / "there", call)
    assert compare(path, tmp_path / "there")
    dp = open_checkpoint(path).state.settings["dp"].value
    convert(tmp_path / "there", tmp_path / "back", f"zero1(dp={dp}, ep=2)")
    assert compare(path, tmp_path / "back")
    assert_same_flats(tmp_path / "back" / STEP, path / STEP)  # which DeepSpeed wrote


def test_experts_have_groups_and_local_numbers_of_their_own(tmp_path: Path) -> None:
    convert(TWO, tmp_path / "four", "zero1(dp=4, ep=4)")
    meta = loaded(tmp_path / "four", "mp_rank_00_model_states.pt")
    assert meta["num_experts"] == [4, 8]
    numbers = {
        (name.partition(".")[0], int(name.rpartition(MARK)[2].partition(".")[0]))
        for group in meta["param_shapes"]
        for name in group
        if MARK in name
    }
    assert numbers == {("few", 0), ("many", 0), ("many", 1)}
    assert not any(MARK in name for name in meta["module"])
    state = loaded(tmp_path / "four", "zero_pp_rank_3_mp_rank_00_optim_states.pt")["optimizer_state_dict"]
    assert state["partition_count"] == [4, 4, 1, 1]
    groups = state["base_optimizer_state"]["param_groups"]
    assert [group["name"] for group in groups] == ["group 0", "group 1", "ep_size_4", "ep_size_4"]
    assert [group.get("moe", False) for group in groups] == [False, False, True, True]
    truth = torch.load(TWO / "truth_full.pt")["params"]
    name = f"few{MARK}3.up.weight"  # of rank 3, and there 0
    assert torch.equal(state["single_partition_of_fp32_groups"][2][:30].reshape(5, 6), truth[name]["fp32"])
    fragments = state["param_slice_mappings"][2]
    assert next(iter(fragments)) == f"few{MARK}0.up.weight"


def test_ranks_may_hold_experts_data_first(folder: Path, tmp_path: Path) -> None:
    """use_data_before_expert_parallelism: ranks 0 and 1 hold the first experts."""
    edited(
        folder, "mp_rank_00_model_states.pt", lambda v: v["ds_config"].update(use_data_before_expert_parallelism=True)
    )
    shards = [f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(4)]
    values = [loaded(folder, name) for name in shards]
    for name, other in zip(shards, (0, 2, 1, 3), strict=True):
        mine = values[int(name[13])]["optimizer_state_dict"]
        theirs = values[other]["optimizer_state_dict"]
        for g in (2, 3):
            mine = {**mine}
            mine["single_partition_of_fp32_groups"] = [*mine["single_partition_of_fp32_groups"]]
            mine["single_partition_of_fp32_groups"][g] = theirs["single_partition_of_fp32_groups"][g]
            base = {**mine["base_optimizer_state"], "state": {**mine["base_optimizer_state"]["state"]}}
            base["state"][g] = theirs["base_optimizer_state"]["state"][g]
            mine["base_optimizer_state"] = base
        torch.save({**values[int(name[13])], "optimizer_state_dict": mine}, folder / STEP / name)
    convert(folder, tmp_path / "plain", "plain()")
    assert_is_truth(tmp_path / "plain", TWO)
    convert(folder, tmp_path / "there", "zero1(dp=8, ep=4)")
    assert compare(folder, tmp_path / "there")
    one, other = (
        loaded(tmp_path / "there", f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")["optimizer_state_dict"]
        for rank in (0, 1)
    )
    assert one["partition_count"] == [8, 8, 2, 2]
    whole = torch.cat([s["single_partition_of_fp32_groups"][3] for s in (one, other)])
    truth = torch.load(TWO / "truth_full.pt")["params"]
    assert torch.equal(whole[:5], truth[f"few{MARK}0.up.bias"]["fp32"])


@pytest.mark.parametrize(
    ("path", "call"),
    [
        (TWO, "zero1(dp=4, ep=3)"),
        (TWO, "zero1(dp=8, ep=8)"),
        (TWO, "zero1(dp=2, ep=4)"),
        (TWO, "zero1(dp=4, ep=0)"),
        (TWO, "zero3(dp=4)"),
        (TWO, "zero0(dp=4)"),
    ],
)
def test_impossible_degrees(path: Path, call: str) -> None:
    assert refusal(lambda: plan(str(path), call), "E478").remedy


def test_groups_that_deepspeed_would_split(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank's matrices of experts.

    60 elements of each of four, 36 of eight.
    """
    from ucpl.inference import experts

    monkeypatch.setattr(experts, "GROUP_ELEMENTS_MAX", 527)
    refusal(lambda: plan(str(TWO), "zero1(dp=4, ep=1)"), "E478")
    assert plan(str(TWO), "zero1(dp=4, ep=4)")
    assert plan(str(TWO), "zero1(dp=2, ep=2)")
    monkeypatch.setattr(experts, "GROUP_ELEMENTS_MAX", 528)
    assert plan(str(TWO), "zero1(dp=4, ep=1)")
    monkeypatch.setattr(experts, "GROUP_ELEMENTS_MAX", 265)  # the source's own may be the halves of one
    refusal(lambda: plan(str(TWO), "zero1(dp=4, ep=4)"), "E478")


@pytest.mark.parametrize(
    ("path", "call", "frozen"),
    [
        (ONE, "zero1(dp=2, ep=2)", (1, 3)),  # a rank's last one: param_shapes has one of the two
        (ONE, "zero1(dp=4, ep=2)", (0, 2)),
        (ONE, "zero1(dp=2, ep=1)", (3,)),
        (TWO, "zero1(dp=4, ep=2)", (1, 3)),  # of a layer of eight, ranks have 0 to 3 and 4 to 7
        (TWO, "zero1(dp=4, ep=2, elastic=1)", (1, 3)),  # which keeps no names of groups
    ],
)
def test_experts_of_some_numbers_are_frozen(path: Path, call: str, frozen: tuple[int, ...], tmp_path: Path) -> None:
    """DeepSpeed names trained experts by local numbers; its groups have the degree."""
    each = {ONE: "", TWO: "few"}[path]
    names = [f"{each}*{MARK}{number}.*" for number in frozen]
    convert(path, tmp_path / "there", call, freeze=names)
    opened = open_checkpoint(tmp_path / "there")
    assert opened.state.parallel.experts is not None and f"ep={opened.state.parallel.experts.ep}" in call
    convert(tmp_path / "there", tmp_path / "plain", "plain()")
    found = torch.load(tmp_path / "plain" / "plain.pt")["params"]
    truth = torch.load(path / "truth_full.pt", weights_only=False)["params"]
    for name, states in found.items():
        is_frozen = any(name.startswith(each) and f"{MARK}{number}." in name for number in frozen)
        assert ("exp_avg" in states) is not is_frozen, name
        for state in states.keys() & truth[name].keys():
            assert torch.equal(truth[name][state], states[state]), (name, state)


@pytest.mark.parametrize(
    ("path", "call", "frozen", "said"),
    [
        (ONE, "zero1(dp=2, ep=2)", "1", "both are expert 1 of 2 on their ranks"),
        (ONE, "zero1(dp=4, ep=4)", "1", "both are expert 0 of 1 on their ranks"),
        (AUTO, "zero1(dp=4, ep=2)", "w1.1", "both are in one tensor of the module"),
        (AUTO, "zero3(dp=4, ep=4)", "w1.1", "both are in one tensor of the module"),
    ],
)
def test_experts_frozen_on_some_ranks_are_refused_before_writing(path: Path, call: str, frozen: str, said: str) -> None:
    diagnostic = refusal(lambda: plan(str(path), call, freeze=[f"*experts.{frozen}*"]), "E478")
    assert said in diagnostic.message and "is trained" in diagnostic.message and "is frozen" in diagnostic.message


CUT, LLAMA = FIXTURES / "tp2_ep2_dp2_z1", "megatron_deepspeed.ucpl:llama"


@pytest.mark.parametrize(
    ("call", "last"), [("zero1(dp=2, tp=2, ep=1, elastic=1)", 3), (f"{LLAMA}(dp=2, tp=2, ep=2, elastic=1)", 1)]
)
def test_an_elastic_checkpoint_with_tp_needs_the_last_experts(call: str, last: int) -> None:
    """Without a known number of experts per rank, it is rejected."""

    def made(to: str, freeze: list[str]) -> Plan:
        return plan(f"{LLAMA}()", to, checkpoint=CUT, freeze=freeze)

    frozen = [f"*{MARK}{number}.*" for number in range(4) if number % (last + 1) == last]
    found = refusal(lambda: made(call, frozen), "E478")
    assert f"{MARK}{last}." in found.message and "elastic" in found.message and "elastic = 0" in (found.remedy or "")
    assert made(call.replace("elastic=1", "elastic=0"), frozen)
    assert made(call, [f"*{MARK}{number}.*" for number in range(4) if number % (last + 1) == 0])


@pytest.mark.parametrize(
    ("path", "call", "gone", "left"),
    [
        (TWO, "zero1(dp=2, ep=2)", "many.*", [4]),
        (TWO, "zero2(dp=4, ep=1)", "few.*", [8]),
        (AUTO, "zero1(dp=2, ep=2)", "model.layers.0.mlp.*", [4]),
        (AUTO, "zero3(dp=2, ep=2)", "model.layers.1.mlp.*", [4]),
    ],
)
def test_a_layer_of_experts_is_left_out(path: Path, call: str, gone: str, left: list[int], tmp_path: Path) -> None:
    """Remaining layers have DeepSpeed's numbers, and removed ones are in no list."""
    convert(path, tmp_path / "there", call, drop=[gone])
    (here,) = (tmp_path / "there").glob("global_step*")
    layers = {file.name.partition("_expert_")[0] for file in here.glob("layer_*")}
    assert layers == (set() if "zero3" in call else {"layer_0"})
    for file in here.glob("*mp_rank_00_model_states.pt"):
        if not file.name.startswith("layer_"):
            told = torch.load(file, weights_only=False)
            assert told["num_experts"] == left
            assert [layer["moe_layer_id"] for layer in told["ds_autoep_layers"] or ()] in ([0], [])
    before = plain_of(path)["params"]
    after = plain_of(tmp_path / "there")["params"]
    assert after.keys() == {name for name in before if not fnmatch(name, gone)} < before.keys()
    for name, states in after.items():
        for state, value in states.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(before[name][state])), (name, state)


@pytest.mark.parametrize("ep", [1, 2])
def test_all_experts_frozen_is_refused_at_any_degree(ep: int) -> None:
    refusal(lambda: plan(str(ONE), f"zero1(dp=2, ep={ep})", freeze=[f"*{MARK}*"]), "E328")


def test_where_the_degree_comes_from() -> None:
    def said(call: str) -> dict[str, tuple[Any, str]]:
        return {o.name: (o.value, o.origin) for o in plan(str(TWO), call).origins}

    assert said("zero1(dp=4, ep=4)")["experts of a rank"] == ("ep 4", "given")
    assert said("zero1(dp=8)")["experts of a rank"] == ("ep 2", "as the source's")
    assert said("zero1(dp=8)")["edp"][0] == 4


def test_missing_files(folder: Path) -> None:
    (folder / STEP / "layer_1_expert_5_mp_rank_00_model_states.pt").unlink()
    assert "layer_1_expert_5" in refusal(lambda: open_checkpoint(folder), "E452").message


def test_fewer_experts_than_stated(folder: Path) -> None:
    for number in (2, 3):
        (folder / STEP / f"layer_0_expert_{number}_mp_rank_00_model_states.pt").unlink()
    assert "num_experts" in refusal(lambda: open_checkpoint(folder), "E456").message


def test_an_expert_under_another_number(folder: Path) -> None:
    one, other = (f"layer_0_expert_{n}_mp_rank_00_model_states.pt" for n in (1, 2))
    torch.save(loaded(folder, one), folder / STEP / other)
    assert "expert 2" in refusal(lambda: open_checkpoint(folder), "E455").message
    shutil.copy(folder / STEP / one, folder / STEP / other)
    assert "expert_1" in refusal(lambda: open_checkpoint(folder), "E465").message


def test_experts_and_masters_swapped_are_seen(folder: Path, tmp_path: Path) -> None:
    """`verify` compares weights with masters, since files do not state this."""
    from ucpl.api import verify

    assert verify(folder)
    names = [f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in (0, 1)]  # other experts, same shapes
    one, other = (loaded(folder, name) for name in names)
    for g in (2, 3):
        a, b = (v["optimizer_state_dict"]["single_partition_of_fp32_groups"] for v in (one, other))
        a[g], b[g] = b[g], a[g]
    for name, value in zip(names, (one, other), strict=True):
        torch.save(value, folder / STEP / name)
    assert not verify(folder)


# ---- as releases before 0.19.4 write it --------------------------------------------------------------------------------

NOT_YET = (
    "buffer_names", "param_shapes", "frozen_param_shapes", "shared_params", "frozen_param_fragments",
    "checkpoint_parallel_dimensions", "ds_config", "ds_version", "ds_autoep_layers",
)  # fmt: skip


def older(source: Path, folder: Path, change: Callable[[Any], object] = lambda _: None) -> Path:
    """A run's files as of releases before 0.19.4.

    `change` is of the optimizer's shards.
    """
    shutil.copytree(source, folder)
    model = "mp_rank_00_model_states.pt"
    config = loaded(folder, model)["ds_config"]

    def less(held: Any) -> None:
        for key in NOT_YET:
            held.pop(key, None)

    def more(held: Any) -> None:
        held["ds_config"] = config
        change(held["optimizer_state_dict"])

    edited(folder, model, less)
    for rank, path in enumerate(sorted((folder / STEP).glob("zero_pp_rank_*_optim_states.pt"))):
        edited(folder, path.name, more)
        torch.save({"optimizer": None}, folder / STEP / f"expp_rank_{rank}_mp_rank_00_optim_states.pt")
    return folder


@BOTH
def test_older_releases_say_the_same_elsewhere(path: Path, tmp_path: Path) -> None:
    """Every tensor and state; an unnamed buffer is an untrained tensor."""
    old = older(path, tmp_path / "old")
    mine, theirs = plain_of(old), plain_of(path)
    every = {**theirs["params"], **{name: {"weight": t} for name, t in theirs["buffers"].items()}}
    assert mine["params"].keys() == every.keys() and mine["aliases"] == theirs["aliases"]
    for name, states in every.items():
        for state, value in states.items():
            assert torch.equal(torch.as_tensor(mine["params"][name][state]), torch.as_tensor(value)), (name, state)
    assert [g["params"] for g in mine["groups"]] == [g["params"] for g in theirs["groups"]]
    convert(old, tmp_path / "new", "zero1(dp=4, ep=4)" if path == ONE else "zero1(dp=2, ep=1)")
    assert compare(old, tmp_path / "new")
    made = loaded(tmp_path / "new", "mp_rank_00_model_states.pt")
    assert [*made["param_shapes"][0]] == [*loaded(path, "mp_rank_00_model_states.pt")["param_shapes"][0]]


def test_a_target_has_the_empty_optimizers_of_experts_that_its_source_has(tmp_path: Path) -> None:
    """DeepSpeed 0.9.5 opens the file of each expert-parallel rank also with ZeRO."""
    old = older(ONE, tmp_path / "old")
    for source, degree in ((old, 4), (tmp_path / "made-4", 1), (tmp_path / "made-1", 2)):
        target = tmp_path / f"made-{degree}"
        convert(source, target, f"zero1(dp=4, ep={degree})")
        found = sorted(file.name for file in (target / STEP).glob("expp_*"))
        assert found == [f"expp_rank_{ep}_mp_rank_00_optim_states.pt" for ep in range(degree)]
        assert all(loaded(target, name) == {"optimizer": None} for name in found)
        assert compare(old, target)


def test_experts_that_a_release_leaves_out_are_those_that_fill_the_buffer(tmp_path: Path) -> None:
    """Before 0.13 only the first names of a group are stated.

    The rest follow in the order of the module, if that is one way.
    """

    def first_names(source: Path, most: int = 9) -> Callable[[Any], None]:
        shard = loaded(source, "zero_pp_rank_0_mp_rank_00_optim_states.pt")["optimizer_state_dict"]
        groups = shard["param_slice_mappings"]
        known = {name for group in groups for name in [*group][: min(most, len(group) // 2 or 1)] if MARK in name}

        def cut(state: Any) -> None:
            for names in state["param_slice_mappings"]:
                for name in [name for name in names if MARK in name and name not in known]:
                    del names[name]

        return cut

    for n, path in enumerate((ONE, TWO)):
        found = older(path, tmp_path / f"old{n}", first_names(path))
        assert compare(found, older(path, tmp_path / f"all{n}"))
    told = refusal(lambda: open_checkpoint(older(TWO, tmp_path / "none", first_names(TWO, 0))), "E457")
    assert "no choice of the others would fill it" in told.message


def test_what_no_file_says_of_older_experts_is_refused(tmp_path: Path) -> None:
    told = refusal(lambda: open_checkpoint(older(ONE, tmp_path / "a", lambda s: s.pop("param_slice_mappings"))), "E457")
    assert "param_shapes and param_slice_mappings do not name" in told.message
    old = older(ONE, tmp_path / "b")
    torch.save({"optimizer": {"state": {}}}, old / STEP / "expp_rank_1_mp_rank_00_optim_states.pt")
    told = refusal(lambda: open_checkpoint(old), "E457")
    assert "next to the shards of ZeRO" in told.message


def test_a_tied_tensor_that_older_releases_save_twice_is_one() -> None:
    """0.9.5 saves one storage under two names, 0.17.6 a copy.

    Neither saves `shared_params`.
    """
    assert [open_checkpoint(path).state.aliases for path in OLDER] == [{"lm_head.weight": "wte.weight"}] * 2
