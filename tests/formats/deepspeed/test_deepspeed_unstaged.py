"""Pipelines without ZeRO: stages, ties and numbers are found, given, or rejected."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import ucpl
from tests.formats.deepspeed import deepspeed_stand_ins  # noqa: F401  (classes that pickle looks for)
from ucpl import api
from ucpl.errors import UcplError
from ucpl.formats.deepspeed import unstaged

FIXTURES = Path(__file__).parents[2] / "fixtures" / "numbered"
FOUND, KEY = (
    "tied_modules.0.",
    "tied_modules.embed.",
)  # a tied module's tensors, as they are called where nothing names it
LOOSE = KEY + "position.weight"
NAMES = f'zero0(order="{FIXTURES / "pp2" / "names.json"}")'


def truth_of(name: str) -> dict[str, Any]:
    held: dict[str, Any] = torch.load(FIXTURES / name / "truth.pt", weights_only=False)["params"]
    return held


def demand_truth(checkpoint: Path, name: str, folder: Path, layout: str | None = None, found: str = KEY) -> None:
    """Compare every tensor and state with the engines', bit for bit.

    `found`: prefix of the tied module's tensors.
    """
    ucpl.convert(checkpoint, folder / "plain.pt", "plain()", layout=layout, force=True)
    plain = torch.load(folder / "plain.pt", weights_only=True)
    mine = {key.replace(found, KEY): value for key, value in plain["params"].items()}
    compared = 0
    for path, states in truth_of(name).items():
        if "buffer" in states:
            assert torch.equal(plain["buffers"][path], states["buffer"]), path
            continue
        ours = mine.pop(path)
        for state in ("weight", "fp32", "exp_avg", "exp_avg_sq"):
            if state in states and not (state == "fp32" and state not in ours):
                assert torch.equal(ours[state], states[state]), f"{path} {state}"
                compared += 1
    assert not mine and compared > 20


@pytest.mark.parametrize("name", ["pp2", "pp2_fp16"])
def test_stages_and_ties_are_found(name: str, tmp_path: Path) -> None:
    opened = api.open_checkpoint(FIXTURES / name)
    assert opened.state.parallel.pipeline is not None and opened.state.parallel.pipeline.sizes == [4, 3]
    assert opened.state.parallel.pipeline.trusted == {LOOSE.replace(KEY, FOUND): 0}
    assert [t.name for t in opened.state.tensors if t.kind == "frozen"] == ["3.up.bias"]
    demand_truth(FIXTURES / name, name, tmp_path, found=FOUND)


def test_names_by_stage_are_followed(tmp_path: Path) -> None:
    opened = api.open_checkpoint(FIXTURES / "pp2", NAMES)
    assert opened.state.parallel.pipeline is not None and opened.state.parallel.pipeline.sizes == [4, 3]
    demand_truth(FIXTURES / "pp2", "pp2", tmp_path, NAMES)


def test_shards_that_deepspeed_cannot_load_are_read(tmp_path: Path) -> None:
    """BF16_Optimizer without ZeRO: `param_slice_mappings` replace param_shapes."""
    opened = api.open_checkpoint(FIXTURES / "pp2_bf16")
    assert opened.state.settings["bf16_optimizer"].value == 1
    demand_truth(FIXTURES / "pp2_bf16", "pp2_bf16", tmp_path)


def test_flat_masters_are_read_and_written(tmp_path: Path) -> None:
    demand_truth(FIXTURES / "fused_bf16", "fused_bf16", tmp_path)
    ucpl.convert(FIXTURES / "fused_bf16", tmp_path / "zero3", "zero3(dp=3)")
    ucpl.convert(tmp_path / "zero3", tmp_path / "again", "zero0(dp=1, fused=1)")
    demand_truth(tmp_path / "again", "fused_bf16", tmp_path)
    theirs, mine = (
        torch.load(next(f.glob("*/mp_rank*")), weights_only=False)["optimizer"]
        for f in (FIXTURES / "fused_bf16", tmp_path / "again")
    )
    assert mine.keys() - theirs.keys() <= {"dynamic_loss_scale", "cur_scale", "cur_iter"}
    for a, b in zip(mine["fp32_groups_flat"], theirs["fp32_groups_flat"], strict=True):
        assert torch.equal(a, b) and a.requires_grad


@pytest.mark.parametrize("call", ["zero1(pp=2, dp=2)", "zero1(pp=1, dp=3)", "zero0(pp=2, dp=1)", "zero0(pp=1, dp=1)"])
@pytest.mark.parametrize("name", ["pp2", "pp2_fp16"])
def test_any_stages_and_back(name: str, call: str, tmp_path: Path) -> None:
    ucpl.convert(FIXTURES / name, tmp_path / "one", call)
    ucpl.convert(tmp_path / "one", tmp_path / "two", "zero0(stages=[3, 1, 3], dp=1)")
    opened = api.open_checkpoint(tmp_path / "two")
    assert opened.state.parallel.pipeline is not None and opened.state.parallel.pipeline.sizes == [3, 1, 3]
    demand_truth(tmp_path / "two", name, tmp_path, found=FOUND)
    files = {p.name for p in (tmp_path / "two" / "global_step3").iterdir()}
    assert files == {f"layer_{n:02}-model_states.pt" for n in (0, 1, 3, 4, 5)} | {
        f"mp_rank_{s:02}_model_states.pt" for s in range(3)
    }
    unnamed(tmp_path / "two")  # as DeepSpeed would have written it
    again = api.open_checkpoint(tmp_path / "two")
    assert again.state.parallel.pipeline is not None and again.state.parallel.pipeline.sizes == [3, 1, 3]
    demand_truth(tmp_path / "two", name, tmp_path, found=FOUND)


def unnamed(folder: Path) -> None:
    for file in folder.glob("*/mp_rank*"):
        held = torch.load(file, weights_only=False)
        torch.save({**held, "param_shapes": None}, file)


def test_each_stage_numbers_its_own(tmp_path: Path) -> None:
    """A target with the source's stages has DeepSpeed's numbers."""
    ucpl.convert(FIXTURES / "pp2", tmp_path / "new", "zero0(pp=2, dp=1)", layout=NAMES)
    for stage in range(2):
        theirs, mine = (
            torch.load(f / "global_step3" / f"mp_rank_{stage:02}_model_states.pt", weights_only=False)
            for f in (FIXTURES / "pp2", tmp_path / "new")
        )
        kept, made = theirs["optimizer"], mine["optimizer"]
        assert [g["params"] for g in made["param_groups"]] == [g["params"] for g in kept["param_groups"]]
        assert made["state"].keys() == kept["state"].keys()
        for number, states in kept["state"].items():
            loose = stage == 1 and number == 1  # the copy that no gradient reaches is the first stage's
            assert loose or all(torch.equal(made["state"][number][s], states[s]) for s in states)


def refused(code: str, *arguments: Any, **how: Any) -> str:
    with pytest.raises(UcplError) as caught:
        ucpl.convert(*arguments, **how)
    assert caught.value.diagnostics[0].code == code, caught.value.diagnostics[0].message
    return caught.value.diagnostics[0].message


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    said = refused("E471", FIXTURES / "pp2_bf16", tmp_path / "x", "zero0(pp=2, dp=1)")
    assert "has no code that loads one" in said
    said = refused("E471", FIXTURES / "pp2", tmp_path / "x", "zero0(stages=[1, 6], dp=1)")
    assert "stage 0 of the pipeline holds no parameter of group 1" in said
    broken = shutil.copytree(FIXTURES / "pp2", tmp_path / "broken")
    (broken / "global_step3" / "layer_05-model_states.pt").unlink()
    assert "there is no way to deal its layers" in refused("E461", broken, tmp_path / "x", "zero1(dp=1)")
    one = tmp_path / "names.json"
    one.write_text(json.dumps(json.loads((FIXTURES / "pp2" / "names.json").read_text())[:1]))
    assert "says nothing of stage 1" in refused(
        "E466", FIXTURES / "pp2", tmp_path / "x", "zero1(dp=1)", layout=f'zero0(order="{one}")'
    )


def test_a_search_that_finds_no_way_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Frozen layers leave each stage many counts.

    Each dead end is visited once.
    """
    stages, layers = 12, 40
    asked: list[tuple[int, int]] = []

    def of_stage(_: object, stage: int, mine: list[int], tied: int | None, whole: bool) -> list[list[str]] | None:
        asked.append((stage, len(mine)))
        return None if stage == stages - 1 else [[str(n) for n in mine]]

    monkeypatch.setattr(unstaged._Finder, "_of_stage", of_stage)
    topology: Any = SimpleNamespace(pp=stages)
    finder = unstaged._Finder(topology, dict.fromkeys(range(layers)), None, ())  # type: ignore[arg-type]
    assert list(finder.ways(None, whole=False)) == []
    assert len(asked) <= stages * (layers + 1) ** 2
