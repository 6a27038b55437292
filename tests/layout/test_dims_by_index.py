"""Layers of different width: a dim whose size depends on an index.

It occurs in every kind of entry, flat and group.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.cli.command import ucpl
from tests.counted import Asked
from tests.laws.agreement import check
from ucpl.errors import UcplError
from ucpl.graph import build
from ucpl.language import parse_call, print_file
from ucpl.layout import Layout, close, load, resolve
from ucpl.placement import Placement, element_name, locate
from ucpl.testing import assert_round_trip

MODEL = """ucpl 1

model elm {
  dim l = 4, h = 2, qh = [1, 2, 1, 2] by l, kh = [1, 1, 1, 2] by l, f = [2, 4, 4, 6] by l
  dtype f32
  embed  : h
  attn.q : l qh h
  attn.k : l kh h
  up     : l[1..] f h
  ln     : l h
  state fp32, m : f32
}

"""
WHOLE = """layout whole() of elm {
  file weights = torch "a.pt"
  embed       = h                  as "embed"
  attn.qkv[l] = (q: qh + k: kh) h  as "layers.{l}.qkv"
  up[l]       = h f                as "layers.{l}.up"
  ln          = l h                as "ln"
  state *     = like               as "{key}.{state}"
}

"""
PARALLEL = """layout parallel(tp, pp = 1, dp = 1) of elm {
  mesh pp tp dp
  index l = l@spread(pp)
  file weights = torch "{pp}.{tp}.pt"
  file optim = torch "o{pp}.{tp}.{dp}.pt"
  group all   = embed, ln, attn.q, attn.k, up
  embed       = h                  as "embed"
  attn.q[l]   = qh h               as "layers.{l.local}.q"
  attn.k[l]   = kh h               as "layers.{l.local}.k"
  up[l]       = pad(f, tp)@tp h    as "layers.{l.local}.up.{name}"
  ln[l]       = h                  as "layers.{l.local}.ln"
  state * of all = pad(flat(each), 2 * dp)@dp  as "flat.{bucket}.{state}"
}

