"""Law: locate and the oracle agree on every stored position."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings

from tests.laws.agreement import TwoMeanings, agree, both, check
from tests.oracle import homes, mean
from tests.oracle.names import Refused
from ucpl.errors import UcplError
from ucpl.language import nodes, parse
from ucpl.placement import locate
from ucpl.testing import Example, layouts, models

LAYOUTS = Path(__file__).parents[1] / "specs"
GPT = {"h": 5, "vocab": 7, "t": 2, "d": 2, "f": 7}
MEGATRON = {"v": 6, "h": 4, "f": 4, "d": 2, "l": 4}
MOE = {"heads": 4, "groups": 2, "width": 2, "l": 4, "h": 3, "vocab": 5, "e": 4, "f": 2}
CONFIG = {
    "num_hidden_layers": 3, "hidden_size": 4, "vocab_size": 3, "intermediate_size": 2, "num_key_value_heads": 1,
    "num_attention_heads": 2, "head_dim": 2, "n_layer": 2, "n_embd": 4, "n_positions": 3, "n_head": 2, "kv_lora_rank": 2,
    "q_lora_rank": 2, "qk_rope_head_dim": 4, "qk_nope_head_dim": 2, "v_head_dim": 2, "first_k_dense_replace": 1,
    "moe_intermediate_size": 2, "n_routed_experts": 2,
}  # fmt: skip
EXPERTS = {**CONFIG, "num_local_experts": 2, "tie_word_embeddings": True}

WRITTEN: list[tuple[str, str, dict[str, Any]]] = [
    *(("deepspeed.ucpl", call, {"sizes": GPT}) for call in (
        "plain()", "zero1(dp = 1)", "zero1(dp = 4)", "zero2_roundrobin(dp = 3)", "zero1_aligned(dp = 2)", "zero3(dp = 3)",
        "zero3(dp = 2, sub_group_size = 100)", "autotp_zero1(tp = 2, dp = 2)", "autotp_zero1(tp = 1, dp = 3)", "universal()",
        "pipe_zero1(pp = 2, dp = 3)", "pipe_truth(pp = 2, dp = 2)",
    )),
    *(("fsdp.ucpl", call, {"sizes": {"v": 7, "h": 6, "f": 9, "d": 2}}) for call in (
        "whole()", "fsdp2_tp(fsdp = 3, tp = 2)", "fsdp2_tp(fsdp = 5, tp = 1)", "fsdp1_local(fsdp = 3)",
    )),
    *(("megatron.ucpl", call, {"sizes": MEGATRON}) for call in (
        "legacy(tp = 2)", "legacy_pp(tp = 2, pp = 2)", "legacy_pp(tp = 1, pp = 4)", "distopt(tp = 2, dp = 3)",
        "dp_reshardable(tp = 2, dp = 2)", "interleaved(pp = 2, vp = 2)", "canonical()",
    )),
    ("megatron.ucpl", "legacy_moe(tp = 2, ep = 2)", {"sizes": {**MEGATRON, "e": 4}}),
    *(("megatron_moe.ucpl", call, {"sizes": MOE}) for call in (
        "megatron(tp = 2, pp = 2, dp = 2, ep = 2)", "megatron_zero1(tp = 2, pp = 2, dp = 2, ep = 2)",
        "megatron_zero1(tp = 1, pp = 1, dp = 4, ep = 4)", "megatron_interleaved(tp = 2, pp = 2, dp = 1, vp = 2)",
    )),
    ("homes.ucpl", "hf()", {"sizes": MOE}),
    *(("hf.ucpl", call, {"config": CONFIG}) for call in (
        "hf()", "meta()", "phi3()", "gemma_like()", "hf_gpt2()", "hf_deepseek()", "halves()", "staged(pp = 2, stages = [1, 2])",
    )),
    *(("hf.ucpl", call, {"config": EXPERTS}) for call in ("mixtral()", "mixtral_stacked()")),
]  # fmt: skip


@pytest.mark.fault("Against an oracle or the truth", "the same for shipped layouts", "the same")
@pytest.mark.parametrize(("file", "call", "more"), WRITTEN, ids=[f"{f}-{c}" for f, c, _ in WRITTEN])
def test_layouts_of_real_frameworks_mean_what_the_oracle_says(file: str, call: str, more: dict[str, Any]) -> None:
    assert check((LAYOUTS / file).read_text(), call, name=str(LAYOUTS / file), **more)


def test_what_a_checkpoint_states_is_the_order_of_a_flat() -> None:
    text = (LAYOUTS / "deepspeed.ucpl").read_text()
    meaning, layout = both(text, "zero_stated(dp = 2)", sizes=GPT)
    names = ["ln_f.weight", "wte.weight", "blocks.1.attn.qkv.weight", "temp"]
    shapes = [(5,), (7, 5), (10 * 2, 5), (1,)]

    def stated(file: str, key: str, here: dict[str, int]) -> list[list[tuple[str, tuple[int, ...]]]]:
        assert (file, key) == ("meta", "param_shapes")
        return [list(zip(names[:2], shapes[:2], strict=True)), list(zip(names[2:], shapes[2:], strict=True))]

    assert agree(meaning, locate(layout, stated=stated), stated)


ODD_MODEL = """ucpl 1
model odd {
  dtype f32
  a : 3 5
  "b.0" : 7
  frozen.w : 4 2 is frozen
  buf : 3 is buffer
  s : ()
  alias "tied" = a
  state fp32, exp_avg : f32
  state step : i64 scalar
  state late : f32 of second
  group first = a
  group second = "b.0", s
}
"""
SHIPPED = [
    "zero0(dp = 2)", "zero0(dp = 1, bf16 = 1)", "zero1(dp = 3)", "zero1(dp = 2, round_robin = 1)",
    "zero1(dp = 2, alignment = 4)", "zero1(dp = 2, elastic = 1)",
    "zero1(dp = 2, bf16 = 1, bf16_optimizer = 1, alignment = 4)", "zero2(dp = 3)",
    "zero2(dp = 2, bf16 = 1)", "zero3(dp = 2)", "zero3(dp = 3, sub_group_size = 10)", "plain()",
]  # fmt: skip


def odd_model(text: str = ODD_MODEL) -> nodes.Model:
    (model,) = parse(text, "odd.ucpl").statements
    assert isinstance(model, nodes.Model)
    return model


@pytest.mark.parametrize("call", SHIPPED)
def test_shipped_layouts_of_any_model_mean_what_the_oracle_says(call: str) -> None:
    assert check("ucpl 1\n", call, model=odd_model())


@pytest.mark.parametrize("call", ["plain()", "safetensors()", "fsdp2(fsdp = 3)", "zero3(dp = 2)"])
def test_layouts_of_any_model_mean_what_the_oracle_says(call: str) -> None:
    text = ODD_MODEL.replace("s : ()", "s : 1") if "fsdp2" in call else ODD_MODEL  # it cuts the first dim of each
    meaning, layout = both((LAYOUTS / "any.ucpl").read_text(), call, model=odd_model(text))

    def stated(file: str, key: str, here: dict[str, int]) -> list[list[tuple[str, tuple[int, ...]]]]:
        return [[("s", ()), ("a", (3, 5))], [("b.0", (7,))]]

    assert agree(meaning, locate(layout, stated=stated), stated)


def test_a_model_inside_another_means_what_the_oracle_says() -> None:
    file = LAYOUTS / "vlm.ucpl"
    assert check(file.read_text(), "hf_vlm()", name=str(file), config=CONFIG)


@pytest.mark.fault(
    "Against an oracle or the truth",
    "the place of each element, for random layouts",
    "equal to a slow evaluator that was written separately",
)
@given(models().flatmap(layouts))
@settings(max_examples=150)
def test_any_layout_means_what_the_oracle_says(example: Example) -> None:
    meaning, layout = both(example.text, example.call, name=example.name)
    agree(meaning, locate(layout))


@given(models().flatmap(layouts))
@settings(max_examples=25)
def test_the_part_of_one_rank_is_that_part_of_all(example: Example) -> None:
    meaning, layout = both(example.text, example.call, name=example.name)
    for rank in range(layout.ranks):
        agree(meaning, locate(layout, rank=rank), rank=rank)


# ---- refusals -------------------------------------------------------------------------------------------------------


def small(body: str, call: str) -> tuple[str, str]:
    model = "ucpl 1\nmodel m {\n  dim a = 5, b = 2\n  w : a b\n  state s : f32\n}\n"
    return f"{model}layout x(dp) of m {{\n  mesh dp\n{body}\n}}\n", call


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ('  file weights = torch "f"\n  w = a@dp b as "w.{dp}"', "E204"),
        ('  file weights = torch "f"\n  w = a@dp[4, 2] b as "w.{dp}"', "E204"),
        ('  file weights = torch "f"\n  w = a@spread(dp, 2) b as "w.{dp}"', "E204"),
        ('  file weights = torch "f"\n  w = a as "w"', "E205"),
        ('  file weights = torch "f"\n  w = a b b as "w"', "E205"),
        ('  file weights = torch "f"\n  w = a b as "w"\n  state s = flat(each)@dp@dp in weights as "s.{dp}"', "E204"),
        (
            '  file weights = torch "f"\n  w = a b as "w"\n  state s = trim(pad(flat(each), dp)@dp) in weights as "s"',
            "E146",
        ),
        *(
            (
                f"  let p = dp, q = 1\n  mesh other: p q\n{line}",
                "E219",
            )
            for line in (
                '  file weights = torch "f"\n  w = a@chunk(dp) b on other as "w"',
                '  file weights = torch "f{rank}"\n  w = a b on other at dp[0] as "w"',
                '  file weights = torch "f"\n  w = a b on other as "w{dp}"',
                '  file weights = torch "f{rank}"\n  w = a b on other mean @dp as "w"',
                '  file weights = torch "f{rank}"\n  index a = a@spread(dp)\n  w[a] = b on other as "w{a}"',
                '  file weights = torch "f"\n  w = a b as "w"\n  state s = flat(each)@chunk(dp) on other in weights as "s"',
            )
        ),
        (
            '  let p = 2, q = 2\n  mesh one: p q\n  mesh two: q p\n  file weights = torch "f"\n  w = a@chunk(q) b on two',
            "E219",
        ),
        ('  file weights = torch "f"\n  w = a b on other as "w"', "E218"),
        ('  file weights = torch "f"\n  w[a] = b as "w.{a}.{b}"', "E122"),
        ('  file weights = torch "f"\n  w[a] = b as "w.{a}.{b.local + 1}"', "E122"),
        ('  file weights = torch "f"\n  dim hi = 1\n  index a = (hi lo)\n  w = a b as "w.{lo}"', "E122"),
        ('  file weights = torch "f" key "{a}/{key}"\n  w = a b as "w"', "E122"),
        ('  file weights = torch "f.{b}"\n  w[a] = b as "w.{a}"', "E122"),
        ('  file weights = torch "f"\n  w = a b as "w"\n  state s = like in weights as "{a}.s"', "E122"),
    ],
)
def test_what_has_no_meaning_is_refused_by_both(body: str, code: str) -> None:
    text, call = small(body, "x(dp = 4)")
    with pytest.raises(Refused):
        homes(mean(text, call))
    with pytest.raises(UcplError) as caught:
        check(text, call)
    assert caught.value.diagnostics[0].code == code


@pytest.mark.fault("Against an oracle or the truth", "two pieces in one place", "both refuse")
@pytest.mark.parametrize(
    "body",
    [
        '  file weights = torch "f"\n  w = a@chunk(dp) b as "w"',
        '  file weights = torch "f"\n  w[a] = b as "w"',
        '  file weights = torch "f"\n  w = a b as "w"\n  state s = pad(flat(each), dp)@dp in weights as "s"',
        '  file weights = torch "f"\n  w = a b as "w"\n  state s = like in weights as "w"',
    ],
)
def test_two_pieces_in_one_place_are_refused_by_both(body: str) -> None:
    text, call = small(body, "x(dp = 2)")
    meaning, layout = both(text, call)
    with pytest.raises(UcplError) as caught:
        locate(layout)
    assert caught.value.diagnostics[0].code == "E215"
    with pytest.raises(TwoMeanings):
        agree_alone(meaning)


def test_sizes_in_names_are_asked_for() -> None:
    body = '  let n = a + 1\n  file weights = torch "f.{a.size}.{n}"\n  w[b] = a as "{b}.{size(a)}"'
    assert check(*small(body, "x(dp = 2)")) == 2


@pytest.mark.parametrize("key", ["w{p}.{q}", "w{size(dp)}", "w{rank}"])
def test_a_line_on_a_mesh_means_what_it_means_without(key: str) -> None:
    """Its file may name the axes of any mesh.

    A size is no coordinate.
    """
    meshes = '  let p = 2, q = dp / 2\n  mesh other: p q\n  file weights = torch "f{dp}"\n'
    body = f'{meshes}  w = a@chunk(q) b on other as "{key}"'
    text, call = small(body, "x(dp = 4)")
    assert check(text, call) == check(text.replace(" on other", ""), call) == 4


def agree_alone(meaning: Any) -> None:
    """The oracle's own check that each place has one meaning."""
    seen: dict[Any, Any] = {}
    for home in homes(meaning):
        said = (home.state, home.shape, home.cells)
        if seen.setdefault((home.file, home.key), said) != said:
            raise TwoMeanings(home.key)
