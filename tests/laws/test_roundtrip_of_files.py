"""`roundtrip`: a user's file carried there and back at many degrees."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.laws.test_locate import LAYOUTS
from tests.laws.test_round_trip import TWO
from ucpl.conversion.drawn_sizes import Sizes
from ucpl.errors import UcplError
from ucpl.language import nodes, parse
from ucpl.resources import spec_text
from ucpl.testing import assert_round_trip, roundtrip


def test_every_layout_is_tried_at_changed_degrees() -> None:
    rows, columns = roundtrip(TWO, examples=6)
    assert (rows.layout, columns.layout) == ("rows", "columns")
    assert (len(rows.tried), len(columns.tried)) == (6, 2), "of 3 columns, tp = 1 and 3 have equal parts"
    assert rows.refused[0].startswith("rows(tp = 3): ") and "does not divide by tp = 3" in rows.refused[0]
    assert "rows(tp = 2) -> rows(tp = 4)" in roundtrip(TWO, "rows", examples=12)[0].tried
    assert rows.elements == 16 * len(rows.tried)


def test_the_same_call_gives_the_same_report() -> None:
    assert str(roundtrip(TWO, "rows", 5)[0]) == str(roundtrip(TWO, "rows", 5)[0])


def test_sizes_that_rest_on_a_config_get_small_ones() -> None:
    text = TWO.replace("a = 4", "a = config.hidden_size")
    (report,) = roundtrip(text, "rows", examples=8)
    assert set(report.sizes) == {"a"} and report.tried
    (report,) = roundtrip(text, "rows", examples=8, config={"hidden_size": 12})
    assert report.sizes == {} and report.elements == 48 * len(report.tried)


def test_a_model_too_large_to_number_is_made_smaller() -> None:
    (report,) = roundtrip(TWO.replace("a = 4, b = 3", "a = 65536, b = 4096"), "rows", examples=4)
    assert "a" in report.sizes
    assert report.tried


def test_layouts_of_frameworks_come_back() -> None:
    (report,) = roundtrip((LAYOUTS / "fsdp.ucpl").read_text(), "fsdp2_tp", examples=2)
    assert len(report.tried) == 2


def test_a_layout_that_loses_elements_is_caught() -> None:
    with pytest.raises(UcplError) as caught:
        roundtrip(TWO.replace("w = a@tp b", "w = a@tp b at tp[0]"), "rows", examples=6)
    assert caught.value.diagnostics[0].code in ("E308", "E309")


MIXED = """ucpl 1
model m {
  dim h = 4, l = 2
  w   : h
  ids : l h  dtype i64 is buffer
}
layout x(tp) of m {
  mesh tp
  file weights = torch "{tp}.pt"
  w      = h@tp  as "w"
  ids[l] = h     as "{l}"
}
"""


def test_a_buffer_of_whole_numbers_among_tensors_without_a_dtype_comes_back() -> None:
    (report,) = roundtrip(MIXED, examples=2)
    assert "x(tp = 2) -> x(tp = 1)" in report.tried


TOWERS = """ucpl 1
model tower(width) {
  dim r = width
  w : r
}
model two {
  use tower(width = 4) as eye
  use tower(width = 6) as ear
}
layout part(tp) of tower {
  mesh tp
  file weights = torch "{tp}.pt"
  w = r@tp  as "w"
}
layout both(tp) of two {
  mesh tp
  use part(tp = tp) as eye key "eye/{key}"
  use part(tp = tp) as ear key "ear/{key}"
}
"""


def test_a_part_that_leaves_its_model_open_is_tried_where_it_is_used() -> None:
    (report,) = roundtrip(TOWERS, examples=2)
    assert report.layout == "both" and "both(tp = 2) -> both(tp = 1)" in report.tried
    with pytest.raises(UcplError) as caught:  # asked for by name, it names the missing value
        roundtrip(TOWERS, "part")
    assert caught.value.diagnostics[0].code == "E124"
    assert [r.layout for r in roundtrip(TOWERS.replace("(width)", "(width = 2)"), examples=2)] == ["part", "both"]


def test_a_degree_that_axes_are_made_of_is_changed() -> None:
    text = """ucpl 1
model m {
  dim n = 8, g = 2, r = 4, d = 2
  index n = (g r)
  q : n d
  k : g d
}
layout x(tp = 1) of m {
  let groups = gcd(tp, g), copies = tp / groups
  mesh groups copies
  file weights = torch "{groups * size(copies) + copies}.pt"
  qkv = (q: g@groups r@copies d + k: g@groups d)  as "qkv"
}
"""
    (report,) = roundtrip(text, examples=12)
    assert "x(tp = 2) -> x(tp = 4)" in report.tried


def test_an_unknown_layout_and_one_without_a_model_are_refused() -> None:
    with pytest.raises(UcplError) as caught:
        roundtrip(TWO, "rwos")
    assert caught.value.diagnostics[0].code == "E110"
    with pytest.raises(UcplError) as caught:
        roundtrip((LAYOUTS / "any.ucpl").read_text(), "plain")
    assert caught.value.diagnostics[0].code == "E114"


LLAMA: dict[str, Any] = {
    "model_type": "llama", "num_hidden_layers": 32, "hidden_size": 4096, "vocab_size": 128256, "intermediate_size": 14336,
    "num_key_value_heads": 8, "num_attention_heads": 32, "tie_word_embeddings": False,
}  # fmt: skip
GPT2: dict[str, Any] = {"n_layer": 12, "n_embd": 768, "vocab_size": 50257, "n_positions": 1024, "n_head": 12}


@pytest.mark.parametrize(("name", "config"), [("llama", LLAMA), ("gpt2", GPT2)])
@pytest.mark.parametrize("given", [True, False])
def test_shipped_specs_go_round_with_real_configs_and_without(name: str, config: dict[str, Any], given: bool) -> None:
    (report,) = roundtrip(spec_text(f"{name}.ucpl"), "megatron", 4, config=config if given else None)
    assert len(report.tried) == 4 and report.sizes
    assert {axis for axis in ("tp", "pp") if any(f"{axis} = 2" in t or f"{axis} = 3" in t for t in report.tried)} == {
        "tp",
        "pp",
    }


BOUNDS = """ucpl 1

