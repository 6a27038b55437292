"""Pipelines: files of layers, shards of stages, and tied modules."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.files.refusals import refusal
from tests.formats.deepspeed import deepspeed_stand_ins  # noqa: F401  (classes that pickle looks for)
from tests.formats.deepspeed.test_deepspeed_writing import (
    assert_described_by,
    assert_written_as_by_deepspeed,
)
from tests.gathered import plain_bytes
from ucpl.api import compare, convert, infer, open_checkpoint, plan
from ucpl.errors import UcplError
from ucpl.extents.pipeline import balanced, uniform

FIXTURES = Path(__file__).parents[2] / "fixtures" / "deepspeed"
TIED = FIXTURES / "pp2_dp2_z1"  # embedding, two blocks | norm, head
FUNCTIONS = FIXTURES / "pp2_dp2_z1_functions"  # embedding, block, function, block | block, norm, head
BOTH = pytest.mark.parametrize("path", [TIED, FUNCTIONS], ids=lambda p: p.name)
LOOSE = {TIED: "tied_modules.embed.position_embeddings.weight", FUNCTIONS: "tied_modules.embed.position.weight"}
WORD = "tied_modules.embed.word.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return shutil.copytree(FUNCTIONS, tmp_path / "save")


def edited(folder: Path, stage: int, change: Callable[[list[dict[str, Any]]], None]) -> Path:
    """The optimizer's shards of a stage, changed with torch."""
    files = sorted((folder / "global_step3").glob(f"zero_pp_rank_*_mp_rank_{stage:02}_optim_states.pt"))
    values = [torch.load(file, weights_only=False) for file in files]
    change([value["optimizer_state_dict"] for value in values])
    for file, value in zip(files, values, strict=True):
        torch.save(value, file)
    return folder


def gathered(path: Path) -> Any:
    return torch.load(path / "plain.pt", weights_only=False)


def assert_is_truth(path: Path, truth: Path) -> None:
    found = gathered(path)
    every = {**found["params"], **{name: {"weight": t} for name, t in found.get("buffers", {}).items()}}
    expected = torch.load(truth / "truth_full.pt", weights_only=False)["params"]
    assert every.keys() == expected.keys()
    for name, states in expected.items():
        for state, value in states.items():
            if state != "step":
                assert torch.equal(every[name][state], value), (name, state)


@BOTH
def test_plain_is_the_truth(path: Path, tmp_path: Path) -> None:
    (tmp_path / "plain.pt").write_bytes(plain_bytes(path))
    assert_is_truth(tmp_path, path)


@BOTH
def test_the_inferred_text_converts_identically(path: Path, tmp_path: Path) -> None:
    spec = tmp_path / "found.ucpl"
    spec.write_text(infer(path).text())
    loose = [line for line in spec.read_text().splitlines() if "any @pp" in line]
    assert len(loose) == 1  # the copy that does not count says so
    assert_described_by(spec, path)


@BOTH
def test_at_its_own_degrees_a_target_is_what_deepspeed_wrote(path: Path) -> None:
    assert_written_as_by_deepspeed(path)


@BOTH
@pytest.mark.parametrize("call", ["zero1(pp=1, dp=3)", "zero1(pp=3, dp=1)", "zero1(stages=[2, 2, REST], dp=2)"])
def test_there_and_back(path: Path, call: str, tmp_path: Path) -> None:
    count = len(open_checkpoint(path).state.parallel.pipeline.layers)  # type: ignore[union-attr]
    convert(path, tmp_path / "there", call.replace("REST", str(count - 4)))
    assert compare(path, tmp_path / "there")
    convert(tmp_path / "there", tmp_path / "back", 'zero1(pp=2, dp=2, partition="uniform")')
    assert compare(path, tmp_path / "back")
    convert(tmp_path / "back", tmp_path / "plain", "plain()")
    assert_is_truth(tmp_path / "plain", path)
    for layer in sorted(p.name for p in (path / "global_step3").glob("layer_*")):
        a, b = (torch.load(p / "global_step3" / layer) for p in (path, tmp_path / "back"))
        assert list(a) == list(b)
        assert all(torch.equal(a[k], b[k]) for k in a)


