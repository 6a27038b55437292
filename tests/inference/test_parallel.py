"""Tensor parallelism in the language.

Open layouts, degrees of calls, numbers of heads.
"""

from __future__ import annotations

import pytest
from attrs import evolve

from tests.inference.facts import BASES, base_of, checkpoint, model_of, read_again, text_of, with_parallel
from ucpl.errors import UcplError
from ucpl.extents import NamedTensor, Section, Sharding
from ucpl.extents.train_state import is_of_default
from ucpl.inference import ranks
from ucpl.inference.parallel import GRAIN, Base, Extended, demand, heads_of, is_open, pattern, recut, rule
from ucpl.inference.whole_shapes import with_shapes
from ucpl.language import nodes, parse_call
from ucpl.language.printer import print_axis
from ucpl.layout import load


def stored(base: Base, shardings: dict[str, Sharding]) -> Extended:
    return ranks.stored(base, with_parallel(checkpoint(tp=2), shardings=shardings))


def target(base: Base, shardings: dict[str, Sharding]) -> Extended:
    return ranks.target(base, None, shardings)


def cut(*widths: int, dim: int = 0, rest: tuple[int, ...] = (4,), origin: str = "the map") -> Sharding:
    shape = (*rest[:dim], sum(widths), *rest[dim:])
    return Sharding(shape, dim, (Section(sum(widths), widths),), origin)


def code(error: pytest.ExceptionInfo[UcplError]) -> tuple[str, str]:
    d = error.value.diagnostics[0]
    return d.code, d.message


# ---- a layout, a call ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "open_"),
    [("plainly", True), ("stage3", True), ("named", False), ("over_named", False), ("without", False), ("zero1", True),
     ("zero2", True), ("plain", False), ("universal", False)],
)  # fmt: skip
def test_a_layout_is_open_where_it_names_no_tensor_and_knows_tp(call: str, open_: bool) -> None:
    assert is_open(load(("bases.ucpl", BASES)), nodes.Call(call)) is open_


@pytest.mark.parametrize(
    ("call", "dp", "tp", "pp"),
    [
        ("plainly(3)", 3, 5, 1),
        ("plainly(3, 2)", 3, 2, 1),
        ("plainly(3, pp = 4)", 3, 5, 4),
        ("plainly(tp = 2 * 3, dp = 7)", 7, 6, 1),
    ],
)
def test_a_degree_is_the_argument_then_what_is_inherited_then_1(call: str, dp: int, tp: int, pp: int) -> None:
    base = base_of(call, tp=5)
    assert (base.asked("dp"), base.asked("tp"), base.asked("pp")) == (dp, tp, pp)


def test_what_is_inherited_must_be_a_number() -> None:
    assert base_of("plainly(3)", tp="four").asked("tp") == 1


# ---- DeepSpeed's rule ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "degree", "heads", "grain", "module", "widths"),
    [
        (10, 3, 0, 1, "attn", (4, 3, 3)),
        (12, 5, 4, 1, "attn", (3, 3, 3, 3, 0)),
        (12, 3, 4, 1, "attn", (6, 3, 3)),
        (12, 5, 4, 1, "block.mlp", (3, 3, 2, 2, 2)),
        (12, 5, 4, 1, "lm_head", (3, 3, 2, 2, 2)),
        (12, 5, 4, 1, "embed_out", (3, 3, 2, 2, 2)),
        (12, 5, 4, 1, "head.lm_head", (3, 3, 3, 3, 0)),
        *(
            (12, 5, 4, 1, f"x.{name}.y", (3, 3, 2, 2, 2))
            for name in ("gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")
        ),
        (13, 5, 4, 1, "attn", (3, 3, 3, 2, 2)),
        (70, 3, 0, 16, "attn", (32, 16, 22)),
        (64, 3, 0, 16, "attn", (32, 16, 16)),
        (5, 2, 0, 16, "attn", (3, 2)),
        (16, 2, 0, 16, "attn", (16, 0)),
    ],
)
def test_widths_are_by_heads_where_they_divide_and_by_grains_elsewhere(
    size: int, degree: int, heads: int, grain: int, module: str, widths: tuple[int, ...]
) -> None:
    assert rule(size, degree, heads, grain, module) == widths and sum(widths) == size