model m {
  dim l = config.text.layers, h = config.text.width, n = 4000, s = 300, e = 6
  a : l[2..] h
  b : n h
  c : s h
  w : e[1, 4] h
}

layout x(tp, pp = 1) of m {
  mesh pp tp
  file weights = torch "{pp}_{tp}.pt"
  index l = l@pp
  a[l] = h@tp                             as "a.{l}"
  b    = (n[..24]@tp + n[24..]@tp) h      as "b"
  c    = (s h@tp[2, 4])                   as "c" when tp == 77
  w[e] = h@tp                             as "w.{e}"
}
"""


def test_sizes_are_drawn_within_what_the_text_says() -> None:
    model, layout = parse(BOUNDS, "bounds.ucpl").statements
    assert isinstance(model, nodes.Model) and isinstance(layout, nodes.Layout)
    found = Sizes.of(model, [layout], {}, {})
    assert (found.missing, found.others) == (("l", "h"), ("n", "s", "e"))
    assert (found.least, found.kept) == ({"l": 3, "n": 25, "e": 5}, frozenset("h"))
    drawn = [found.one("n", random.Random(seed), 4000) for seed in range(20)]
    assert min(drawn) >= 25 and len(set(drawn)) > 1
    given = Sizes.of(model, [layout], {"n": 40}, {"text": {"layers": 8, "width": 64}})
    assert given.missing == () and "n" not in given.others


def test_a_nested_config_and_sizes_and_degrees_are_taken() -> None:
    config: dict[str, Any] = {"text": {"layers": 8, "width": 64}}
    (report,) = roundtrip(
        BOUNDS, "x", 3, config=config, sizes={"n": 32, "s": 2}, degrees={"tp": (2, 4), "pp": (1, 3, 4)}
    )
    assert report.sizes == {} and len(report.tried) == 3
    assert "tp = 1" not in str(report.tried) and "pp = 2" not in str(report.tried)
    assert [r for r in report.refused if "8 does not divide by pp = 3" in r]
    (without,) = roundtrip(BOUNDS, "x", 3, sizes={"n": 32, "s": 2})
    assert set(without.sizes) == {"l", "h"} and without.sizes["l"] >= 3 and len(without.tried) == 3


def test_degrees_that_none_suits_are_reported_with_what_does_not_divide() -> None:
    (report,) = roundtrip(TWO.replace("a = 4", "a = 11"), "rows", examples=4)
    assert report.tried == () and report.sizes == {}
    assert "11 does not divide by tp = 2" in str(report)


def test_assert_round_trip_takes_a_config_and_sizes() -> None:
    a, b = (f"llama.ucpl:megatron(tp = {tp}, pp = {pp})" for tp, pp in ((2, 1), (1, 2)))
    small = {**LLAMA, "hidden_size": 64, "vocab_size": 12, "intermediate_size": 8, "num_hidden_layers": 2}
    assert assert_round_trip(a, b, config=small) == assert_round_trip(
        a, b, config=LLAMA, sizes={"h": 64, "v": 12, "f": 8, "l": 2}
    )
    with pytest.raises(ValueError, match="8,030,261,248 elements"):
        assert_round_trip(a, b, config=LLAMA)


LISTS = """ucpl 1

model m {
  dim l = 6, h = 4
  w : l h
  x : h
}

layout stages(pp, stages, tp = 1) of m {
  mesh pp tp
  index l = l@pp[stages]
  file weights = torch "{pp}_{tp}.pt"
  w[l] = h@tp as "w.{l.local}"
  x = h@tp as "x" at pp[0]
}

layout cuts(tp, cuts) of m {
  mesh tp
  file weights = torch "{tp}.pt"
  w = l h@tp[cuts] as "w"
  x = h@tp[cuts] as "x"
}

layout owners(pp, owner) of m {
  mesh pp
  file weights = torch "{pp}.pt"
  w[l[where(owner, 0)]] = h as "w.{l}" at pp[0]
  w[l[where(owner, 1)]] = h as "v.{l}" at pp[1] when pp > 1
  w[l[where(owner, 2)]] = h as "u.{l}" at pp[2] when pp > 2
  x = h as "x"
}

layout some(pp, first) of m {
  mesh pp
  file weights = torch "{pp}.pt"
  w[l[first]] = h as "w.{l}" at pp[0]
  w[l[not first]] = h as "w.{l}" at pp[-1]
  x = h as "x"
}
"""


@pytest.mark.parametrize("layout", ["stages", "cuts", "owners", "some"])
def test_lists_without_a_default_are_drawn_for_each_degree(layout: str) -> None:
    (report,) = roundtrip(LISTS, layout, examples=4)
    assert len(report.tried) == 4 and report.elements
    assert all(" = [" in side for text in report.tried for side in text.split(" -> "))


def test_a_list_that_is_given_is_not_drawn() -> None:
    argument = nodes.Argument("stages", nodes.List((nodes.Number(5), nodes.Number(1))))
    (report,) = roundtrip(LISTS, "stages", examples=2, arguments=(argument,), degrees={"pp": [2], "tp": [1, 2]})
    assert len(report.tried) == 2 and not any(" = [" in text for text in report.tried)
