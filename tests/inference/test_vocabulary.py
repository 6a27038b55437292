"""A vocabulary padded to other rows at another degree.

Common rows are copied, and all others are reported.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import ucpl
from tests.formats.deepspeed import deepspeed_stand_ins  # noqa: F401  (classes that pickle looks for)
from ucpl.errors import UcplError

SOURCE = Path(__file__).parents[1] / "fixtures" / "deepspeed" / "tp2_pp2_dp2_z1_bf16"
MUTE, STEP = SOURCE.with_name("tp2_pp2_dp1_z1"), "global_step3"
NAME = "tied_modules.embed.word_embeddings.weight"
WORDS, ROWS = 34, 36
LLAMA = "megatron_deepspeed.ucpl:llama()"


def plain(folder: Path, out: Path) -> dict[str, Any]:
    """All states of the vocabulary."""
    ucpl.convert(folder, out, to="plain()")
    states: dict[str, Any] = torch.load(out / "plain.pt", weights_only=True)["params"][NAME]
    return {state: value for state, value in states.items() if state != "step"}


@pytest.fixture(scope="module")
def truth(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return plain(SOURCE, tmp_path_factory.mktemp("truth") / "plain")


@pytest.mark.parametrize(
    ("call", "rows"),
    [
        ("zero1(tp=4, pp=1, dp=1, padded_vocab=40)", 40),
        ("zero1(tp=4, make_vocab_size_divisible_by=3)", 36),
        ("zero1(tp=1, pp=2, make_vocab_size_divisible_by=5)", 35),
        ("zero1(tp=1, pp=1, dp=3, padded_vocab=34)", 34),
        ("zero1(tp=2, padded_vocab=44)", 44),
        ("zero3(tp=2, dp=2, padded_vocab=38)", 38),
        ("zero2(tp=1, dp=2, padded_vocab=36)", 36),
    ],
)
def test_what_both_sides_have_goes_over_and_more_is_zeros(
    call: str, rows: int, truth: dict[str, Any], tmp_path: Path
) -> None:
    ucpl.convert(SOURCE, tmp_path / "out", to=call)
    found = plain(tmp_path / "out", tmp_path / "plain")
    for state, value in truth.items():
        kept = min(rows, ROWS)
        assert found[state].shape[0] == rows and torch.equal(found[state][:kept], value[:kept]), state
        assert not found[state][kept:].any(), state


def test_each_rank_has_its_rows_and_says_so(tmp_path: Path) -> None:
    ucpl.convert(SOURCE, tmp_path / "out", to="zero1(tp=4, pp=1, dp=1, padded_vocab=40)")
    layer = torch.load(tmp_path / "out" / STEP / "layer_00-model_03-model_states.pt", weights_only=False)
    assert layer["word_embeddings.weight"].shape == (10, 16)
    model = torch.load(tmp_path / "out" / STEP / "mp_rank_03_model_states.pt", weights_only=False)
    assert model["param_shapes"][0][NAME] == (10, 16)


def test_there_and_back_at_rows_that_both_have_is_the_same_checkpoint(tmp_path: Path) -> None:
    ucpl.convert(SOURCE, tmp_path / "wide", to="zero1(tp=4, pp=1, dp=1, padded_vocab=40)")
    ucpl.convert(tmp_path / "wide", tmp_path / "back", to="zero1(tp=2, pp=1, dp=2, padded_vocab=36)")
    assert ucpl.compare(SOURCE, tmp_path / "back").differences == ()


def test_a_universal_folder_has_words_alone_and_takes_any_rows_again(truth: dict[str, Any], tmp_path: Path) -> None:
    made = ucpl.convert(SOURCE, tmp_path / "atoms", to="universal()")
    assert f"live rows in {NAME}: 2 of 2 are not kept, the target has no live rows" in made.plan.dropped
    ucpl.convert(SOURCE, tmp_path / "all", to="universal(padded_vocab=36)")  # for engines with as many
    for state, value in plain(tmp_path / "all", tmp_path / "whole").items():
        assert torch.equal(value, truth[state]), state
    ucpl.convert(tmp_path / "atoms", tmp_path / "cut", to="zero1(tp=2, dp=1, padded_vocab=38)")
    found = plain(tmp_path / "cut", tmp_path / "plain")
    for state, value in truth.items():
        assert torch.equal(found[state][:WORDS], value[:WORDS]) and found[state].shape[0] == 38
        assert not found[state][WORDS:].any(), state


def test_a_layout_may_say_the_cuts_of_such_a_source(truth: dict[str, Any], tmp_path: Path) -> None:
    ucpl.convert(SOURCE, tmp_path / "out", to="zero1(tp=1, pp=1, padded_vocab=35)", layout=LLAMA)
    ucpl.convert(SOURCE, tmp_path / "cut", to="megatron_deepspeed.ucpl:llama(tp=2, padded_vocab=38)")
    assert plain(tmp_path / "cut", tmp_path / "again")["fp32"].shape == (38, 16)
    assert torch.equal(plain(tmp_path / "out", tmp_path / "plain")["exp_avg"], truth["exp_avg"][:35])


def test_a_source_that_is_no_pipeline_and_is_described(truth: dict[str, Any], tmp_path: Path) -> None:
    ucpl.convert(SOURCE, tmp_path / "atoms", to="universal()")
    ucpl.convert(tmp_path / "atoms", tmp_path / "cut", to="zero1(tp=2, dp=1, padded_vocab=38)")
    ucpl.convert(tmp_path / "cut", tmp_path / "out", to="universal()", layout=LLAMA)
    assert torch.equal(plain(tmp_path / "out", tmp_path / "plain")["fp32"], truth["fp32"][:WORDS])
    for rows in (40, 36):  # more than the source has, and fewer
        call = f"zero1(tp=2, dp=2, padded_vocab={rows})"
        ucpl.convert(tmp_path / "cut", tmp_path / f"described {rows}", to=call, layout=LLAMA)
        ucpl.convert(tmp_path / "cut", tmp_path / f"inferred {rows}", to=call)
        assert ucpl.compare(tmp_path / f"described {rows}", tmp_path / f"inferred {rows}")


def test_requested_rows_are_reported_with_their_reason() -> None:
    origins = ucpl.plan(str(SOURCE), "zero1(tp=4, make_vocab_size_divisible_by=5)").origins
    told = next(one for one in origins if one.name == "rows of the vocabulary")
    assert (told.value, told.origin) == ("40, 34 of them are words", "make_vocab_size_divisible_by = 5, times tp")


@pytest.mark.parametrize(
    ("source", "call", "said"),
    [
        (SOURCE, "zero1(tp=1, padded_vocab=33)", "34 words do not fit into 33 rows"),
        (SOURCE, "zero1(tp=1, make_vocab_size_divisible_by=0)", "34 words do not fit into 0 rows"),
        (MUTE, "zero1(tp=1, padded_vocab=40)", "the source does not name the tensors with a row for each word"),
    ],
)
def test_rows_that_cannot_be(source: Path, call: str, said: str) -> None:
    with pytest.raises(UcplError) as caught:
        ucpl.plan(LLAMA if source == MUTE else str(source), call, checkpoint=source)
    assert caught.value.diagnostics[0].code == "E479" and said in caught.value.diagnostics[0].message