@pytest.mark.parametrize(
    ("config", "heads"),
    [
        ({}, None),
        ({"num_attention_heads": 8}, (8, "num_attention_heads of the config")),
        ({"num_attention_heads": 8, "num_key_value_heads": 2}, (2, "num_key_value_heads of the config")),
        (
            {"num_attention_heads": 8, "num_kv_heads": 3, "num_key_value_heads": 2},
            (2, "num_key_value_heads of the config"),
        ),
        ({"n_head_kv": 3, "multi_query_group_num": 5}, (5, "multi_query_group_num of the config")),
        ({"num_key_value_heads": "2", "n_heads": 4}, (4, "n_heads of the config")),
        ({"num_key_value_heads": True, "n_heads": 4}, (4, "n_heads of the config")),
        ({"num_key_value_heads": 9, "text_config": {"n_heads": 4}}, (4, "n_heads of the config")),
        ({"num_key_value_heads": 9, "text_config": 5}, (9, "num_key_value_heads of the config")),
    ],
)
def test_the_number_of_heads_is_the_first_that_deepspeed_finds(
    config: dict[str, object], heads: tuple[int, str] | None
) -> None:
    assert heads_of(config) == heads


# ---- another degree --------------------------------------------------------------------------------------------------


def widths_of(made: dict[str, Sharding]) -> dict[str, list[tuple[int, ...] | None]]:
    return {name: [x.widths for x in s.sections] for name, s in made.items()}


def test_heads_that_are_given_cut_every_section() -> None:
    fused = Sharding((20, 4), 0, (Section(12, (6, 6)), Section(3, None), Section(5, (3, 2))), "the map")
    made, notes = recut({"a.w": fused, "mlp.w": cut(4, 3)}, 3, (4, "given"))
    assert widths_of(made) == {"a.w": [(6, 3, 3), None, (2, 2, 1)], "mlp.w": [(3, 2, 2)]}
    assert made["a.w"].shape == (20, 4) and made["a.w"].dim == 0
    assert notes[:2] == (("kv_heads", 4, "given"), (GRAIN, 1, "DeepSpeed's default"))
    assert notes[2:] == (("cuts over tp", "2 tensors", "DeepSpeed's rule"),)


def test_without_tensor_parallelism_nothing_is_cut() -> None:
    made, notes = recut({"a.w": cut(4, 3)}, 1, None)
    assert made["a.w"].dim is None and made["a.w"].sections == () and notes == ()


def test_heads_that_contradict_the_source_name_those_that_do_not() -> None:
    with pytest.raises(UcplError) as caught:
        recut({"a.w": cut(8, 4, 4)}, 2, (2, "given"))
    assert code(caught) == (
        "E473",
        "with kv_heads = 2 DeepSpeed cuts 16 positions of `a.w` into [8, 8, 0], the source holds [8, 4, 4]",
    )
    assert caught.value.diagnostics[0].remedy.endswith(": 4")
    assert caught.value.diagnostics[0].labels[0].file == "<call>"


def test_two_numbers_of_heads_that_would_cut_otherwise_are_not_chosen_from() -> None:
    with pytest.raises(UcplError) as caught:
        recut({"a.w": cut(12, 12)}, 3, None, (16, "the config"))
    assert code(caught) == (
        "E472",
        "24 positions of `a.w` over tp = 3 are [12, 12, 0] with kv_heads = 2 and [12, 6, 6] with 4,"
        " and the source does not determine it",
    )


def test_two_that_cut_alike_and_one_that_does_not_are_two() -> None:
    with pytest.raises(UcplError) as caught:
        recut({"a.w": cut(4, 4)}, 4, None, (6, "the config"))
    assert "are [4, 4, 0, 0] with kv_heads = 2 and [2, 2, 2, 2] with 4" in code(caught)[1]


def test_one_number_of_heads_that_holds_is_taken() -> None:
    made, notes = recut({"a.w": cut(8, 4, 4)}, 2, None)
    assert widths_of(made) == {"a.w": [(8, 8)]}
    assert notes[0] == ("kv_heads", 4, "the only cut that the source's widths allow")


