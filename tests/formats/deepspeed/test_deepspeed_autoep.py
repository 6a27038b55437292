"""AutoEP: experts in one tensor, one file each, and a placement."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.files.refusals import refusal
from tests.formats.deepspeed import deepspeed_stand_ins  # noqa: F401  (classes that pickle looks for)
from tests.formats.deepspeed.test_deepspeed_moe import FIXTURES, STEP, edited, loaded
from tests.formats.deepspeed.test_deepspeed_writing import assert_described_by, assert_written_as_by_deepspeed
from tests.gathered import plain_bytes
from ucpl.api import compare, convert, infer, open_checkpoint, plan

FOUR = FIXTURES / "autoep_ep2_dp4_z1"  # two layers of four experts, two of them on each of four ranks
SLICED = FIXTURES / "autoep_ep2_dp4_z3"  # one layer of four experts, data-parallel ranks side by side, small sub-groups
MODEL = "mp_rank_00_model_states.pt"
FUSED = "model.layers.1.mlp.experts.w2"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return shutil.copytree(FOUR, tmp_path / "save")


def assert_is_truth(path: Path) -> None:
    found = torch.load(path / "plain.pt", weights_only=False)
    expected = torch.load(FOUR / "truth_full.pt", weights_only=False)["params"]
    assert found["params"].keys() == expected.keys(), "the router's second name is no parameter"
    for name, states in expected.items():
        for state, value in states.items():
            assert torch.equal(found["params"][name][state], value), (name, state)


def test_plain_is_the_truth(tmp_path: Path) -> None:
    (tmp_path / "plain.pt").write_bytes(plain_bytes(FOUR))
    assert_is_truth(tmp_path)


def test_the_inferred_text_converts_identically(tmp_path: Path) -> None:
    spec = tmp_path / "found.ucpl"
    spec.write_text(infer(FOUR).text())
    assert_described_by(spec, FOUR)


def test_at_its_own_degrees_a_target_is_what_deepspeed_wrote() -> None:
    assert_written_as_by_deepspeed(FOUR)


@pytest.mark.parametrize("call", ["zero1(dp=4, ep=1)", "zero2(dp=4, ep=4)", "zero1(dp=6, ep=2, alignment=4)"])
def test_there_and_back(call: str, tmp_path: Path) -> None:
    convert(FOUR, tmp_path / "there", call)
    assert compare(FOUR, tmp_path / "there")
    convert(tmp_path / "there", tmp_path / "back", "zero1(dp=4, ep=2, alignment=1)")
    convert(tmp_path / "back", tmp_path / "plain", "plain()")
    assert_is_truth(tmp_path / "plain")


def test_a_rank_names_its_own_experts_as_one_tensor(tmp_path: Path) -> None:
    """Each engine of ep 4 has one expert of a layer.

    DeepSpeed's metadata has the first rank's.
    """
    convert(FOUR, tmp_path / "four", "zero1(dp=8, ep=4)")
    meta = loaded(tmp_path / "four", MODEL)
    assert [*meta["param_shapes"][2].items()][-2] == (FUSED, (1, 8, 10))
    assert not any("experts" in name for name in meta["module"]), "weights of experts are in files of their own"
    layer = meta["ds_autoep_layers"][1]
    assert (layer["ep_size"], layer["num_local_experts"], layer["global_expert_end"]) == (4, 1, 1)
    assert (layer["ep_group_name"], layer["expert_data_parallel_world_size"]) == ("ep_size_4", 2)
    assert layer["expert_placement"]["ranks"][3] == {"rank": 3, "experts": [3]}
    assert layer["affine_maps"]["params"][FUSED]["ranks"][3]["pieces"] == [
        {"shape": [1, 8, 10], "source": [240, [80, 10, 1]], "dest": [0, [80, 10, 1]], "locations": [3]}
    ]
    assert meta["universal_checkpoint_info"]["ds_autoep_layers"] == meta["ds_autoep_layers"]
    assert meta["ds_config"]["expert_parallel"]["autoep_size"] == 4
    state = loaded(tmp_path / "four", "zero_pp_rank_7_mp_rank_00_optim_states.pt")["optimizer_state_dict"]
    assert state["partition_count"] == [8, 8, 2] and FUSED in state["param_slice_mappings"][2]


def test_the_placement_is_where_the_degree_is_from() -> None:
    said = {o.name: (o.value, o.origin) for o in plan(str(FOUR), "zero1(dp=8)").origins}
    assert said["experts of a rank"] == ("ep 2", f"as the source's: expert_placement of {MODEL}")


def layers(change: Callable[[Any], None]) -> Callable[[Any], None]:
    def changed(value: Any) -> None:
        for layer in value["ds_autoep_layers"]:
            change(layer)

    return changed


@pytest.mark.parametrize(
    ("change", "code", "said"),
    [
        (layers(lambda v: v["expert_placement"]["ranks"][0].update(experts=[1, 0])), "E457", "the experts [1, 0]"),
        (layers(lambda v: v.update(num_experts=6)), "E456", "6 experts over 2 ranks, and its files make 4 over 2"),
        (layers(lambda v: v.update(ep_size=4)), "E456", "4 experts over 4 ranks"),
        (lambda v: v.update(ds_autoep_folding={"version": 1}), "E457", "with tensor or pipeline parallelism"),
        (lambda v: v["ds_config"]["zero_optimization"].update(round_robin_gradients=True), "E457", "deals them"),
    ],
    ids=["another order", "another number", "another degree", "folded", "dealt"],
)
def test_what_is_not_read_is_named(change: Callable[[Any], None], code: str, said: str, folder: Path) -> None:
    assert said in refusal(lambda: open_checkpoint(edited(folder, MODEL, change)), code).message


# ---- stage 3 ---------------------------------------------------------------------------------------------------------------


def of_rank(rank: int, what: str) -> str:
    return f"zero_pp_rank_{rank}_mp_rank_00_{what}_states.pt"


def assert_sliced_truth(path: Path) -> None:
    found = torch.load(path / "plain.pt", weights_only=False)["params"]
    expected = torch.load(SLICED / "truth_full.pt", weights_only=False)["params"]
    assert found.keys() == expected.keys()
    for name, states in expected.items():
        for state in ("weight", "fp32", "exp_avg", "exp_avg_sq"):
            assert torch.equal(found[name][state], states[state]), (name, state)


def test_stage_3_has_a_slice_of_what_a_rank_holds_of_a_layer(tmp_path: Path) -> None:
    """Two experts are one parameter, cut over ranks with the same.

    A cut can be anywhere in an expert.
    """
    (tmp_path / "plain.pt").write_bytes(plain_bytes(SLICED))
    assert_sliced_truth(tmp_path)


def test_at_stage_3_a_target_is_what_deepspeed_wrote() -> None:
    assert_written_as_by_deepspeed(SLICED)


@pytest.mark.parametrize("call", ["zero3(dp=6, ep=2)", "zero3(dp=4, ep=4, sub_group_size=90)", "zero2(dp=4, ep=1)"])
def test_stage_3_there_and_back(call: str, tmp_path: Path) -> None:
    convert(SLICED, tmp_path / "there", call)
    assert compare(SLICED, tmp_path / "there")
    convert(tmp_path / "there", tmp_path / "back", "zero3(dp=3, ep=1, sub_group_size=1000000000)")
    convert(tmp_path / "back", tmp_path / "plain", "plain()")
    assert_sliced_truth(tmp_path / "plain")


@pytest.mark.parametrize("call", ["zero3(dp=6, ep=2)", "zero3(dp=4, ep=4, sub_group_size=100)", "zero3(dp=3, ep=1)"])
def test_from_stage_1_to_stage_3_and_back(call: str, tmp_path: Path) -> None:
    convert(FOUR, tmp_path / "there", call)
    convert(tmp_path / "there", tmp_path / "back", "zero1(dp=4, ep=2)")
    assert compare(FOUR, tmp_path / "back")
    convert(tmp_path / "back", tmp_path / "plain", "plain()")
    assert_is_truth(tmp_path / "plain")


def test_each_rank_of_stage_3_says_whose_experts_it_has(tmp_path: Path) -> None:
    convert(FOUR, tmp_path / "t", "zero3(dp=8, ep=4)")
    layer = loaded(tmp_path / "t", of_rank(6, "model"))["ds_autoep_layers"][1]
    assert (layer["checkpoint_format"], layer["checkpoint_format_version"]) == ("zero3_partitioned", 1)
    assert (layer["ep_rank"], layer["expert_data_parallel_rank"], layer["global_expert_start"]) == (2, 1, 2)
    group = loaded(tmp_path / "t", of_rank(6, "optim"))["optimizer_state_dict"]["ds_zero_partition_groups"][2]
    assert group == {
        "sub_group": 2,
        "partition_count": 2,
        "partition_rank": 1,
        "partition_ranks": [2, 6],
        "families": ["autoep_expert"],
        "group_names": ["ep_size_4"],
    }


@pytest.mark.parametrize(
    ("file", "change", "code", "said"),
    [
        (of_rank(0, "model"), layers(lambda v: v.update(checkpoint_format_version=2)), "E457", "of another release"),
        (of_rank(0, "model"), layers(lambda v: v.update(num_experts=6)), "E456", "6 experts over 2 ranks"),
        (of_rank(2, "model"), layers(lambda v: v.update(ep_rank=0)), "E456", "of expert-parallel rank 0"),
        (
            of_rank(1, "optim"),
            lambda v: v["optimizer_state_dict"]["ds_zero_partition_groups"][-1].update(partition_count=4),
            "E454",
            "are cut over",
        ),
    ],
    ids=["another form", "another number", "another rank", "other ranks"],
)
def test_stage_3_that_disagrees_is_named(
    file: str, change: Callable[[Any], None], code: str, said: str, tmp_path: Path
) -> None:
    save = shutil.copytree(SLICED, tmp_path / "save")
    assert said in refusal(lambda: open_checkpoint(edited(save, file, change)), code).message


def test_the_inferred_text_of_stage_3_converts_identically(tmp_path: Path) -> None:
    spec = tmp_path / "found.ucpl"
    spec.write_text(infer(SLICED).text())
    assert_described_by(spec, SLICED)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        ("zero0(dp=4)", "AutoEP, which is written at ZeRO stage 1, 2 or 3"),
        ("zero1(dp=4, ep=3)", "does not divide"),
        ("zero1(dp=4, ep=2, round_robin=1)", "round_robin deals AutoEP"),
        ("zero1(dp=4, tp=2)", "tensor parallelism"),
    ],
)
def test_what_is_not_written_is_named(call: str, said: str) -> None:
    assert said in refusal(lambda: plan(str(FOUR), call), "E478").message


@pytest.mark.parametrize(
    ("call", "said"),
    [("zero1(dp=4, tp=2)", "tp = 1"), ("zero1(dp=4, ep=2, round_robin=1)", "round_robin_gradients off")],
)
def test_what_is_not_written_is_refused_with_what_to_do(call: str, said: str) -> None:
    assert said in refusal(lambda: plan(str(FOUR), call), "E478").remedy


def test_universal_folders_of_it_are_named(tmp_path: Path) -> None:
    """DeepSpeed's converter joins experts, and its loader cuts them."""
    assert "AutoEP" in refusal(lambda: convert(FOUR, tmp_path / "t", "universal()"), "E471").message
    assert "AutoEP" in refusal(lambda: convert(SLICED, tmp_path / "t", "universal(stage=3)"), "E471").message
    step = tmp_path / "peer"
    (step / "zero" / FUSED).mkdir(parents=True)
    shutil.copy(FOUR / STEP / MODEL, step / MODEL)
    torch.save({"param": torch.zeros(4, 8, 10)}, step / "zero" / FUSED / "fp32.pt")
    assert "AutoEP" in refusal(lambda: open_checkpoint(step), "E457").message


def test_a_tensor_of_one_expert_is_not_dropped_alone() -> None:
    found = refusal(lambda: plan(str(FOUR), "zero1(dp=4)", drop=[f"{FUSED}.0"]), "E328")
    assert found.remedy == f"experts of a layer are alike: --drop '{FUSED}.*'"


def test_round_robin_deals_nothing_where_each_expert_is_on_one_rank() -> None:
    assert plan(str(FOUR), "zero1(dp=4, ep=4, round_robin=1)")


def test_padding_between_two_experts_of_a_tensor_is_not_written(tmp_path: Path) -> None:
    """Experts of 80 elements: with multiples of 3, DeepSpeed has another begin."""
    spec = tmp_path / "odd.ucpl"
    spec.write_text(infer(FOUR).text().replace("alignment = 1", "alignment = 3"))
    assert "alignment" in spec.read_text()
    refusal(lambda: convert(FOUR, tmp_path / "t", "zero1(dp=4, ep=2, alignment=3)"), "E471")
