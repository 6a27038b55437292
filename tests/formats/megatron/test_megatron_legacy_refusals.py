"""Faults of legacy folders are errors with the file and the contradiction."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ucpl
from tests.files.refusals import refusal
from tests.formats.megatron.megatron_of import FIXTURES, assert_exact
from ucpl.formats.megatron import legacy_optimizer
from ucpl.formats.megatron.legacy_buffers import BufferParameter, buckets_of
from ucpl.formats.opening import open_checkpoint

State = dict[Any, Any]
MODEL, OPTIM = "model_optim_rng.pt", "distrib_optim.pt"


def copied(tmp_path: Path, name: str) -> Path:
    shutil.copytree(FIXTURES / f"legacy_{name}", tmp_path / "run")
    return tmp_path / "run" / "iter_0000010"


def changed(root: Path, file: str, change: Callable[[State], object]) -> None:
    """A file of every rank, with its value changed."""
    for path in root.rglob(file):
        value = torch.load(path, weights_only=False)
        change(value)
        torch.save(value, path)


def says(**words: object) -> Callable[[State], None]:
    return lambda state: state["args"].__dict__.update(words)


def renamed(state: State) -> None:
    for chunk in ("model0", "model1"):
        state[chunk]["my_head.weight"] = torch.randn(4, 4)


def longer(state: State) -> None:
    for chunk in ("model0", "model1"):
        name = "decoder.layers.0.mlp.linear_fc1.weight"
        state[chunk][name] = torch.cat([state[chunk][name], torch.zeros(3, 16, dtype=torch.bfloat16)])


def nested(state: State) -> None:
    state["model0"] = {"language_model": {"embedding": {}}}


def another_group(state: State) -> None:
    groups = state["optimizer"]["optimizer"]["param_groups"]
    groups.append(dict(groups[1]))


@pytest.mark.parametrize(
    ("change", "code", "message"),
    [
        (says(tensor_model_parallel_size=4), "E540", "tensor_model_parallel_size = 4, and the folders are of 2"),
        (lambda state: state.pop("model1"), "E544", "4 layers, and the files of 2 stages hold 2"),
        (lambda state: state.update(args=3), "E541", "expected is an argparse.Namespace"),
        (lambda state: state.update(optimizer={"optimizer": {"param_groups": 7}}), "E541", "expected is a list"),
        (renamed, "E542", "`my_head.weight`, [4, 4] on a rank"),
        (longer, "E543", "has 27 rows on a rank"),
        (lambda state: state.update(optimizer=[]), "E541", "expected is a list of optimizers that has one"),
        (says(padded_vocab_size=128), "E543", "say padded_vocab_size = 128"),
        (says(swiglu=False), "E543", "say swiglu = False"),
        (says(num_layers=6), "E544", "say 6 layers, and the files of 2 stages hold 4"),
        (another_group, "E546", "is in several of the 3 parameter groups"),
        (nested, "E548", "has its model in nested dicts (language_model)"),
        (says(moe_mlp_glu_interleave_size=32), "E548", "interleaved"),
    ],
)
def test_state_dicts_that_contradict_themselves(
    tmp_path: Path, change: Callable[[State], object], code: str, message: str
) -> None:
    root = copied(tmp_path, "vpp")
    changed(root, MODEL, change)
    assert message in refusal(lambda: open_checkpoint(tmp_path / "run"), code).message


def shorter(state: State) -> None:
    states = next(iter(state[0].values()))
    for name in ("param", "exp_avg", "exp_avg_sq"):
        states[name] = states[name][:-1]
    states["numel_unpadded"] -= 1


def of_another_time(state: State) -> None:
    state.pop("buckets_coalesced")


@pytest.mark.parametrize(
    ("change", "code", "message"),
    [
        (shorter, "E545", "no order of them makes that up"),
        (of_another_time, "E548", "before February 2024"),
        (lambda state: next(iter(state[0].values())).update(more=torch.ones(2)), "E541", "expected is one of param"),
        (lambda state: state.update({5: state[0]}), "E541", "expected is buffers of 2 virtual stages"),
    ],
)
def test_buffers_that_contradict_the_model(
    tmp_path: Path, change: Callable[[State], object], code: str, message: str
) -> None:
    root = copied(tmp_path, "vpp")
    changed(root, OPTIM, change)
    assert message in refusal(lambda: open_checkpoint(tmp_path / "run"), code).message


def test_an_incomplete_folder(tmp_path: Path) -> None:
    root = copied(tmp_path, "vpp")
    (root / "mp_rank_01_001" / OPTIM).unlink()
    assert "mp_rank_01_001 has no distrib_optim.pt" in refusal(lambda: open_checkpoint(root), "E540").message
    shutil.rmtree(root / "mp_rank_01_001")
    assert "mp_rank_01_001 is missing" in refusal(lambda: open_checkpoint(root), "E540").message
    (root / "mp_rank_00").mkdir()
    shutil.copy(root / "mp_rank_00_000" / MODEL, root / "mp_rank_00")
    assert "ranks of two meshes" in refusal(lambda: open_checkpoint(root), "E540").message
    (root.parent / "latest_checkpointed_iteration.txt").write_text("20")
    found = refusal(lambda: open_checkpoint(root.parent), "E532")
    assert "says '20'" in found.message and str(root) in found.remedy


def test_numbers_of_an_optimizer_that_are_not_by_the_rule(tmp_path: Path) -> None:
    root = copied(tmp_path, "adam")

    def swapped(state: State) -> None:
        states = state["optimizer"][0]["optimizer"]["state"]
        states[0], states[1] = states[1], states[0]

    changed(root, MODEL, swapped)
    assert "by Megatron's rule" in refusal(lambda: open_checkpoint(root), "E546").message

    def one_less(state: State) -> None:
        state["optimizer"][0]["optimizer"]["param_groups"][0]["params"].pop()

    changed(root, MODEL, one_less)
    assert "are in it by Megatron's rule" in refusal(lambda: open_checkpoint(root), "E546").message


def test_masters_that_are_not_as_many_as_parameters(tmp_path: Path) -> None:
    root = copied(tmp_path, "adam")

    def shorter_list(state: State) -> None:
        state["optimizer"][0]["fp32_from_fp16_params"][0].pop()

    changed(root, MODEL, shorter_list)
    assert "a master of each parameter" in refusal(lambda: open_checkpoint(root), "E541").message


def test_a_buffer_that_is_missing(tmp_path: Path) -> None:
    root = copied(tmp_path, "moe")
    changed(root, OPTIM, lambda state: state[1].pop(0))
    assert "has no buffer of bf16 for virtual stage 0" in refusal(lambda: open_checkpoint(root), "E545").message


def test_a_projection_without_dimensions(tmp_path: Path) -> None:
    def change(state: State) -> None:
        name = next(n for n in state["model"] if n.endswith("linear_fc1.weight"))
        state["model"][name] = state["model"][name].new_tensor(1.0)

    root = copied(tmp_path, "adam")
    changed(root, MODEL, change)
    assert "has no rows on a rank" in refusal(lambda: open_checkpoint(tmp_path / "run"), "E543").message


def test_ranks_whose_gradients_are_of_other_dtypes(tmp_path: Path) -> None:
    root = copied(tmp_path, "moe")
    path = sorted(root.rglob(OPTIM))[-1]
    value = torch.load(path, weights_only=False)
    value[1] = {0: {(torch.bfloat16, torch.bfloat16): next(iter(value[1][0].values()))}, "buckets_coalesced": True}
    torch.save(value, path)
    assert "another's has none" in refusal(lambda: open_checkpoint(root), "E545").message


def test_experts_that_are_cut_over_other_ranks(tmp_path: Path) -> None:
    root = copied(tmp_path, "moe")
    changed(root, MODEL, says(expert_tensor_parallel_size=1))
    assert "experts are cut over 1 ranks" in refusal(lambda: open_checkpoint(root), "E548").message


def test_of_two_bucket_sizes_none_is_guessed() -> None:
    """Both give the saved length: views or arguments decide."""
    sizes = [720, 16, 384, 768, 16]
    ways = buckets_of([BufferParameter(f"p{n}", size) for n, size in enumerate(sizes)], 1952)
    assert len(ways) == 2
    (said,) = buckets_of([BufferParameter(f"p{n}", size) for n, size in enumerate(sizes)], 1952, (700,))
    assert said in ways
    places = [0, 768, 832, 1216, 2048]
    parameters = [
        BufferParameter(f"p{n}", size, place) for n, (size, place) in enumerate(zip(sizes, places, strict=True))
    ]
    assert buckets_of(parameters, 1952) == [said] and [b.start for b in said] == [0, 720, 1936]
    moved = [BufferParameter(p.name, p.numel, 1344 if p.place == 1216 else p.place) for p in parameters]
    assert buckets_of(moved, 1952) == [], "weights that lie otherwise"


def test_weights_that_are_stored_separately(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without views the saved length decides, if only one way fits."""
    root = copied(tmp_path, "buckets")

    def apart(state: State) -> None:
        state["model"] = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in state["model"].items()}

    changed(root, MODEL, apart)
    ucpl.convert(root, tmp_path / "plain", to="plain()")
    assert_exact("buckets", tmp_path / "plain" / "plain.pt")
    monkeypatch.setattr(legacy_optimizer, "buckets_of", lambda *given: 2 * buckets_of(*given))
    assert "2 bucket sizes make that up" in refusal(lambda: open_checkpoint(root), "E545").message


@pytest.mark.parametrize(
    ("ranks", "is_refused"),
    [
        ({"00_000": 0, "00_001": 2, "01_000": 1, "01_001": 3}, False),
        ({"00_000": 0, "00_001": 2, "01_000": 1, "01_001": 1}, True),  # a copy
        ({"00_000": 0, "00_001": 1, "01_000": 2, "01_001": 3}, False),
        ({"00_000": 2, "00_001": 0, "01_000": 1, "01_001": 3}, True),  # two are swapped
        ({"00_000": 0, "00_001": 0, "01_000": 0, "01_001": 0}, False),  # a tool wrote all
    ],
)
def test_a_file_that_another_rank_saved_is_refused(ranks: dict[str, int], is_refused: bool, tmp_path: Path) -> None:
    """Keys and shapes of ranks are equal; the arguments have the rank."""
    root = Path(shutil.copytree(FIXTURES / "iter_0000010", tmp_path / "iter_0000010"))
    for name, rank in ranks.items():
        changed(root / f"mp_rank_{name}", MODEL, says(rank=rank))
    if is_refused:
        assert "one of these is another rank's file" in refusal(lambda: open_checkpoint(root), "E540").message
    else:
        assert open_checkpoint(root).state.tensors