"""
TEXT = MODEL + WHOLE + PARALLEL


def laid(call: str, text: str = TEXT, **more: Any) -> Layout:
    return resolve(load(("elm.ucpl", text)), parse_call(call), **more)


def placed(call: str, text: str = TEXT) -> Placement:
    return locate(laid(call, text))


@pytest.mark.parametrize(
    "call", ["whole()", "parallel(tp = 1)", "parallel(tp = 2)", "parallel(tp = 3, pp = 2, dp = 2)", "parallel(2, 4, 3)"]
)
def test_it_means_what_the_oracle_says(call: str) -> None:
    assert check(TEXT, call)


def test_there_and_back_at_other_degrees() -> None:
    calls = ["whole()", "parallel(tp = 2, pp = 2)", "parallel(tp = 3, dp = 2)", "parallel(tp = 1, pp = 4, dp = 3)"]
    for a in calls:
        for b in calls:
            assert assert_round_trip(placed(a), placed(b))


WIDTHS = st.integers(1, 5).flatmap(
    lambda n: st.tuples(*(st.lists(st.integers(0, 4), min_size=n, max_size=n) for _ in range(3)))
)
DEGREES = st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 2))


@given(WIDTHS, DEGREES, DEGREES)
@settings(max_examples=25)
def test_any_widths_mean_what_the_oracle_says_and_come_back(
    widths: tuple[list[int], ...], here: tuple[int, int, int], there: tuple[int, int, int]
) -> None:
    sentence = "dim l = {}, h = 2, qh = {} by l, kh = {} by l, f = {} by l".format(len(widths[0]), *widths)
    text = TEXT.replace(next(line for line in MODEL.splitlines() if "dim l" in line).strip(), sentence)
    calls = [f"parallel({', '.join(map(str, degrees))})" for degrees in (here, there)]
    assert check(text, calls[0])
    assert_round_trip(placed(calls[0], text), placed(calls[1], text))


def test_layers_of_one_size_are_one_tensor() -> None:
    found = {p: (t.counts, t.indices[0]) for p, t in laid("whole()").tensors.items()}
    assert found["attn.q[qh=1]"] == ((2, 1, 2), range(0, 3, 2)) and found["attn.q[qh=2]"] == ((2, 2, 2), range(1, 4, 2))
    assert found["up[f=4]"] == ((2, 4, 2), range(1, 3)) and "up[f=2]" not in found  # layer 0 has none
    assert element_name(laid("whole()"), "up[f=6]", (0, 5, 1)) == "up[l=3, f=5, h=1]"


def test_a_layout_written_out_is_the_same_layout() -> None:
    text = print_file(close(load(("elm.ucpl", TEXT)), parse_call("parallel(2, 2)")))
    assert {p: t.counts for p, t in laid("stored()", text).tensors.items()} == {
        p: t.counts for p, t in laid("parallel(2, 2)").tensors.items()
    }
    assert assert_round_trip(placed("parallel(2, 2)"), locate(laid("stored()", text)))


def test_a_tensor_is_dropped_by_its_full_name() -> None:
    less = TEXT.replace("layout parallel", "layout less() of elm extends whole() {\n  up = none\n}\nlayout parallel")
    with pytest.raises(UcplError) as caught:
        build(placed("whole()", less), placed("less()", less))
    assert caught.value.diagnostics[0].code == "E310"
    assert build(placed("whole()", less), placed("less()", less), drop=("up",))


def test_a_model_inside_another_keeps_its_widths() -> None:
    outer = "model two {\n  use elm() as a\n}\n" + (
        'layout x() of two {\n  file weights = torch "a.pt"\n  a.up[a.l] = a.f a.h as "{a.l}"\n}\n'
    )
    assert laid("x()", MODEL + outer).tensors["a.up[f=6]"].counts == (1, 6, 2)
    assert check(MODEL + outer, "x()")


def refusal(model: str, layout: str) -> tuple[str, str]:
    head = "ucpl 1\nmodel m {\n  dim l = 3, k = 3, h = 2, f = [2, 4, 4] by l, g = [1, 2, 3] by k\n  dtype f32\n"
    with pytest.raises(UcplError) as caught:
        placed("x()", f'{head}{model}}}\nlayout x() of m {{\n  file weights = torch "a.pt"\n{layout}}}\n')
    found = caught.value.diagnostics[0]
    assert found.remedy
    return found.code, found.message


def test_what_cannot_be_is_refused() -> None:
    assert refusal("  w : l f h\n", '  w = l f h as "w"\n') == (
        "E199", "`w` has layers of different sizes, which are not stacked",
    )  # fmt: skip
    assert refusal("  w : l f h\n", '  * = ... as "{name}"\n')[0] == "E199"
    assert refusal("  w : f h\n", "")[0] == "E199"
    assert refusal("  w : l k f g\n", "")[0] == "E199"
    assert refusal("  dim e = [1, 2] by l\n", "") == ("E198", "`e` has 2 sizes, and `l` is 3")
    assert refusal("  dim e = 3 by l\n", "")[0] == "E198"
    assert refusal('  dim e = ["a", "b", "c"] by l\n', "")[0] == "E198"


def test_a_cut_that_leaves_a_remainder_names_the_layers() -> None:
    with pytest.raises(UcplError) as caught:
        placed("parallel(tp = 4)", TEXT.replace("pad(f, tp)@tp", "f@tp"))
    found = caught.value.diagnostics[0]
    assert found.code == "E204" and "`up[f=6]`" in found.message


def test_sizes_come_from_a_config() -> None:
    text = TEXT.replace("f = [2, 4, 4, 6] by l", "f = config.widths by l")
    assert laid("whole()", text, config={"widths": [2, 4, 4, 8]}).tensors["up[f=8]"].counts == (1, 8, 2)


def test_a_rank_without_a_layer_of_a_kind_has_nothing_of_it_in_its_flat() -> None:
    text = "ucpl 1\nmodel m {\n  dim l = 4, h = 2\n  a : l[0] h\n  b : l h\n  state m : f32\n}\n" + (
        'layout x(pp) of m {\n  mesh pp\n  index l = l@pp\n  file weights = torch "{pp}"\n'
        '  a[l] = h as "a.{l.local}"\n  b[l] = h as "b.{l.local}"\n  state m = flat(each) as "m"\n}\n'
    )
    assert check(text, "x(2)")


def test_why_knows_the_layers_of_one_size(tmp_path: Any) -> None:
    (tmp_path / "m.ucpl").write_text(TEXT + "plan p = whole() -> parallel(tp = 2)\n")
    done = ucpl("plan", str(tmp_path / "m.ucpl"), "p", "-o", str(tmp_path / "p.plan"))
    assert done.status == 0, done.err
    assert "layers.3.up" in ucpl("why", str(tmp_path / "p.plan"), "up[f=6]").out


# ---- a dim by an index as an index: stages with blocks of their own number ---------------------------------------------

STAGES = """ucpl 1
model swin {
  dim s = 3, b = [1, 2, 1] by s, w = [2, 4, 8] by s
  dtype f32
  q    : s b w
  norm : s b
}
layout whole() of swin {
  file weights = torch "a.pt"
  q[s, b]    = w   as "stages.{s}.blocks.{b}.of.{size(b)}.{w.size}"
  norm[s, b] = ()  as "stages.{s}.blocks.{b:02}"
}
layout ranks(tp, pp = 1) of swin {
  mesh pp tp
  index s = s@spread(pp)
  index b = b@spread(tp)
  file weights = torch "{pp}.{tp}.pt"
  q[s, b]    = w   as "{s.local}.{b.local}.q"
  norm[s]    = b   as "{s.local}.norm"
}

