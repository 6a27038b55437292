"""Universal folders with parallelism: stages by names, and shapes for AutoTP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.files.refusals import refusal
from tests.formats.deepspeed import deepspeed_stand_ins  # noqa: F401  (classes that pickle looks for)
from tests.formats.deepspeed.universal_of import universal_of
from ucpl.api import compare, convert, open_checkpoint, plan
from ucpl.registry import format_named

FIXTURES = Path(__file__).parents[2] / "fixtures" / "deepspeed"
FUNCTIONS = FIXTURES / "pp2_dp2_z1_functions"  # embed, block, function, two blocks, norm, embed again
PLAIN = FIXTURES / "pp2_dp2_z1"  # embed, two blocks, norm, embed again
TENSORS = FIXTURES / "tp2_dp2_z1_uneven"
SLICED = "zero_pp_rank_{}_mp_rank_0{}_model_states.pt"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return universal_of(FUNCTIONS, tmp_path / "whole")


def loaded(file: Path) -> Any:
    return torch.load(file, weights_only=False)


def origins(source: Path, call: str) -> dict[str, tuple[Any, str]]:
    return {o.name: (o.value, o.origin) for o in plan(str(source), call).origins}


@pytest.mark.parametrize(
    "call", ["zero1(stages=[4, 3], tied=[0, 6], dp=2)", 'zero1(pp=3, dp=1, partition="parameters", tied=[0, 6])']
)
def test_a_universal_folder_goes_to_stages_and_is_the_same(call: str, folder: Path, tmp_path: Path) -> None:
    convert(folder, tmp_path / "there", call)
    assert compare(FUNCTIONS, tmp_path / "there")
    step = tmp_path / "there" / "global_step3_universal"
    for theirs in sorted((FUNCTIONS / "global_step3").glob("layer_*")):
        mine = loaded(step / theirs.name)
        assert {name: t.tolist() for name, t in mine.items()} == {n: t.tolist() for n, t in loaded(theirs).items()}
    assert sorted(p.name for p in step.glob("layer_*"))[-1] == "layer_06-model_states.pt", (
        "a function's file is passed over"
    )
    assert not (step / "layer_02-model_states.pt").exists()


def test_a_tied_module_is_the_two_layers_that_are_left(tmp_path: Path) -> None:
    convert(PLAIN, tmp_path / "whole", "universal()")
    said = origins(tmp_path / "whole", "zero1(stages=[2, 3], dp=1)")
    key = next(name for name in said if name.startswith("layers of tied module"))
    assert said[key] == ([0, 4], "the layers that no other tensor is named after")
    assert said["layers of stages"][0] == [2, 3]


@pytest.mark.parametrize(
    ("call", "code", "said"),
    [
        ("zero1(pp=2)", "E475", "the layers of the tied modules embed"),
        ("zero1(stages=[4, 3])", "E475", "the layers of the tied modules embed"),
        ("zero1(stages=[4, 3], tied=[0, 1])", "E475", "two layers or more each"),
        ("zero1(stages=[4, 3], tied=[0])", "E475", "two layers or more each"),
        ("zero1(stages=[4, 3], tied=[[0, 6], [2, 7]])", "E475", "two layers or more each"),
        ("zero1(stages=[4, 2], tied=[0, 6])", "E477", "there are 7"),
        ("zero1(pp=2, layers=5, tied=[0, 6])", "E477", "7 at least"),
        ("zero3(pp=2, tied=[0, 6])", "E477", "PipelineModule"),
        ("zero1(pp=4, dp=1, tied=[0, 6])", "E476", "'parameters'"),
    ],
)
def test_stages_that_names_do_not_give(call: str, code: str, said: str, folder: Path) -> None:
    found = refusal(lambda: plan(str(folder), call), code)
    assert said in found.message and found.remedy


def test_names_of_no_layer_are_named() -> None:
    found = refusal(lambda: plan(str(FIXTURES / "z1_dp4"), "zero1(pp=2, dp=2)"), "E475")
    assert "is of no layer by its name" in found.message


def test_parameters_in_another_order_are_no_pipeline_s(folder: Path) -> None:
    """Stages' flat buffers have the module's order, unlike some universal folders."""
    file = folder / "global_step3_universal" / "mp_rank_00_model_states.pt"
    value = loaded(file)
    value["param_shapes"] = [dict(reversed(group.items())) for group in value["param_shapes"]]
    torch.save(value, file)
    refusal(lambda: plan(str(folder), "zero1(stages=[4, 3], tied=[0, 6])"), "E475")


def test_frozen_parameters_of_a_stage_1_source_are_not_called_left_out(folder: Path) -> None:
    assert not open_checkpoint(folder).missing_tensors


# ---- stage 3, tensor parallel ------------------------------------------------------------------------------------------


def test_tensors_of_autotp_keep_their_shape_at_stage_3(tmp_path: Path) -> None:
    """DeepSpeed's loader cuts tensors in dicts for a tensor-parallel rank.

    It takes a bare tensor for the rank's own.
    """
    convert(TENSORS, tmp_path / "there", "universal(stage=3)")
    atom = loaded(tmp_path / "there" / "global_step3_universal" / "zero" / "blocks.0.mlp.down.weight" / "exp_avg.pt")
    assert atom["param"].shape == (24, 37)
    assert compare(TENSORS, tmp_path / "there")
    said = origins(TENSORS, "universal(stage=3)")["shaped"]
    assert said[0] == 1 and "AutoTP" in said[1]
    assert origins(FIXTURES / "z1_dp4", "universal(stage=3)")["shaped"][0] == 0


def test_models_that_cut_themselves_are_loaded_by_one_rank() -> None:
    """Two tensor-parallel ranks fail in DeepSpeed's loader at stage 3.

    It uses no list of patterns there.
    """
    grid = FIXTURES / "tp2_pp2_dp2_z1_bf16"
    for path, call, is_said in (
        (grid, "universal(stage=3)", True),
        (grid, "universal(stage=1)", False),
        (TENSORS, "universal(stage=3)", False),
        (FIXTURES / "z1_dp4", "universal(stage=3)", False),
    ):
        target = plan(str(path), call).target
        said = format_named(target.framework).advice(open_checkpoint(path), target)
        assert any("one tensor-parallel rank" in text for text in said) == is_said, (path.name, call)


@pytest.mark.parametrize(
    ("name", "call", "expected"),
    [
        ("z2_dp3_frozen", "universal(stage=1)", ["neither frozen parameters nor buffers: calls and "]),
        ("z1_dp2_sgdm", "universal(stage=3)", ["the states are momentum_buffer: it stops", "nor buffers: calls stay"]),
        ("z1_dp2_sgdm", "universal(stage=1)", ["nor buffers: calls stay"]),
        ("z1_dp2_sgdm", "zero3(dp=2)", []),
    ],
)
def test_values_that_the_loader_does_not_restore_are_named(name: str, call: str, expected: list[str]) -> None:
    """DeepSpeed 0.19.8 keeps its frozen parameters and buffers.

    At stage 3 it stops without the states of Adam.
    """
    target = plan(str(FIXTURES / name), call).target
    told = format_named(target.framework).advice(open_checkpoint(FIXTURES / name), target)
    found = [text for text in told if "universal folders" in text and "first, and here groups" not in text]
    assert len(found) == len(expected)
    assert all(one in text for one, text in zip(expected, found, strict=True))


def several(tmp_path: Path) -> Path:
    """DeepSpeed's converter leaves model states of two tensor-parallel ranks."""
    convert(TENSORS, tmp_path / "there", "universal(stage=3)")
    step: Path = tmp_path / "there" / "global_step3_universal"
    torch.save(loaded(step / SLICED.format(0, 0)), step / SLICED.format(0, 1))
    return step


def test_folders_of_several_ranks_at_stage_3_are_read(tmp_path: Path) -> None:
    step = several(tmp_path)
    assert compare(TENSORS, step)
    convert(step, tmp_path / "back", "zero3(dp=3)")
    assert compare(TENSORS, tmp_path / "back")


def test_what_such_folders_do_not_say_is_named(tmp_path: Path) -> None:
    step = several(tmp_path)
    atom = step / "zero" / "blocks.0.ln1.weight" / "exp_avg.pt"
    torch.save(loaded(atom)["param"].flatten(), atom)
    refusal(lambda: open_checkpoint(step), "E456")
    for atom in (step / "zero").glob("*/*.pt"):
        held = loaded(atom)
        if isinstance(held, dict) and "param" in held:
            torch.save(held["param"].flatten(), atom)
    assert "without a shape" in refusal(lambda: open_checkpoint(step), "E457").message