def test_the_rule_by_size_is_a_reported_default_if_it_fits() -> None:
    made, notes = recut({"a.w": cut(6, 6)}, 5, None)
    assert widths_of(made) == {"a.w": [(3, 3, 2, 2, 2)]}
    assert notes[0][1] == 0 and str(notes[0][2]).startswith("default of a config without heads")
    assert not is_of_default(str(notes[0][2]))  # `convert` prints it without -v


def test_a_rank_without_anything_is_refused() -> None:
    with pytest.raises(UcplError) as caught:
        recut({"a.w": cut(6, 6)}, 5, (4, "given"))
    assert (
        code(caught)[0] == "E473" and "tp rank 4 of 5 would hold nothing of `a.w`, whose dim 0 is 12" in code(caught)[1]
    )


def test_more_ranks_than_positions_are_refused_before_any_is_counted() -> None:
    with pytest.raises(UcplError) as caught:
        recut({"a.w": cut(6, 6)}, 1 << 31, None)
    assert code(caught)[0] == "E473" and "cannot each hold some of `a.w`, whose dim 0 is 12" in code(caught)[1]


def test_a_grain_is_used_and_reported_with_its_origin() -> None:
    made, notes = recut({"a.w": cut(32, 38)}, 3, None, (16, "the config of the engine"))
    assert widths_of(made) == {"a.w": [(32, 16, 22)]}
    assert notes[1] == (GRAIN, 16, "the config of the engine")


def test_a_target_takes_the_grain_of_its_source_and_a_number_alone() -> None:
    source = {"a": cut(32, 38)}
    for said, widths in ((16, "@tp[32, 16, 22]"), (0, None), ("16", None)):
        base = base_of("plainly(dp = 2, tp = 3)", model_of(a=(70, 4)), tp_grain_size=said)
        if widths is None:  # as without it: 32 and 38 are then of no rule
            with pytest.raises(UcplError, match="E473"):
                target(base, source)
        else:
            assert widths in text_of(target(base, source))


# ---- layouts ---------------------------------------------------------------------------------------------------------


def test_an_entry_for_each_tensor_that_is_cut() -> None:
    made = stored(base_of("plainly(dp = 2, tp = 2)", model_of(a=(6, 4), b=(6, 4), c=(4, 7))),
                  {"a": cut(3, 3), "b": Sharding((6, 4)), "c": cut(4, 3, dim=1)})  # fmt: skip
    text = text_of(made)
    assert 'a = _@tp ... as "a"' in text and 'c = _ _@spread(tp) as "c"' in text and "b = " not in text
    assert (
        made.call == nodes.Call("stored", made.call.arguments) and "extends plainly(dp = dp, tp = tp, pp = pp)" in text
    )
    assert made.notes == (("cuts over tp", "2 tensors", "the map"),)
    read_again(made)


def test_a_tied_tensor_has_two_entries() -> None:
    model = model_of(a=(6, 4))
    model = evolve(model, items=(*model.items, nodes.Alias("b", "a")))
    text = text_of(stored(base_of("zero1(dp = 2, tp = 2)", model), {"a": cut(3, 3)}))
    assert 'as "a"' in text and 'as "b"' in text and text.count("@tp ...") == 2


@pytest.mark.parametrize(
    ("sections", "text"),
    [
        ([(24, None)], "_ ..."),
        ([(24, (16, 8)), (6, (3, 3))], "(_[..24]@spread(tp, 8) + _[24..]@tp) ..."),
        ([(24, (12, 12)), (6, None), (2, (1, 1))], "(_[..24]@tp + _[24..30] + _[30..]@tp) ..."),
    ],
)
def test_sections_are_ranges_end_to_end(sections: list[tuple[int, tuple[int, ...] | None]], text: str) -> None:
    size = sum(n for n, _ in sections)
    made = pattern(Sharding((size, 4), 0, tuple(Section(n, w) for n, w in sections)))
    assert " ".join(map(print_axis, made)) == text