"""


@pytest.mark.parametrize("call", ["whole()", "ranks(tp = 2)", "ranks(tp = 3, pp = 2)"])
def test_blocks_of_a_stage_are_counted_in_the_stage(call: str) -> None:
    assert check(STAGES.replace(".of.{size(b)}.{w.size}", ""), call)


def test_the_key_of_a_block_has_its_number_and_not_the_list() -> None:
    keys = {h.key for p in placed("whole()", STAGES).parts for h in p.homes if p.label.startswith("q")}
    assert keys == {
        (f"stages.{s}.blocks.{b}.of.{n}.{w}",) for s, n, w in ((0, 1, 2), (1, 2, 4), (2, 1, 8)) for b in range(n)
    }
    dealt = {(h.file, h.key) for p in placed("ranks(tp = 2)", STAGES).parts for h in p.homes if p.label.startswith("q")}
    assert dealt == {
        ("0.0.pt", ("0.0.q",)), ("0.0.pt", ("1.0.q",)), ("0.1.pt", ("1.0.q",)), ("0.0.pt", ("2.0.q",)),
    }  # fmt: skip


def test_a_list_is_no_text_of_a_template() -> None:
    code, said = refusal("  w : l f h\n", '  w[l] = f h as "w.{f}"\n')
    assert code == "E122" and "f" in said
    code, said = refusal("  w : l h\n", '  w[l] = h as "w.{l}.{g}"\n')
    assert (code, said) == ("E164", "`g` is a list, and a template has one value in a place")
    assert (
        refusal("  w : l f h\n", '  dim two = 2, k2 = 2\n  index f = (two k2)\n  w[l] = f h as "w.{l}"\n')[0] == "E199"
    )


def test_members_of_a_group_are_found_without_looking_through_all_of_them() -> None:
    from ucpl.layout.naming import _membership

    Asked.times = 0
    members = tuple(Asked(i) for i in range(1000))
    line: Any = SimpleNamespace(groups=("g",))
    groups: Any = {"g": SimpleNamespace(members=members, without=None)}
    is_member = _membership(line, groups)
    assert all(is_member(Asked(i)) for i in range(1000)) and not is_member("other")
    assert Asked.times < 10_000
    groups = {"g": SimpleNamespace(members=None, without=("h",)), "h": SimpleNamespace(members=("a",), without=None)}
    assert _membership(line, groups)("b") and not _membership(line, groups)("a")
    assert _membership(SimpleNamespace(groups=()), groups)("a")  # type: ignore[arg-type]
