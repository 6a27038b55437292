"""Combined parallelism: shards with tp and pp coordinates, and experts.

Truth was gathered from the running engines: full tensors under their names in one process.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cli.command import ucpl
from tests.formats.deepspeed import deepspeed_stand_ins  # noqa: F401  (classes that pickle looks for)
from ucpl.api import convert, open_checkpoint, plan
from ucpl.conversion.facts import facts
from ucpl.errors import UcplError

FIXTURES = Path(__file__).parents[2] / "fixtures" / "deepspeed"
LISTS, MUTE = (
    FIXTURES / "tp2_pp2_dp2_z1_bf16",
    FIXTURES / "tp2_pp2_dp1_z1",
)  # lists of patterns say the cuts; nothing does
STAGED, CUT = FIXTURES / "pp2_ep2_dp2_z1", FIXTURES / "tp2_ep2_dp2_z1"  # experts in a pipeline; with cut layers
LLAMA = "megatron_deepspeed.ucpl:llama()"
STEP = "global_step3"


def gathered(path: Path) -> dict[tuple[str, str], torch.Tensor]:
    """(tensor, state) -> value of a folder of layout plain."""
    found = torch.load(path / "plain.pt", weights_only=False)
    out = {(name, state): t for name, mine in found["params"].items() for state, t in mine.items() if state != "step"}
    return out | {(name, "weight"): t for name, t in found["buffers"].items()}


def truth(path: Path) -> dict[tuple[str, str], torch.Tensor]:
    found = torch.load(path / "truth_full.pt", weights_only=False)
    out = {(name, state): t for name, mine in found["params"].items() for state, t in mine.items()}
    return out | {(name, "weight"): t for name, t in found["buffers"].items()}


def assert_is_truth(path: Path, source: Path) -> None:
    found, wanted = gathered(path), truth(source)
    assert found.keys() == wanted.keys()
    for place, tensor in wanted.items():
        assert found[place].dtype == tensor.dtype and torch.equal(found[place], tensor), place


def described(path: Path) -> str | None:
    return LLAMA if path in (MUTE, CUT) else None


def refusal(run: Callable[[], Any], code: str) -> str:
    with pytest.raises(UcplError) as caught:
        run()
    assert caught.value.diagnostics[0].code == code
    return caught.value.diagnostics[0].message


@pytest.mark.parametrize("path", [LISTS, MUTE, STAGED, CUT, FIXTURES / "sp2_dp2_z1"], ids=lambda p: p.name)
def test_full_tensors_are_those_that_the_engines_held(path: Path, tmp_path: Path) -> None:
    convert(path, tmp_path / "out", "plain()", layout=described(path))
    assert_is_truth(tmp_path / "out", path)


@pytest.mark.parametrize("path", [MUTE, CUT], ids=lambda p: p.name)
def test_a_layout_without_a_gate_is_refused_where_there_is_one(path: Path, tmp_path: Path) -> None:
    """Its shapes are right, but rows would be in another order."""
    with pytest.raises(UcplError) as caught:
        convert(path, tmp_path / "plain", "plain()", layout="megatron_deepspeed.ucpl:gpt()")
    found = caught.value.diagnostics[0]
    assert found.code == "E322" and "44 rows, twice the columns" in found.message and "llama()" in found.remedy


@pytest.mark.parametrize("path", [MUTE, CUT], ids=lambda p: p.name)
def test_a_target_without_a_gate_is_refused_where_there_is_one(path: Path) -> None:
    """Its first ranks would hold the gate; one rank is possible."""
    to = "megatron_deepspeed.ucpl:gpt(dp=2, tp={})"
    with pytest.raises(UcplError) as caught:
        plan(LLAMA, to.format(2), checkpoint=path)
    found = caught.value.diagnostics[0]
    assert found.code == "E322" and "44 rows, twice the columns" in found.message and "llama(...)" in found.remedy
    assert plan(LLAMA, to.format(1), checkpoint=path)


def test_a_layout_that_cuts_at_a_degree_that_does_not_divide_is_refused_with_its_line() -> None:
    with pytest.raises(UcplError) as caught:
        plan(str(LISTS), "megatron_deepspeed.ucpl:llama(dp=1, tp=3)")
    found = caught.value.diagnostics[0]
    assert found.code == "E204" and "32 does not divide by tp = 3" in found.message
    assert found.labels[0].line and found.remedy.startswith("choose another tp;")


@pytest.mark.parametrize(
    ("path", "calls"),
    [
        (LISTS, ("zero1(dp=3, tp=1, pp=1)", "zero1(dp=1, tp=3, stages=[3, 2])")),
        (LISTS, ("zero1(dp=1, tp=4, pp=1)", "zero1(dp=2, tp=1, stages=[1, 1, 1, 2])", "zero1(dp=2, tp=2, pp=3)")),
        (LISTS, ("zero3(dp=3)", "zero2(dp=2)")),
        (LISTS, ("zero1(dp=2, tp=2, stages=[1, 4])", "zero1(dp=4, tp=2, pp=1)")),
        (MUTE, ("zero1(dp=2, tp=1)", "megatron_deepspeed.ucpl:llama(dp=2, tp=2, pp=3)")),
        (MUTE, ("zero3(dp=2, tp=1)",)),
        (STAGED, ("zero1(dp=4, pp=1, ep=4)", "zero1(dp=2, pp=1, ep=1)")),
        (STAGED, ("zero1(dp=4, pp=2, ep=4)", "zero1(dp=1, pp=2, ep=1)", "zero1(dp=2, pp=2, ep=2)")),
        (STAGED, ("megatron_deepspeed.ucpl:llama(dp=2, tp=2, pp=2)",)),
        (CUT, ("zero1(dp=4, tp=1, ep=4)", "megatron_deepspeed.ucpl:llama(dp=1, tp=2, ep=2)")),
        (CUT, ("zero1(dp=2, tp=2, ep=4)", "zero1(dp=3, tp=2, ep=1)", "zero2(dp=2, tp=1, ep=2)")),
    ],
    ids=lambda x: x.name if isinstance(x, Path) else " ".join(c.partition(":")[2] or c for c in x),
)
def test_a_walk_over_degrees_ends_in_the_same_tensors(path: Path, calls: tuple[str, ...], tmp_path: Path) -> None:
    here, source = path, described(path)
    for number, call in enumerate(calls):
        convert(here, tmp_path / str(number), call, layout=source)
        says_itself = ("llama" not in call and path == LISTS) or "tp=1" in call or ("tp" not in call and path == STAGED)
        here, source = tmp_path / str(number), None if says_itself else LLAMA
    convert(here, tmp_path / "out", "plain()", layout=source)
    assert_is_truth(tmp_path / "out", path)


def test_files_that_no_rank_reads_are_no_loss_where_every_rank_that_has_an_expert_has_its_file(tmp_path: Path) -> None:
    """DeepSpeed writes an expert once, from its first rank.

    It reads it by each rank's own number.
    """
    convert(CUT, tmp_path / "out", "zero1(dp=2, tp=2, ep=1)", layout=LLAMA)
    files = sorted(p.name for p in (tmp_path / "out" / STEP).glob("layer_0_expert_2_*"))
    assert files == [f"layer_0_expert_2_mp_rank_0{tp}_model_states.pt" for tp in (0, 1)]
    assert not (CUT / STEP / "layer_0_expert_2_mp_rank_00_model_states.pt").exists()


def test_each_stage_counts_its_own_layers_with_experts(tmp_path: Path) -> None:
    convert(STAGED, tmp_path / "out", "zero1(dp=2, pp=1, ep=2)")
    found = torch.load(tmp_path / "out" / STEP / "mp_rank_00_model_states.pt", weights_only=False)
    assert found["num_experts"] == [4, 4]
    assert len(list((tmp_path / "out" / STEP).glob("layer_1_expert_*_mp_rank_00_model_states.pt"))) == 4
    own = [torch.load(STAGED / STEP / f"mp_rank_0{pp}_model_states.pt", weights_only=False) for pp in (0, 1)]
    assert [one["num_experts"] for one in own] == [[4], [4]]


def test_a_stage_holds_its_own_tensors_alone(tmp_path: Path) -> None:
    convert(STAGED, tmp_path / "out", "zero1(dp=1, pp=2, ep=1)")
    for pp in (0, 1):
        name = f"mp_rank_0{pp}_model_states.pt"
        was = torch.load(STAGED / STEP / name, weights_only=False)
        found = torch.load(tmp_path / "out" / STEP / name, weights_only=False)
        assert sorted(found["module"]) == sorted(was["module"]) and found["buffer_names"] == was["buffer_names"]


def test_cuts_are_reported_with_their_origin() -> None:
    def said(call: str) -> dict[str, tuple[Any, str]]:
        return {o.name: (o.value, o.origin) for o in plan(str(LISTS), call).origins}

    assert said("zero1(dp=1, tp=2, pp=1)")["cuts over tp"] == ("11 tensors", "as the source's")
    chunked = said("zero1(dp=1, tp=4, pp=1)")
    assert "as torch.chunk cuts the tensors in universal_checkpoint_info of mp_rank_00" in chunked["cuts over tp"][1]
    assert "1.mlp.dense_h_to_4h.weight [6, 6, 6, 4]" in chunked["unequal parts"][0]


def test_ranks_of_a_sequence_are_ranks_that_share_the_optimizer(tmp_path: Path) -> None:
    """Ulysses: DeepSpeed states the sequence's degree as tp_degree.

    It cuts the optimizer over all dp x sp ranks.
    """
    folder = shutil.copytree(FIXTURES / "z1_dp4", tmp_path / "save")
    (path,) = (folder / STEP).glob("mp_rank_*")
    held = torch.load(path, weights_only=False)
    held["checkpoint_parallel_dimensions"] = {"pp_degree": 1, "tp_degree": 2}
    torch.save(held, path)
    found = open_checkpoint(folder).state.settings
    assert {name: found[name].value for name in ("dp", "tp", "pp")} == {"dp": 4, "tp": 1, "pp": 1}


# ---- refusals --------------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return shutil.copytree(LISTS, tmp_path / "save")


def test_where_nothing_says_how_tensors_are_cut_a_layout_is_asked_for() -> None:
    assert "is [17, 16], [17, 16] on tensor-parallel ranks" in refusal(lambda: plan(str(MUTE), "plain()"), "E464")


def test_the_refusal_is_a_layout_to_start_from_and_one_that_hands_on_some_axes_is_enough(tmp_path: Path) -> None:
    with pytest.raises(UcplError) as caught:
        plan(str(MUTE), "plain()")
    (note,) = caught.value.diagnostics[0].notes
    lines = note.partition("\n")[2].replace(", pp = 1", "").replace(", pp = pp", "")
    assert '"*.self_attention.dense.weight" = ...  as "{name}"  # [16, 8] on a rank' in lines
    for name, cut in (
        ("tied_modules.embed.word_embeddings.weight", "_@tp _"),
        ("*.query_key_value.weight", "_@tp _"),
        ("*.query_key_value.bias", "_@tp"),
        ("*.self_attention.dense.weight", "_ _@tp"),
        ("*.mlp.dense_h_to_4h.weight", "(_[..22]@tp + _[22..]@tp) _"),
        ("*.mlp.dense_4h_to_h.weight", "_ _@tp"),
    ):
        lines = "\n".join(
            line.replace("= ...", f"= {cut}") if name.removeprefix("*") in line else line for line in lines.splitlines()
        )
    (tmp_path / "mine.ucpl").write_text("ucpl 1\n" + lines)
    convert(MUTE, tmp_path / "out", "plain()", layout=f"{tmp_path / 'mine.ucpl'}:mine()")
    assert_is_truth(tmp_path / "out", MUTE)


def test_a_layer_that_one_tensor_parallel_rank_lacks(folder: Path) -> None:
    (folder / STEP / "layer_01-model_01-model_states.pt").unlink()
    assert "layer_01-model_01-model_states.pt is missing" in refusal(lambda: open_checkpoint(folder), "E452")


def test_layers_of_two_topologies(folder: Path) -> None:
    (folder / STEP / "layer_02-model_00-model_states.pt").rename(folder / STEP / "layer_02-model_states.pt")
    assert "two runs" in refusal(lambda: open_checkpoint(folder), "E453")


def test_layers_of_more_ranks_than_there_are(folder: Path) -> None:
    for name in ("layer_00", "layer_01", "layer_02", "layer_03"):
        shutil.copy(
            folder / STEP / f"{name}-model_00-model_states.pt", folder / STEP / f"{name}-model_02-model_states.pt"
        )
    assert "4 model-parallel ranks, and of 3 tensor" in refusal(lambda: open_checkpoint(folder), "E454")


def test_tensor_parallel_ranks_with_other_tensors(folder: Path) -> None:
    path = folder / STEP / "layer_02-model_01-model_states.pt"
    held = torch.load(path, weights_only=False)
    del held["self_attention.dense.bias"]
    torch.save(held, path)
    assert "the same tensors in layer 2" in refusal(lambda: open_checkpoint(folder), "E463")


def test_a_shard_of_a_parameter_that_no_layer_has(tmp_path: Path) -> None:
    folder = shutil.copytree(FIXTURES / "tp2_pp2_dp2_z1_bf16", tmp_path / "save")
    path = max(folder.glob("*/mp_rank_*_model_states.pt"))
    value = torch.load(path, weights_only=False)
    first = value["param_shapes"][0]
    value["param_shapes"][0] = {name.replace("2.mlp.dense_h_to_4h.weight", "another"): first[name] for name in first}
    torch.save(value, path)
    assert "'another', which no layer's file has" in refusal(lambda: open_checkpoint(folder), "E456")


@pytest.mark.parametrize(
    ("path", "call", "code"),
    [
        (LISTS, "zero1(dp=1, tp=40, pp=1)", "E473"),
        (LISTS, "zero2(dp=1, pp=2)", "E477"),
        (LISTS, "zero3(dp=1, stages=[2, 3])", "E477"),
        (LISTS, "zero1(dp=1, tp=1, pp=6)", "E477"),
        (CUT, "zero1(dp=3, tp=2, ep=4)", "E478"),
        (STAGED, "zero1(dp=2, pp=2, ep=3)", "E478"),
        (STAGED, "zero3(dp=2)", "E478"),
    ],
)  # fmt: skip
def test_degrees_that_cannot_be(path: Path, call: str, code: str, tmp_path: Path) -> None:
    assert refusal(lambda: convert(path, tmp_path / "out", call, layout=described(path)), code)


def test_a_degree_that_leaves_a_rank_nothing_names_the_next_one() -> None:
    """16 positions in parts of 4: a fifth rank would have none."""
    with pytest.raises(UcplError, match="E473") as caught:
        plan(str(LISTS), "zero1(dp=1, tp=5, pp=1)")
    remedy = caught.value.diagnostics[0].remedy
    assert remedy.startswith("tp = 4,") and "kv_heads" not in remedy


def test_degrees_of_experts_that_contradict_each_other(tmp_path: Path) -> None:
    folder = shutil.copytree(CUT, tmp_path / "save")
    for path in (folder / STEP).glob("*optim*"):
        held = torch.load(path, weights_only=False)
        held["optimizer_state_dict"]["partition_count"][2] = 4
        torch.save(held, path)
    assert "4 ranks share an expert and 2 hold different ones" in refusal(lambda: open_checkpoint(folder), "E454")


def test_arguments_and_random_states_go_over_with_their_classes(tmp_path: Path) -> None:
    """Megatron's arguments and numpy's random state only hold values.

    They need no permission.
    """
    convert(LISTS, tmp_path / "out", "zero1(dp=2, tp=1, pp=1)")
    (before, after) = (
        torch.load(sorted(path.glob("*/mp_rank_*"))[0], weights_only=False) for path in (LISTS, tmp_path / "out")
    )
    assert after["args"] == before["args"] and after["args"].hidden_size == 16
    assert after["rng_tracker_states"].keys() == before["rng_tracker_states"].keys()
    (name, numbers, *rest), (name_before, numbers_before, *rest_before) = after["np_rng_state"], before["np_rng_state"]
    assert name == name_before == "MT19937" and rest == rest_before
    assert (numbers == numbers_before).all() and len(numbers) == 624


# ---- tensors that say themselves how they are cut ------------------------------------------------------------------------

ROWS = ("word_embeddings", "query_key_value", "dense_h_to_4h")
COLUMNS = ("self_attention.dense.weight", "dense_4h_to_h.weight")


def with_attributes(source: Path, folder: Path, halves: bool = True) -> Path:
    """The same checkpoint with parameters in its state_dict, as in Megatron."""
    copy = shutil.copytree(source, folder / f"kept_{halves}")
    for file in sorted((copy / STEP).glob("*model_states.pt")):
        value = torch.load(file, weights_only=False)
        module = value["module"] if isinstance(value.get("module"), dict) else value
        for name, tensor in list(module.items()):
            if not torch.is_tensor(tensor) or not tensor.is_floating_point() or "inv_freq" in name:
                continue
            made = torch.nn.Parameter(tensor)
            if any(s in name for s in (*ROWS, *COLUMNS)):
                made.tensor_model_parallel = True  # type: ignore[attr-defined]
                made.partition_dim = int(any(s in name for s in COLUMNS))  # type: ignore[attr-defined]
                made.partition_stride = 2 if "dense_h_to_4h" in name and halves else 1  # type: ignore[attr-defined]
            elif "post_norm" in name:
                made.tensor_model_parallel = False  # type: ignore[attr-defined]
            module[name] = made
        torch.save(value, file)
    return copy


@pytest.mark.parametrize("source", [MUTE, CUT], ids=lambda path: path.name)
def test_tensors_say_themselves_how_they_are_cut(source: Path, tmp_path: Path) -> None:
    copy = with_attributes(source, tmp_path)
    convert(copy, tmp_path / "plain.pt", to="plain()")
    assert_is_truth(tmp_path, source)
    told = {o.name: (o.value, o.origin) for o in plan(str(copy), "zero1(dp=1, tp=4)").origins}
    assert "as torch.chunk cuts the tensors in tensor_model_parallel of tensors of" in told["cuts over tp"][1]
    other = with_attributes(source, tmp_path, halves=False)
    (tmp_path / "other").mkdir()
    convert(other, tmp_path / "other" / "plain.pt", to="plain()")
    with pytest.raises(AssertionError, match="dense_h_to_4h"):
        assert_is_truth(tmp_path / "other", source)


def test_inspect_says_what_says_the_cuts(tmp_path: Path) -> None:
    def cuts(path: Path) -> dict[str, int]:
        return facts(open_checkpoint(path))["cuts"]

    kept = cuts(with_attributes(MUTE, tmp_path))
    assert {origin.partition(" of ")[0]: n for origin, n in kept.items()} == {
        "partition_dim = 0": 5, "partition_dim = 1": 4, "partition_dim = 0 and partition_stride = 2": 2,
    }  # fmt: skip
    assert cuts(MUTE) == {}
    said = cuts(LISTS)
    assert any("parameter_with_row_parallelism_patterns of universal_checkpoint_info" in origin for origin in said)
    assert [origin.partition(" of ")[0] for origin in cuts(FIXTURES / "tp2_dp2_z1_uneven")] == ["affine_map"]


def test_infer_writes_what_is_to_be_completed(tmp_path: Path) -> None:
    """A user completes the open lines, and the checkpoint converts."""
    file = tmp_path / "mine.ucpl"
    done = ucpl("infer", MUTE, "-o", file)
    assert done.status == 3 and "E464" in done.err and "layout mine, to be completed" in done.out
    text = file.read_text()
    assert text.count(": open") == 11 and "on a rank: open" in text
    halves = "(_[..size(_) / 2]@tp + _[size(_) / 2..]@tp) ..."
    for part, axes in {
        **dict.fromkeys(ROWS[:2], "_@tp ..."),
        **dict.fromkeys(COLUMNS, "_ _@tp"),
        ROWS[2]: halves,
    }.items():
        lines = [line for line in text.splitlines() if part in line]
        assert lines, part
        for line in lines:
            text = text.replace(line, line.replace("= ...", f"= {axes}"))
    file.write_text(text)
    convert(MUTE, tmp_path / "plain.pt", to="plain()", layout=f"{file}:mine(dp=1, tp=2, pp=2)")
    assert_is_truth(tmp_path, MUTE)