def test_dims_before_and_behind_the_cut_one() -> None:
    assert " ".join(map(print_axis, pattern(cut(3, 3, dim=1, rest=(5, 4))))) == "_ _@tp ..."
    assert " ".join(map(print_axis, pattern(cut(3, 3, dim=2, rest=(5, 4))))) == "_ _ _@tp"
    assert [print_axis(a) for a in pattern(Sharding((6, 4)))] == ["..."]


def test_the_source_s_degree_again_is_the_source_s_cut() -> None:
    made = target(base_of("plainly(dp = 3)", tp=2), {"a": cut(5, 1)})
    assert "a = _@tp[5, 1] ..." in text_of(made)
    assert made.notes == (("cuts over tp", "1 tensors", "as the source's"),) and made.call.name == "target"


def test_one_rank_needs_no_entries_and_no_heads() -> None:
    made = target(base_of("plainly(dp = 3, tp = 1, kv_heads = 2)"), {"a": cut(3, 3)})
    assert made.call == parse_call("plainly(dp = 3, tp = 1)") and made.notes == ()
    assert target(base_of("plainly(dp = 3, kv_heads = 2)"), {}).call == parse_call("plainly(dp = 3, kv_heads = 2)")


def test_heads_that_are_given_win_over_the_config() -> None:
    base = evolve(
        base_of("plainly(dp = 2, tp = 3, kv_heads = 4)", model_of(a=(16, 4))), config={"num_key_value_heads": 8}
    )
    assert ("kv_heads", 4, "given") in target(base, {"a": cut(8, 8)}).notes
    base = evolve(base, call=parse_call("plainly(dp = 2, tp = 3)"))
    assert ("kv_heads", 8, "num_key_value_heads of the config") in target(base, {"a": cut(8, 8)}).notes


def test_a_source_that_is_not_cut_says_nothing_of_cuts() -> None:
    with pytest.raises(UcplError, match=r"E472.*not tensor parallel"):
        target(base_of("plainly(dp = 2, tp = 2)"), {})


# ---- shapes ----------------------------------------------------------------------------------------------------------


def test_a_full_shape_is_the_sum_along_the_cut_dim() -> None:
    found = checkpoint(*(NamedTensor(n, (3, 4), "f32", "parameter") for n in "abc"), dp=2, tp=3)
    local: dict[str, tuple[tuple[int, ...], ...]] = dict.fromkeys("abc", ((3, 4), (2, 4), (1, 4)))
    found = with_parallel(found, local_shapes=local, shardings={"c": cut(3, 3)})

    def shapes(name: str, more: str = "") -> dict[str, tuple[int, ...]]:
        made = with_shapes(found, load(("bases.ucpl", BASES + more)), nodes.Call(name))
        return {t.name: t.shape for t in made.state.tensors}

    assert shapes("over_named") == {"a": (6, 4), "b": (3, 4), "c": (3, 4)}, "its base says it of a"
    text = "layout both(dp, tp = 3) of any extends named(dp = dp, tp = tp) {\n"
    text += '  a = _ _ as "a"\n  b = pad(_, 4)@tp _ as "b"\n  c = _@tp _ as "c"\n}\n'
    padded = text.replace("both", "padded").replace("pad(_, 4)@tp", "pad(_@tp, 4)")
    assert shapes("padded", padded)["b"] == (6, 4)
    assert shapes("both", text) == {"a": (3, 4), "b": (6, 4), "c": (3, 4)}, "c is the checkpoint's own to say"


def test_parts_that_nothing_describes_are_named() -> None:
    found = with_parallel(
        checkpoint(NamedTensor("a", (3, 4), "f32", "parameter"), tp=2), local_shapes={"a": ((3, 4), (2, 4))}
    )
    with pytest.raises(UcplError, match=r"E464: `a` is \[3, 4\], \[2, 4\] on tensor-parallel ranks"):
        demand({}, found)
    demand({"a": cut(3, 2)}, found)
    demand({}, checkpoint(NamedTensor("a", (3, 4), "f32", "parameter"), tp=1))
    demand({}, checkpoint(NamedTensor("a", (3, 4), "f32", "parameter")))
