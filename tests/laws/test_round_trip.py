"""Laws of plans.

There and back is the identity, a detour changes nothing, passes keep the result.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from tests.laws.test_locate import GPT, LAYOUTS, MEGATRON, MOE
from ucpl.errors import UcplError
from ucpl.graph import PASSES, build, drawn, optimise
from ucpl.graph.passes import each_joined, each_straight
from ucpl.language import nodes, parse, parse_call
from ucpl.layout import Layout, load, resolve
from ucpl.placement import Placement, locate
from ucpl.planning import order
from ucpl.testing import Example, assert_round_trip, lay_out, layout_pairs, layouts, models, numbered, run
from ucpl.texts import text_at
from ucpl.verification.proof.coverage import prove

Pair = tuple[Example, Example]


@given(models().flatmap(layout_pairs))
@settings(max_examples=60)
def test_there_and_back_through_another_layout_is_the_identity(pair: Pair) -> None:
    assert_round_trip(*pair)


@given(models().flatmap(lambda m: st.tuples(layouts(m), layouts(m), layouts(m))))
@settings(max_examples=25)
def test_a_detour_changes_nothing(three: tuple[Example, Example, Example]) -> None:
    a, b, c = (locate(e.layout()) for e in three)
    start = lay_out(a, numbered(a, {}))
    try:
        graphs = build(a, c), build(a, b), build(b, c)
    except UcplError as error:  # copies under a mean or sum that are cut differently: refused, a named limit
        assert error.diagnostics[0].code == "E304" and any(
            f" {w} @" in e.text for e in three for w in ("mean", "sum", "max")
        )
        reject()
    straight = run(order(graphs[0]), start)
    around = run(order(graphs[2]), run(order(graphs[1]), start))
    assert set(straight) == set(around)
    for place, array in straight.items():
        lost = (array < 0) & np.isnan(around[place])  # live rows, for which the layout between has no room
        np.testing.assert_array_equal(array[~lost], around[place][~lost], err_msg=str(place))


@given(models().flatmap(layout_pairs))
@settings(max_examples=20)
def test_each_pass_keeps_what_the_graph_does(pair: Pair) -> None:
    a, b = (locate(e.layout()) for e in pair)
    start = lay_out(a, numbered(a, {}))
    want = run(order(build(a, b)), start)
    tidy = (each_straight, each_joined)
    for left_out in ((), tidy[:1], tidy[1:], tidy):
        graph = optimise(drawn(a, b), [step for step in PASSES if step not in left_out])
        prove(graph)
        got = run(order(graph), start)
        assert set(got) == set(want)
        for place, array in want.items():
            np.testing.assert_array_equal(array, got[place], err_msg=f"without {left_out}, {place}")


# ---- shipped layouts, through three other degrees and stages ---------------------------------------------------------

ANY = """ucpl 1
model made {
  dtype f32
  wte : 7 5
  "blocks.0.w" : 11
  scale : ()
  frozen.w : 4 2 is frozen
  mask : 3 is buffer
  alias "head" = wte
  state fp32, exp_avg, exp_avg_sq : f32
  group decay = wte
  group rest = "blocks.0.w", scale
}
"""


def shipped(call: str) -> Placement:
    (model,) = parse(ANY, "any.ucpl").statements
    assert isinstance(model, nodes.Model)
    return locate(resolve(load(), parse_call(call), model=model))


STAGES = ["zero0(dp = 2, bf16 = 1)", "zero1(dp = {})", "zero2(dp = {})", "zero3(dp = {})"]
WALKS = [
    [STAGES[a].format(4), STAGES[b].format(3), STAGES[c].format(1), STAGES[d].format(2)]
    for a, b, c, d in [(0, 1, 2, 3), (1, 0, 3, 2), (2, 3, 1, 0), (3, 2, 0, 1), (1, 1, 1, 1), (2, 1, 2, 1)]
]
VARIANTS = [
    ("zero1(dp = 4, round_robin = 1)", "zero1(dp = 3, round_robin = 1)"),
    ("zero1(dp = 2, alignment = 4)", "zero2(dp = 3)"),
    ("zero1(dp = 3, elastic = 1)", "zero1(dp = 2, bf16 = 1, bf16_optimizer = 1)"),
    ("zero3(dp = 2, sub_group_size = 9)", "zero3(dp = 3, sub_group_size = 20)"),
    ("zero3(dp = 4, sub_group_size = 9)", "zero1(dp = 4)"),
]


@pytest.mark.parametrize("walk", WALKS, ids=" -> ".join)
def test_through_three_other_degrees_and_stages_is_the_identity(walk: list[str]) -> None:
    placements = [shipped(call) for call in walk]
    for a, b in zip(placements, [*placements[1:], placements[0]], strict=True):
        assert_round_trip(a, b)


@pytest.mark.parametrize("pair", VARIANTS, ids=" -> ".join)
def test_variants_of_stages_come_back(pair: tuple[str, str]) -> None:
    assert_round_trip(shipped(pair[0]), shipped(pair[1]))


# ---- layouts of other frameworks -------------------------------------------------------------------------------------


def written(file: str, call: str, sizes: dict[str, int]) -> Layout:
    text = (LAYOUTS / file).read_text()
    return resolve(load((str(LAYOUTS / file), text), read=text_at), parse_call(call), define_sizes=dict(sizes))


FRAMEWORKS = [
    ("deepspeed.ucpl", "zero1(dp = 4)", "autotp_zero1(tp = 2, dp = 2)", GPT, ()),
    ("deepspeed.ucpl", "zero1_aligned(dp = 3)", "zero2_roundrobin(dp = 2)", GPT, ()),
    ("deepspeed.ucpl", "zero3(dp = 3)", "zero3(dp = 2, sub_group_size = 100)", GPT, ()),
    ("deepspeed.ucpl", "autotp_zero1(tp = 2, dp = 3)", "zero3(dp = 2)", GPT, ("weight",)),
    ("deepspeed.ucpl", "universal()", "plain()", GPT, ()),
    ("deepspeed.ucpl", "pipe_zero1(pp = 2, dp = 3)", "pipe_zero1(pp = 2, dp = 1)", GPT, ()),
    ("fsdp.ucpl", "fsdp2_tp(fsdp = 3, tp = 2)", "fsdp2_tp(fsdp = 2, tp = 1)", {"v": 7, "h": 6, "f": 9, "d": 2}, ()),
    ("fsdp.ucpl", "whole()", "fsdp1_local(fsdp = 3)", {"v": 7, "h": 6, "f": 9, "d": 2}, ()),
    ("megatron.ucpl", "legacy_pp(tp = 2, pp = 2)", "legacy_pp(tp = 1, pp = 4)", MEGATRON, ()),
    ("megatron.ucpl", "interleaved(pp = 2, vp = 2)", "canonical()", MEGATRON, ()),
    ("megatron.ucpl", "dp_reshardable(tp = 2, dp = 2)", "dp_reshardable(tp = 1, dp = 3)", MEGATRON, ()),
    ("megatron.ucpl", "legacy_moe(tp = 2, ep = 2)", "legacy_moe(tp = 1, ep = 4)", {**MEGATRON, "e": 4}, ()),
    ("megatron_moe.ucpl", "megatron_zero1(2, 2, 2, 2)", "megatron_zero1(1, 4, 2, 1)", MOE, ()),
    ("megatron_moe.ucpl", "megatron(2, 2, 2, 2)", "megatron_interleaved(2, 2, 2, 2)", MOE, ()),
]  # fmt: skip


@pytest.mark.parametrize(
    ("file", "source", "target", "sizes", "drop"), FRAMEWORKS, ids=[f"{a} -> {b}" for _, a, b, _, _ in FRAMEWORKS]
)
def test_layouts_of_other_frameworks_come_back(
    file: str, source: str, target: str, sizes: dict[str, int], drop: tuple[str, ...]
) -> None:
    assert assert_round_trip(written(file, source, sizes), written(file, target, sizes), drop=drop)


# ---- the law can fail ------------------------------------------------------------------------------------------------

TWO = """ucpl 1
model m {
  dim a = 4, b = 3
  dtype f32
  w : a b
  v : a
}
layout rows(tp) of m {
  mesh tp
  file weights = torch "{tp}.pt"
  w = a@tp b as "w"
  v = a as "v"
}
layout columns(tp) of m {
  mesh tp
  file weights = torch "{tp}.pt"
  w = a b@tp as "w"
  v = a as "v"
}
"""


def test_elements_in_each_others_place_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import ucpl.testing.laws as module

    real = run

    def swapped(plan, stored):
        out = real(plan, stored)
        place = next(p for p in out if p[1] == ("w",))
        out[place][[0, 1]] = out[place][[1, 0]]
        return out

    monkeypatch.setattr(module, "run", swapped)
    words = r"w of 0.pt, position 0: weight of w\[a=1, b=0\] instead of weight of w\[a=0, b=0\]"
    with pytest.raises(AssertionError, match=words):
        assert_round_trip(Example(TWO, "rows(tp = 2)"), Example(TWO, "columns(tp = 3)"))


def test_copies_that_differ_are_named() -> None:
    a, b = (locate(Example(TWO, call).layout()) for call in ("rows(tp = 2)", "columns(tp = 3)"))
    stored = lay_out(a, numbered(a, {}))
    stored["1.pt", ("v",)][2] += 0.5
    with pytest.raises(AssertionError, match=r"v: a copy in v of 1.pt at 2"):
        run(order(build(a, b)), stored)


def test_a_mean_is_over_the_copies_and_a_sum_adds_partial_sums() -> None:
    for word, want in (("mean", 15.0), ("sum", 30.0), ("max", 20.0)):
        text = TWO.replace('v = a as "v"', f'v = a {word} @tp as "v"', 1)
        a, b = (locate(Example(text, call).layout()) for call in ("rows(tp = 2)", "columns(tp = 1)"))
        stored = lay_out(a, numbered(a, {}))
        for rank in range(2):
            stored[f"{rank}.pt", ("v",)][:] = (10.0, 20.0)[rank]
        moved = run(order(build(a, b)), stored)
        assert moved["0.pt", ("v",)].tolist() == [want] * 4


def test_copies_next_to_a_sum_count_once() -> None:
    """Two data-parallel ranks hold the same partial sums: they are not added."""
    text = (
        "ucpl 1\nmodel m {\n dim a = 4\n dtype f32\n v : a\n}\n"
        'layout x(dp, tp) of m {\n mesh dp tp\n file weights = torch "{dp}.{tp}.pt"\n v = a sum @tp as "v"\n}\n'
    )
    a, b = (locate(Example(text, call).layout()) for call in ("x(dp = 2, tp = 3)", "x(dp = 1, tp = 1)"))
    moved = run(order(build(a, b)), lay_out(a, numbered(a, {})))
    assert moved["0.0.pt", ("v",)].tolist() == [3.0, 6.0, 9.0, 12.0]


def test_refusals_of_a_user_s_text_come_through() -> None:
    with pytest.raises(UcplError, match="E204"):
        assert_round_trip(Example(TWO, "rows(tp = 3)"), Example(TWO, "columns(tp = 3)"))
