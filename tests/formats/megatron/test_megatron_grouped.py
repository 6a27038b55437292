"""GroupedMLP's experts (`weight1`, `weight2`): read one by one, or rejected."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ucpl
from tests.formats.megatron.megatron_of import FIXTURES, assert_exact
from tests.formats.megatron.test_megatron_legacy_refusals import MODEL, changed, copied
from ucpl.errors import UcplError
from ucpl.formats.megatron.reading import are_turned

GROUPED = FIXTURES / "legacy_grouped"  # tp 2, ep 2: two experts a rank, half of each
EXPERT = "decoder.layers.0.mlp.experts.local_experts.{}.linear_fc{}.weight"


def test_an_expert_is_the_transpose_of_its_part_of_the_matrix(tmp_path: Path) -> None:
    """By Megatron's own view, experts x hidden x width."""
    ucpl.convert(GROUPED, tmp_path / "plain", to="plain()")
    params = torch.load(tmp_path / "plain" / "plain.pt", weights_only=True)["params"]
    for tp in range(2):
        for ep in range(2):
            file = GROUPED / "iter_0000010" / f"mp_rank_{tp:02}_{ep:03}" / "model_optim_rng.pt"
            model = torch.load(file, weights_only=False)["model"]
            first = model["decoder.layers.0.mlp.experts.weight1"].view(2, 8, 6)
            second = model["decoder.layers.0.mlp.experts.weight2"].view(2, 3, 8)
            for n in range(2):
                fc1, fc2 = (params[EXPERT.format(2 * ep + n, m)]["weight"] for m in (1, 2))
                gate, up = (half[3 * tp : 3 * tp + 3] for half in fc1.chunk(2))
                assert torch.equal(torch.cat([gate, up]), first[n].T)
                assert torch.equal(fc2[:, 3 * tp : 3 * tp + 3], second[n].T)


@pytest.mark.parametrize(
    "to", ["megatron_core(tp=2)", "megatron_fsdp(dp=2)", "zero1(dp=3)", "megatron_core(stacked=0)"]
)
def test_other_forms_take_it_with_its_optimizer(tmp_path: Path, to: str) -> None:
    ucpl.convert(GROUPED, tmp_path / "made", to=to)
    ucpl.convert(tmp_path / "made", tmp_path / "back", to="megatron_legacy(tp=1)")
    ucpl.convert(tmp_path / "back", tmp_path / "plain", to="plain()")
    assert_exact("grouped", tmp_path / "plain" / "plain.pt")


def test_a_target_states_that_its_experts_are_separate(tmp_path: Path) -> None:
    ucpl.convert(GROUPED, tmp_path / "made", to="megatron_legacy(tp=1, ep=4)")
    (file, *_) = sorted((tmp_path / "made").glob("iter_*/mp_rank_00_000/model_optim_rng.pt"))
    assert torch.load(file, weights_only=False)["args"].moe_grouped_gemm is False
    assert torch.load(GROUPED / "iter_0000010/mp_rank_00_000/model_optim_rng.pt", weights_only=False)[
        "args"
    ].moe_grouped_gemm


def test_buckets_of_such_a_run_are_not_written(tmp_path: Path) -> None:
    """A job with GroupedMLP would load them, each expert transposed."""
    with pytest.raises(UcplError, match="GroupedMLP") as refused:
        ucpl.convert(GROUPED, tmp_path / "made", to='megatron_core(tp=2, ep=2, optimizer="dp_reshardable")')
    assert refused.value.diagnostics[0].code == "E547"


def test_buckets_of_such_a_run_are_not_read(tmp_path: Path) -> None:
    """Of one expert a rank, the sizes of pieces would agree."""
    source = FIXTURES / "dist_moe_buckets"
    for file in source.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    common = torch.load(tmp_path / "common.pt", weights_only=False)
    said = {**vars(common["args"]), "moe_grouped_gemm": True, "transformer_impl": "local"}
    torch.save({**common, "args": Namespace(**said)}, tmp_path / "common.pt")
    with pytest.raises(UcplError, match="those of GroupedMLP") as refused:
        ucpl.convert(tmp_path, tmp_path / "made.pt", to="plain()")
    assert refused.value.diagnostics[0].code == "E533"


def test_states_that_are_transposed_lie_as_their_weights(tmp_path: Path) -> None:
    """0.13 and before saved runs of GroupedMLP's matrices.

    Weights are in the form of linear layers.
    """
    ucpl.convert(FIXTURES / "dist_old_grouped", tmp_path / "made", to="megatron_legacy(tp=1)")
    ucpl.convert(tmp_path / "made", tmp_path / "plain", to="plain()")
    assert_exact("grouped", tmp_path / "plain" / "plain.pt")


@pytest.mark.parametrize(
    ("wholes", "says", "turned"),
    [
        (((2, 8, 12), (2, 6, 8)), {}, True),  # of weights [2, 12, 8] and [2, 8, 6]
        (((2, 12, 8), (2, 8, 6)), {}, False),
        (((2, 8, 8),), {}, False),  # a square one: the run's arguments say it
        (((2, 8, 8),), {"moe_grouped_gemm": True, "transformer_impl": "local"}, True),
        (((2, 8, 8), (2, 6, 8)), {}, True),  # or another one
    ],
)
def test_a_square_is_transposed_where_others_are(
    wholes: tuple[tuple[int, ...], ...], says: dict[object, object], turned: bool
) -> None:
    weights = [(2, 12, 8) if 12 in whole else (2, 8, 6) if 6 in whole else (2, 8, 8) for whole in wholes]
    assert are_turned(list(zip(wholes, weights, strict=True)), says) is turned


def without(name: str) -> Callable[[dict[str, Any]], None]:
    def change(state: dict[str, Any]) -> None:
        del state["model"][name]

    return change


def narrowed(state: dict[str, Any]) -> None:
    matrix = state["model"]["decoder.layers.0.mlp.experts.weight1"]
    state["model"]["decoder.layers.0.mlp.experts.weight1"] = matrix[:, :11].clone()


def doubled(state: dict[str, Any]) -> None:
    state["model"][EXPERT.format(0, 1)] = torch.zeros(6, 8, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("change", "code", "said"),
    [
        (without("decoder.layers.0.mlp.router.weight"), "E548", "says how many"),
        (narrowed, "E543", r"\[8, 11\], which is not of 4 experts on 2 ranks"),
        (doubled, "E543", "both of that expert"),
    ],
)
def test_what_is_not_as_megatron_has_it_is_refused(
    tmp_path: Path, change: Callable[[dict[str, Any]], None], code: str, said: str
) -> None:
    folder = copied(tmp_path, "grouped")
    changed(folder, MODEL, change)
    with pytest.raises(UcplError, match=said) as refused:
        ucpl.convert(folder, tmp_path / "plain", to="plain()")
    assert refused.value.diagnostics[0].code == code