def test_both_ends_hold_what_is_tied(tmp_path: Path) -> None:
    convert(FUNCTIONS, tmp_path / "three", "zero1(pp=3, dp=1)")
    step = tmp_path / "three" / "global_step3"
    shapes = [torch.load(step / f"mp_rank_{s:02}_model_states.pt", weights_only=False) for s in range(3)]
    assert [WORD in meta["param_shapes"][0] for meta in shapes] == [True, False, True]
    assert [meta["module"] for meta in shapes] == [None, None, None]
    assert [meta["mp_world_size"] for meta in shapes] == [3, 3, 3]
    assert [meta["checkpoint_parallel_dimensions"] for meta in shapes] == [{"pp_degree": 3, "tp_degree": 1}] * 3
    assert [meta["buffer_names"] for meta in shapes] == [["1.seen"], ["3.seen", "4.seen"], []]
    first, last = (
        torch.load(step / f"zero_pp_rank_0_mp_rank_{s:02}_optim_states.pt", weights_only=False) for s in (0, 2)
    )
    size = shapes[0]["param_shapes"][0][WORD].numel()
    for value in (first, last):
        flat = value["optimizer_state_dict"]["single_partition_of_fp32_groups"][0][:size]
        assert torch.equal(flat.reshape(11, 6), torch.load(FUNCTIONS / "truth_full.pt")["params"][WORD]["fp32"])


@BOTH
def test_the_copy_that_gets_a_gradient_counts(path: Path) -> None:
    found = plan(str(path), "plain()").origins + plan(str(path), "zero1(pp=1, dp=1)").origins
    said = [o for o in found if o.name == f"copy of {LOOSE[path]}"]
    assert [(o.value, "no gradient" in o.origin) for o in said] == [("stage 0", True)]
    setting = open_checkpoint(path).state.settings[f"copy of {LOOSE[path]}"]
    assert (setting.value, "moments" in setting.origin) == ("stage 0", True)


def test_a_copy_on_the_last_stage_counts_where_only_that_one_moves(folder: Path, tmp_path: Path) -> None:
    def halt(shards: list[dict[str, Any]]) -> None:
        for shard in shards:
            for state in shard["base_optimizer_state"]["state"].values():
                state["exp_avg"].zero_()
                state["exp_avg_sq"].zero_()

    edited(folder, 0, halt)
    found = open_checkpoint(folder).state.parallel.pipeline
    assert found is not None and found.trusted == {WORD: 1, LOOSE[FUNCTIONS]: 0}
    convert(folder, tmp_path / "plain", "plain()")
    moments = gathered(tmp_path / "plain")["params"]
    truth = torch.load(FUNCTIONS / "truth_full.pt")["params"]
    assert torch.equal(moments[WORD]["exp_avg"], truth[WORD]["exp_avg"])
    assert not moments["1.up.weight"]["exp_avg"].any()


def test_copies_of_a_tied_weight_that_differ_are_named(folder: Path, tmp_path: Path) -> None:
    def drift(shards: list[dict[str, Any]]) -> None:
        shards[0]["single_partition_of_fp32_groups"][0].data[3] += 1.0

    edited(folder, 1, drift)
    with pytest.raises(UcplError) as caught:
        convert(folder, tmp_path / "plain", "plain()")
    text = str(caught.value) + "".join(str(label) for d in caught.value.diagnostics for label in d.labels)
    assert WORD in text
    assert not (tmp_path / "plain").exists()


@BOTH
def test_a_copy_that_does_not_count_is_no_damage(path: Path, tmp_path: Path) -> None:
    """Both ways round, and one that counts still is."""
    from ucpl.api import verify

    convert(path, tmp_path / "one", "zero1(pp=1, dp=1)")
    assert verify(path)
    assert compare(path, tmp_path / "one")
    assert compare(tmp_path / "one", path)
    damaged = shutil.copytree(path, tmp_path / "damaged")

    def drift(shards: list[dict[str, Any]]) -> None:
        shards[0]["single_partition_of_fp32_groups"][0].data[3] += 1.0

    edited(damaged, 1, drift)
    assert not verify(damaged)
    assert not compare(tmp_path / "one", damaged)


def test_layers_follow_from_what_stages_hold() -> None:
    found = open_checkpoint(FUNCTIONS).state.parallel.pipeline
    assert found is not None
    assert [(x.file is not None, x.tied) for x in found.layers] == [
        (True, "embed"),
        (True, None),
        (False, None),
        (True, None),
        (True, None),
        (True, None),
        (False, "embed"),
    ]
    assert (found.bounds, found.methods) == ((0, 4, 7), ("uniform", "parameters"))
    assert found.elements == (108, 181, 0, 72, 233, 12, 108)


def test_stages_of_a_target() -> None:
    def sizes(call: str) -> Any:
        return next(o for o in plan(str(TIED), call).origins if o.name == "layers of stages")

    assert (sizes("zero1(pp=3)").value, sizes("zero1(pp=2)").value) == ([2, 2, 1], [3, 2])
    assert "uniform, which the source's stages [3, 2] follow" in sizes("zero1(pp=3)").origin
    assert sizes('zero1(pp=2, partition="parameters")').value == [2, 3]
    assert sizes("zero1(stages=[1, 4])").value == [1, 4]
    assert sizes("zero1(pp=3, layers=7)").value == [3, 2, 2]


@pytest.mark.parametrize(
    ("call", "code"),
    [
        ("zero1(stages=[3, 3])", "E477"),
        ("zero1(stages=[5, 0])", "E477"),
        ("zero1(pp=3, stages=[3, 2])", "E477"),
        ("zero1(pp=6)", "E477"),
        ("zero1(pp=2, layers=4)", "E477"),
        ('zero1(pp=2, partition="type:block")', "E477"),
        ("zero2(pp=2)", "E477"),
        ("zero3(pp=2)", "E477"),
    ],
)
def test_impossible_stages(call: str, code: str) -> None:
    assert refusal(lambda: plan(str(TIED), call), code).remedy


@pytest.mark.parametrize("stage", [2, 3])
def test_a_stage_without_pipelines_is_refused_with_a_remedy(stage: int) -> None:
    assert f"zero{stage}(...) without pp" in refusal(lambda: plan(str(TIED), f"zero{stage}(pp=2)"), "E477").remedy
    plan(str(TIED), f"zero{stage}(dp=2)")


def test_a_stage_without_parameters_of_a_group(tmp_path: Path) -> None:
    found = refusal(lambda: convert(FUNCTIONS, tmp_path / "there", "zero1(stages=[1, 1, 5], dp=1)"), "E471")
    assert "stage 0 of the pipeline" in found.message


def test_one_stage_does_not_say_how_layers_are_dealt(tmp_path: Path) -> None:
    convert(TIED, tmp_path / "one", "zero1(pp=1, dp=1)")
    found = refusal(lambda: plan(str(tmp_path / "one"), "zero1(pp=2)"), "E476")
    assert "'uniform'" in found.message and "'parameters'" in found.message
    plan(str(tmp_path / "one"), 'zero1(pp=2, partition="parameters")')


def test_a_source_that_is_no_pipeline(tmp_path: Path) -> None:
    refusal(lambda: plan(str(FIXTURES / "z1_dp4"), "zero1(pp=2, dp=2)"), "E475")


def test_missing_files(folder: Path) -> None:
    step = folder / "global_step3"
    (step / "layer_03-model_states.pt").unlink()
    assert "layer 3" in refusal(lambda: open_checkpoint(folder), "E452").message
    shutil.copy(FUNCTIONS / "global_step3" / "layer_03-model_states.pt", step)
    (step / "zero_pp_rank_1_mp_rank_01_optim_states.pt").unlink()
    refusal(lambda: open_checkpoint(folder), "E452")


def test_stages_of_different_steps(folder: Path) -> None:
    def speed(shards: list[dict[str, Any]]) -> None:
        for shard in shards:
            shard["base_optimizer_state"]["param_groups"][0]["lr"] = 0.5

    edited(folder, 1, speed)
    assert "hyper-parameters" in refusal(lambda: open_checkpoint(folder), "E456").message


def test_bounds() -> None:
    assert uniform(5, 2) == (0, 3, 5)
    assert uniform(7, 3) == (0, 3, 5, 7)
    assert uniform(2, 3) == (0, 1, 2, 2)
    assert balanced([1824, 4360, 4360, 48, 1824], 2) == (0, 2, 5)
    assert balanced([1, 1, 1, 1], 2) == (0, 2, 4)
