"""Every refusal of layouts, placements and plans: code, place and message.

In the texts below, `⟦` is right before the place that the first label must point at, and `⟧` before the second's.
"""

# A table of texts, one refusal a line:
# ruff: noqa: E501

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from ucpl.errors import UcplError, catalogue
from ucpl.graph import build
from ucpl.language import parse_call
from ucpl.layout import load, resolve
from ucpl.placement import locate
from ucpl.texts import text_at


def place_of(text: str, mark: str) -> tuple[int, int] | None:
    """Line and column of a mark after all marks are removed."""
    if mark not in text:
        return None
    before = text[: text.index(mark)].replace("⟦", "").replace("⟧", "")
    return before.count("\n") + 1, len(before) - (before.rfind("\n") + 1) + 1


def check(code: str, message: str, text: str, call: str, **more: Any) -> None:
    plain = text.replace("⟦", "").replace("⟧", "")
    target, remedy = more.pop("target", None), more.pop("remedy", "")
    with pytest.raises(UcplError) as caught:
        library = load(("refused.ucpl", plain))
        source = locate(resolve(library, parse_call(call), **{k: v for k, v in more.items() if k != "drop"}))
        if target is not None:
            build(source, locate(resolve(library, parse_call(target))), drop=more.get("drop", ()))
    found = caught.value.diagnostics[0]
    assert found.code == code, found
    assert message in found.message, found.message
    assert found.remedy and remedy in found.remedy
    for mark, label in zip("⟦⟧", (*found.labels, None, None), strict=False):
        want = place_of(text, mark)
        if want is not None:
            assert label is not None and (label.file, label.line, label.column) == ("refused.ucpl", *want), found.labels


def text(model: str = "", layout: str = "", head: str = "x(dp)", top: str = "", mesh: str = "  mesh dp\n") -> str:
    """A file of one model and one layout.

    The model has `w : a b` and a state unless it is given.
    """
    model = model or "  dim a = 4, b = 3\n  dtype f32\n  w : a b\n  v : a\n  state s : f32\n"
    return f"ucpl 1\n{top}model m {{\n{model}}}\nlayout {head} of m {{\n{mesh}{layout}}}\n"


FILE = '  file weights = torch "f.{dp}"\n'
W = FILE + '  w = a b as "w"\n  v = a as "v"\n'
OTHER = "  let p = dp, q = 1\n  mesh other: p q\n" + FILE
MODEL = "  dim a = 4, b = 3\n  dtype f32\n"
SCALED = "  dim a = 4, b = 3, a2 = 3, b2 = 2\n  dtype f32\n  w : a b\n  v : a\n  s : {} is scale of w by {}\n"


def blocks(*lines: str) -> str:
    """A layout of a tensor in 3 x 2 blocks, with scales."""
    model = SCALED.replace("a2 = 3", "a2 = 2").format("a2 b2", "3, 2")
    return text(model=model, layout=FILE + "".join(f"  {line}\n" for line in lines))


GLOBS = (
    "layout any_(dp) of any {{\n  mesh dp\n" + FILE + "  {}\n  {}\n}}\nlayout g(dp) of m extends any_(dp = dp) {{\n}}\n"
).replace("{dp}", "{{dp}}")

REFUSED: list[tuple[str, str, str, str, dict[str, Any]]] = [
    ("E101", "no number is called `aa`", text(layout=FILE + "  let x = ⟦aa / 2\n  w = a@dp[x, x] b as \"w\"\n"), "x(2)", {}),
    ("E102", "`p` is defined in a circle: p -> q -> p", text(layout="  let p = q, q = ⟦p\n" + W), "x(2)", {}),
    (
        "E103", "definitions are nested too deep",
        text(layout="  let n0 = 1\n" + "".join(f"  let n{i} = n{i - 1}\n" for i in range(1, 230)) + FILE + '  w = pad(a, n229) b as "w"\n'),
        "x(2)", {},
    ),
    ("E104", "a whole number is needed, not 'four'", text(model='  dim a = ⟦"four"\n  w : ⟦a\n'), "x(2)", {}),
    ("E104", "is no size of a piece", text(layout=FILE + '  w = a⟦@dp[2, "x"] b as "w"\n'), "x(2)", {}),
    ("E105", "`config.width` has no value", text(model="  dim a = ⟦config.width + 1\n  w : a\n"), "x(2)", {}),
    ("E106", "a number grew beyond 64 bits", text(model="  dim a = ⟦4611686018427387904 * 4\n  w : a\n"), "x(2)", {}),
    ("E106", "`w` has", text(model="  dim a = 4294967296, b = 4294967296\n  ⟦w : a b\n"), "x(2)", {}),
    ("E107", "division by zero", text(layout="  let p = ⟦dp / 0\n" + FILE + '  w = pad(a, p) b as "w"\n'), "x(2)", {}),
    ("E108", "3 / 2 leaves a remainder of 1", text(layout="  let p = ⟦dp / 2\n" + FILE + '  w = pad(a, p) b as "w"\n'), "x(3)", {}),
    ("E108", "a = 4 does not divide by 3", text(layout="  dim hi = 3\n  ⟦index a = (hi lo)\n" + W), "x(2)", {}),
    ("E109", "no function is called `floors` with 2", text(layout="  let p = ⟦floors(3, 2)\n" + FILE + '  w = pad(a, p) b as "w"\n'), "x(2)", {}),
    ("E110", "no layout is called `y`", text(layout=W), "y(2)", {}),
    ("E110", "no model is called `n`", text(layout=W).replace("of m {", "of n {"), "x(2)", {}),
    ("E112", 'no file "none.ucpl"', text(top='⟦from "none.ucpl" import m2\n', layout=W), "x(2)", {}),
    ("E113", '"deepspeed.ucpl" defines no `zero9`', text(top='⟦from "deepspeed.ucpl" import zero9\n', layout=W), "x(2)", {}),
    ("E114", "layout `z` is of any model", "ucpl 1\n⟦layout z() of any {\n}\n", "z()", {}),
    ("E115", "-D q", text(layout=W), "x(2)", {"define_sizes": {"q": 1}}),
    ("E116", "`x` takes 1 arguments, not 2", text(layout=W), "x(2, 3)", {}),
    ("E117", "`x` has no parameter `dq`", text(layout=W), "x(dq = 2)", {}),
    ("E118", "`dp` is given twice", text(layout=W), "x(2, dp = 3)", {}),
    ("E119", "`x` extends itself: x -> y -> x", text(layout=W).replace("of m {\n  mesh", "of m extends y(dp) {\n  mesh") + "layout y(dp) of m extends x(dp) {\n}\n", "x(2)", {}),
    ("E120", "`x` is no number format", text(layout='  ⟦file weights = torch "f.{dp:x}"\n'), "x(2)", {}),
    ("E120", "do not pair up", text(layout='  ⟦file weights = torch "f.{dp"\n'), "x(2)", {}),
    ("E121", "has 5000 characters", text(layout=f'  ⟦file weights = torch "{"f" * 5000}"\n'), "x(2)", {}),
    ("E122", "names `l`, which has no value here", text(layout=FILE + '  w = a b ⟦as "w.{l}"\n'), "x(2)", {}),
    ("E122", 'names `b`, which has no value here: `w` has no index `b`', text(layout=FILE + '  w[a] = b ⟦as "w.{a}.{b}"\n'), "x(2)", {}),
    ("E122", "names `b.local`, which has no value here", text(layout=FILE + '  w[a] = b ⟦as "w.{a}.{b.local}"\n'), "x(2)", {}),
    ("E122", "names `lo`, which has no value here: `w` has no index `a`", text(layout=FILE + '  dim hi = 2\n  index a = (hi@dp lo)\n  w = a b ⟦as "w.{lo}"\n'), "x(2)", {}),
    ("E122", "names `b`, which has no value here: `w` has", text(layout=FILE + '  * = ... ⟦as "{name}.{b}"\n'), "x(2)", {}),
    ("E122", 'f.{a}" names `a`, which has no value here: `v` has no index `a`', text(layout='  ⟦file weights = torch "f.{a}"\n  w[a] = b as "w"\n  ⟧v = a as "v"\n'), "x(2)", {}),
    ("E122", '"{a}/{key}" names `a`', text(layout='  ⟦file weights = torch "f" key "{a}/{key}"\n  w[a] = b as "w"\n  ⟧v = a as "v"\n'), "x(2)", {}),
    ("E122", "names `a`, which has no value here: `v` has", text(layout=FILE + '  w[a] = b as "w.{a}"\n  ⟧v = a as "v"\n  state * = like ⟦as "{a}.{key}"\n'), "x(2)", {}),
    ("E122", "names `a`, which has no value here: this state line", text(layout=FILE + '  w[a] = b as "w.{a}"\n  group g = w\n  state * of g = flat(each) ⟦as "{a}"\n'), "x(2)", {}),
    ("E124", "`x` needs a value for `dp`", text(layout=W).replace("x(dp)", "x(⟦dp)"), "x()", {}),
    ("E125", "`dp` is 2 here and 4 in the layout", text(layout=W) + "layout y(dp) of m extends x(2 * dp) {\n}\n", "y(2)", {}),
    ("E126", '"*w" is a glob over names', text(layout=FILE + '  ⟦"*w" = a b as "w"\n'), "x(2)", {}),
    ("E127", '"*w" and "w*" both match `w`', text(layout=FILE) + GLOBS.format('⟦"*w" = ...', '⟧"w*" = none'), "g(2)", {}),
    ("E128", '"*w" speaks of many tensors', text(layout=FILE) + GLOBS.format('⟦"*w"[l] = ...', "v = _"), "g(2)", {}),
    ("E129", "a = 4 in blocks of 3 are 2 scales, and a2 is 3", text(model=SCALED.format("a2 b2", "3, 2")), "x(2)", {}),
    ("E129", "`w` has 2 dims that `s` lacks (a, b), which has 1 of its own", text(model=SCALED.format("a2", "3")), "x(2)", {}),
    ("E129", "a block of 0 elements", text(model=SCALED.format("a2 b2", "0, 2")), "x(2)", {}),
    ("E129", "`z`, the tensor of the scale", text(model=SCALED.replace("of w", "of z").format("a2 b2", "3, 2")), "x(2)", {}),
    ("E129", "`w` has a scale, `s`", text(model=SCALED.format("b2 a2", "2, 1") + "  s2 : b2 a2 is scale of w by 2, 1\n"), "x(2)", {}),
    ("E129", "`s` and `w` have other indices of `a`", text(model=SCALED.format("a[1..] b2", "2")), "x(2)", {}),
    ("E216", "`w` is cut at a = 2, inside the block of 3 that begins at 0", blocks('⟦w = a@dp b as "w"', 's = a2 b2 as "s"'), "x(2)", {}),
    ("E216", "`s`, the scale of `w`, is cut otherwise", blocks('⟧w = a@chunk(dp, 3) b as "w"', '⟦s = a2 b2@dp as "s"'), "x(2)", {}),
    ("E216", "a, which has a scale for each 3, is cut together", blocks('⟦w = (a b)@dp as "w"', 's = a2 b2 as "s"'), "x(2)", {}),
    ("E189", "`v` has no scale", blocks('w = a b as "w"', 'v = a dtype bf16 ⟦value x * scale as "v"'), "x(2)", {}),
    ("E189", "without a dtype", blocks('w = a b ⟦value x * scale as "w"', "s = none"), "x(2)", {}),
    ("E130", "tensor `w` is defined twice", text(model="  dim a = 4\n  ⟧w : a when a\n  ⟦w : a when 1\n"), "x(2)", {}),
    ("E130", "`w` is defined twice", text(model="  dim a = 4\n  w : a\n  ⟦alias w = w when 1\n"), "x(2)", {}),
    ("E132", "dim `a` of `w` is -1", text(model="  dim a = ⟦3 - 4\n  w : ⟦a\n"), "x(2)", {}),
    ("E133", "`w` has dim `a` twice", text(model="  dim a = 4\n  w : a ⟦a\n"), "x(2)", {}),
    ("E123", "`e` is a model, and a model is on no ranks", "ucpl 1\nmodel e {\n}\n" + text(model="  use e() as a ⟦at dp[0]\n")[7:], "x(2)", {}),
    ("E139", "there is no tensor `v` that could be taken back", text(model=MODEL + "  w : a b\n  ⟦v : none\n", layout=W), "x(2)", {}),
    (
        "E150", "two rules for the index `a` hold at once",
        text(layout=FILE + '  ⟧index a = a@dp when dp > 1\n  ⟦index a = a@dp[1, 3] when dp == 2\n  w[a] = b as "{a}"\n'), "x(2)", {},
    ),
    (
        "E198", "`f` has 2 sizes, and `a` is 4", text(model=MODEL + "  dim ⟦f = [1, 2] by a\n  w : a f\n"), "x(2)", {},
    ),
    (
        "E199", "`w` has layers of different sizes, which are not stacked",
        text(model=MODEL + "  dim f = [1, 2, 1, 1] by a\n  w : a f\n", layout=FILE + '  ⟦w = a f as "w"\n'), "x(2)", {},
    ),
    ("E138", "`a@dp` is no index", text(layout=FILE + '  w[⟦a@dp] = b as "w{a}"\n'), "x(2)", {"remedy": "index a = a@dp"}),
    ("E138", "`pad(a, 3)` is no index", text(layout=FILE + '  ⟦w[pad(a, 3)] = b as "w{a}"\n'), "x(2)", {"remedy": "write [a]"}),
    ("E138", "`a[..2]@dp` is no index", text(layout=W + "  group g[⟦a[..2]@dp] = w\n"), "x(2)", {}),
    ("E133", "the index `a` is twice", text(layout=FILE + '  w[a, ⟦a] = b as "w{a}"\n'), "x(2)", {"remedy": "once"}),
    ("E157", "no group is called `g`", text(model=MODEL + "  w : a b\n  ⟦group h = all - g\n", layout=W), "x(2)", {"remedy": "group g = ..."}),
    ("E157", "no group is called `w`", text(model=MODEL + "  w : a b\n  group h = all - w\n", layout=W), "x(2)", {"remedy": "write: group others = w"}),
    ("E157", "no group is called `other`", text(model=MODEL + "  w : a b\n  v : b\n  group one = w\n  ⟦group h = all - one - other\n", layout=W), "x(2)", {}),
    ("E110", "no model is called `x`: it is a layout", text(model=MODEL + "  w : a b\n  ⟦use x(dp = 1) as y\n", layout=W), "x(2)", {}),
    ("E110", "no layout is called `m`: it is a model", text(layout=W + "  ⟦use m() as y\n"), "x(2)", {}),
    ("E190", "the group `g` of a model has an order", text(model=MODEL + "  w : a b\n  ⟦group g = w order reversed\n", layout=W), "x(2)", {"remedy": "in the layout"}),
    ("E190", "has an index", text(model=MODEL + "  w : a b\n  ⟦group g[a] = w\n", layout=W), "x(2)", {}),
    ("E190", "has a file", text(model=MODEL + '  w : a b\n  ⟦group g = from meta "p"\n', layout=W), "x(2)", {}),
    ("E157", "no group is called `g`", text(model=MODEL + "  w : a b\n  ⟦state m : f32 of g\n", layout=W), "x(2)", {"remedy": "group g = ..."}),
    ("E190", "`value x` stores each number as it is", text(layout=FILE + '  w = a b ⟦value x as "w"\n'), "x(2)", {}),
    ("E190", "`trim(a)` leaves padding out", text(layout=FILE + '  w = ⟦trim(a) b as "w"\n'), "x(2)", {"remedy": "write a, or pad it"}),
    ("E138", "4 is no index of `a`, which is 4", text(model="  dim a = 4\n  w : a[⟦4]\n"), "x(2)", {}),
    ("E138", "'q' is no index of `a`", text(model='  dim a = 4\n  w : a[0, ⟦"q"]\n'), "x(2)", {}),
    ("E104", "`where` looks through a list, not 4", text(model="  dim a = 4\n  w : a[where(⟦a, 1)]\n"), "x(2)", {}),
    ("E105", "`config.kinds` has no value", text(model="  dim a = 4\n  w : a[where(⟦config.kinds, 1)]\n"), "x(2)", {}),
    ("E134", "step 0 of dim `a`", text(model="  dim a = 4\n  w : a[⟦0.. by 0]\n"), "x(2)", {}),
    ("E135", "alias `t` of `u`, which is no tensor", text(model="  dim a = 4\n  w : a\n  ⟦alias t = u\n"), "x(2)", {}),
    ("E136", "`w` is in groups `p` and `q`", text(model="  dim a = 4\n  w : a\n  group p = w\n  ⟦group q = w\n"), "x(2)", {}),
    (
        "E136",
        "`w` is in the group `p` and `u` is not, and `both` stores them together",
        text(
            model="  dim a = 4\n  w, u : a\n  state s : f32\n  group p = w\n",
            layout=FILE + '  ⟧both = (w: a + u: a) as "both"\n  ⟦state s for p = flat(each) as "s"\n',
        ).replace("ucpl 1", "ucpl 2"),
        "x(2)",
        {"remedy": "put u in `p`, too, or name `both` in a group of the layout"},
    ),
    ("E137", "no tensor is called `u`", text(layout=FILE + '  ⟦u = a as "u"\n'), "x(2)", {}),
    ("E137", "no tensor is called `u`", text(layout=W + "  ⟦group g = w, u\n"), "x(2)", {}),
    ("E190", "`buckets` closes flat buffers", text(layout=FILE + '  w = a b as "w" ⟦buckets 5\n'), "x(2)", {}),
    ("E190", "`buckets` closes flat buffers", text(layout=W + '  state * = like as "{key}.s" ⟦buckets 5\n'), "x(2)", {}),
    ("E190", "`as` is a storing clause, and this line stores `none`", text(layout=W + '  state * = none ⟦as "x"\n'), "x(2)", {}),
    ("E190", "`mean` is a storing clause", text(layout=FILE + '  w = none ⟦mean @dp\n'), "x(2)", {}),
    ("E140", "mesh axis `dp` is 0", text(mesh="  ⟧mesh dp\n", layout=W), "x(0)", {}),
    ("E141", "a mesh of 262,145 ranks, and 262,144 are the limit", text(mesh="  ⟦mesh dp\n", layout=W), "x(262145)", {}),
    ("E142", "mesh `other` has 3 ranks, the first mesh 2", text(mesh="  let q = 3\n  ⟧mesh dp\n  ⟦mesh other: q\n", layout=W), "x(2)", {}),
    ("E143", "sizes of digits hi, lo are unknown", text(layout="  ⟦index a = (hi lo)\n" + W), "x(2)", {}),
    ("E144", "the digits of `a` multiply to 6, and a is 4", text(layout="  dim hi = 2, lo = 3\n  ⟦index a = (hi lo)\n" + W), "x(2)", {}),
    ("E145", "pad to a multiple of 0", text(layout=FILE + '  w = ⟦pad(a, 0) b as "w"\n'), "x(2)", {}),
    ("E145", "a grain of 0", text(layout=FILE + '  w = a⟦@chunk(dp, 0) b as "w"\n'), "x(2)", {}),
    ("E145", "order dealt 0", text(layout=W + "  ⟦group g = w order dealt 0\n"), "x(2)", {}),
    ("E145", "order dealt 65537", text(layout=W + "  ⟦group g = w order dealt 65537\n"), "x(2)", {}),
    ("E145", "pad to a multiple of 4611686018427387904", text(layout=FILE + '  w = ⟦pad(a, 4611686018427387904) b as "w"\n'), "x(2)", {}),
    ("E145", "a grain of 4611686018427387904", text(layout=FILE + '  w = a⟦@chunk(dp, 4611686018427387904) b as "w"\n'), "x(2)", {}),
    ("E106", "padded as it is", text(layout=FILE + '  ⟦w = pad(a, 1099511627776) pad(b, 1099511627776) as "w"\n'), "x(2)", {}),
    ("E146", "trim the full tensor before it is cut", text(layout=FILE + '  w = ⟦trim(a@dp) b as "w"\n'), "x(2)", {}),
    ("E147", "stand for the dims of one tensor", text(layout=W + "  index a = ⟦_\n"), "x(2)", {}),
    ("E148", "`@q` cuts over a mesh axis that there is not", text(layout=FILE + '  w = a⟦@q b as "w"\n'), "x(2)", {}),
    ("E149", "at dp[2], but dp is 2", text(layout=FILE + '  w = a b ⟦at dp[2] as "w"\n'), "x(2)", {}),
    ("E149", "at dp[-3], but dp is 2", text(layout=FILE + '  w = a b ⟦at dp[-3] as "w"\n'), "x(2)", {}),
    (
        "E149", "at dp[0] and at dp[1], and no rank is both",
        text(layout=FILE + '  w = a b ⟦at dp[0] at dp[-1] as "w"\n'), "x(2)", {},
    ),
    ("E148", "at a, which is no mesh axis", text(layout=FILE + '  w = a b ⟦at a[0] as "w"\n'), "x(2)", {}),
    ("E151", "no file is called `wieghts`", text(layout=FILE + '  w = a b ⟦in wieghts as "w"\n'), "x(2)", {}),
    ("E152", "is no a * x + b", text(layout=FILE + '  w = a b ⟦value x * x as "w"\n'), "x(2)", {}),
    ("E153", "scales by 2", text(layout=FILE + '  w = a b ⟦value 2 * x as "w"\n'), "x(2)", {}),
    ("E155", "`v` has no more dims for `_`", text(layout=FILE + '  ⟦* = _ _ as "{name}"\n', model=MODEL + "  ⟧v : a\n"), "x(2)", {}),
    ("E156", "names 1 of the 2 dims of `w`", text(layout=FILE + '  ⟦* = _ as "{name}"\n', model=MODEL + "  ⟧w : a b\n"), "x(2)", {}),
    ("E157", "no group is called `g`", text(layout=W + '  ⟦state * of g = flat(each) as "s"\n'), "x(2)", {}),
    ("E157", "no group is called `g`", text(layout=W + "  ⟦group h = all - g\n"), "x(2)", {}),
    ("E158", "a state line stores one axis", text(layout=W + '  ⟦state * = flat(each) a as "s"\n'), "x(2)", {}),
    ("E158", "no dims by name", text(layout=W + '  state * = flat((each ⟦a)) as "s"\n'), "x(2)", {}),
    ("E158", "stores flat(each)", text(layout=W + '  ⟦state * = flat(flat(each)) as "s"\n'), "x(2)", {}),
    ("E158", "no dims by name", text(layout=W + '  state * = ⟦a as "s"\n'), "x(2)", {}),
    ("E158", "stores flat(each)", text(layout=W + '  ⟦state * = each as "s"\n'), "x(2)", {}),
    ("E158", "`each` means tensors of a group", text(layout=FILE + '  w = ⟦each b as "w"\n'), "x(2)", {}),
    ("E158", "`flat(...)` means tensors of a group", text(layout=FILE + '  w[⟦flat(a)] = b as "w"\n'), "x(2)", {}),
    ("E158", "`each` means tensors of a group", text(layout=W + "  index a = ⟦each\n"), "x(2)", {}),
    ("E158", "a flat has no key in its file", text(layout=W + "  ⟦state * = flat(each)\n"), "x(2)", {}),
    ("E159", "settings of a framework have names", text(layout=W + "  framework deepspeed(⟦1)\n"), "x(2)", {}),
    ("E160", "dp = 3 does not divide 4", text(layout=W + '  ⟦assert a % dp == 0, "dp = {dp} does not divide {a}"\n'), "x(3)", {}),
    ("E160", "`a % dp == 0` does not hold", text(layout=W + "  ⟦assert a % dp == 0\n"), "x(3)", {}),
    ("E161", "2..9 is no range of `a`, which is 4", text(layout=FILE + '  w = (a[..2] + ⟦a[2..9]) b as "w"\n'), "x(2)", {}),
    ("E162", "terms of a sum take different dims of `w`", text(layout=FILE + '  ⟦* = (_ _ + _) ... as "{name}"\n', model=MODEL + "  ⟧w : a b\n"), "x(2)", {}),
    ("E164", "`name` of \"w.{name:02}\" is 'w'", text(layout=FILE + '  w = a b ⟦as "w.{name:02}"\n'), "x(2)", {}),
    ("E165", "`m` uses itself: m -> m", text(model="  dim a = 4\n  w : a\n  ⟦use m() as q\n"), "x(2)", {}),
    ("E165", "`n` uses itself: n -> m2 -> n", text(model="  dim a = 4\n  w : a\n  use n() as q\n", layout=W) + "model n {\n  use m2() as q\n}\nmodel m2 {\n  ⟦use n() as q\n}\n", "x(2)", {}),
    ("E165", "`m2` uses itself: n -> m2 -> m2", text(model="  dim a = 4\n  w : a\n  use n() as q\n", layout=W) + "model n {\n  use m2() as q\n}\nmodel m2 {\n  ⟦use m2() as q\n}\n", "x(2)", {}),
    ("E167", "the digits of `a` lead back to `a`: a -> b -> a", text(model="  dim a = 2, b = 2, c = 1\n  ⟦index a = (b c)\n  index b = (a c)\n  w : a\n"), "x(2)", {}),
    ("E168", "all entries together are 1200000 tensors", text(model="  dim a = 600000, b = 3\n  w : a b\n  v : a\n", layout=FILE + '  w[a] = b as "w.{a}"\n  ⟦v[a] = () as "v.{a}"\n'), "x(2)", {}),
    ("E169", "no dim is called `bq`: `w` has a b", text(layout=FILE + '  w[a] = ⟦bq as "w.{a}"\n', model=MODEL + "  ⟧w : a b\n"), "x(2)", {"remedy": "did you mean `b`?"}),
    ("E169", "no dim is called `qqq`: `w` and `v` have a b", text(layout=FILE + '  wv = (w: ⟦qqq + v: b) a as "wv"\n', model=MODEL + "  ⟧w : a b\n  v : a b\n"), "x(2)", {"remedy": "a dim without a name is written `_`"}),
    ("E169", "no dim is called `colls`: `w` has rows cols", text(layout=FILE + '  w[⟦colls] = rows as "w"\n', model="  dim rows = 2, cols = 3\n  ⟧w : rows cols\n"), "x(2)", {"remedy": "did you mean `cols`?"}),
    ("E169", "no dim is called `zzz`: `w` has a b", text(layout=FILE + '  w[a] = ⟦zzz as "w.{a}"\n', model=MODEL + "  ⟧w : a b\n"), "x(2)", {"remedy": "did you mean `b`?"}),
    ("E169", "no dim is called `n`: `w` has none", text(layout=FILE + '  w = ⟦n ... as "w"\n', model="  w : 3\n"), "x(2)", {"remedy": "a dim without a name is written `_`"}),
    ("E169", "no dim is called `bb`", text(layout=FILE + '  w = a ⟦bb as "w"\n'), "x(2)", {}),
    ("E169", "no dim is called `qqq`", text(layout=FILE + '  * = ⟦qqq ... as "{name}"\n'), "x(2)", {}),
    ("E105", "`config.none` has no value: there is no config", text(model="  dim a = 4, b = ⟦config.none\n  dtype f32\n  w : a\n", layout=FILE + '  w = a b as "w"\n'), "x(2)", {}),
    ("E201", "`w` is cut over `q`, which is in no mesh", text(layout=FILE + '  let q = 2\n  ⟦w = a@q b as "w"\n'), "x(2)", {}),
    ("E201", "a state line is cut over `q`", text(layout=W + '  let q = 2\n  ⟦state * = pad(flat(each), 2)@q as "s"\n'), "x(2)", {}),
    ("E168", "`w` is stored 5000000 times", text(model="  dim a = 5000000\n  dtype f32\n  w : a\n", layout=FILE + '  ⟦w[a] = () as "w.{a}"\n'), "x(2)", {}),
    ("E203", "index `a` of `w`: 4 does not divide by dp = 3", text(layout=FILE + '  index a = a@dp\n  ⟦w[a] = b as "w.{a}"\n'), "x(3)", {}),
    ("E204", "`w`: 4 does not divide by dp = 3", text(layout=FILE + '  ⟦w = a@dp b as "w"\n'), "x(3)", {}),
    ("E204", "4 is not a whole number of units of 3", text(layout=FILE + '  ⟦w = a@spread(dp, 3) b as "w"\n'), "x(2)", {"remedy": "pad it to complete units, pad(n, 3)@spread(dp, 3), or let the last piece be short: @chunk(dp, 3)"}),
    ("E204", "2 sizes that add up to 3 do not cut 4", text(layout=FILE + '  ⟦w = a@dp[1, 2] b as "w"\n'), "x(2)", {"remedy": "give one size for each coordinate, which add up to the dim: @dp[2, 2]"}),
    ("E204", "a flat buffer: 15 does not divide by dp = 2", text(layout=W + '  group g = w, v\n  ⟦state s of g = flat(each)@dp as "s"\n', model=MODEL + "  w : a b\n  v : b\n  state s : f32\n").replace("v = a as", "v = b as"), "x(2)", {}),
    ("E205", "`w` has the dims a b, the pattern names a", text(layout=FILE + '  ⟦w = a as "w"\n', model=MODEL + "  ⟧w : a b\n"), "x(2)", {}),
    ("E205", "the pattern names a b b", text(layout=FILE + '  ⟦w = a b b as "w"\n', model=MODEL + "  ⟧w : a b\n"), "x(2)", {}),
    ("E205", "`w`: lo of the index a = (hi lo) is in the brackets, and hi in the pattern", text(model="  dim a = 4, hi = 2, lo = 2\n  dtype f32\n  index a = (hi lo)\n  ⟧w : a\n", layout=FILE + '  ⟦w[lo] = hi as "w.{lo}"\n'), "x(2)", {"remedy": "make the digits dims of the model, `w : hi lo`"}),
    ("E205", "`w`: x, z of the index a = (x y z) is in the brackets, and y in the pattern", text(model="  dim a = 8, x = 2, y = 2, z = 2, b = 3\n  dtype f32\n  index a = (x y z)\n  ⟧w : a b\n", layout=FILE + '  ⟦w[x, z] = y b as "w.{x}.{z}"\n'), "x(2)", {"remedy": "`w : x y z b`"}),
    ("E207", "have different ranges of `a`", text(model=MODEL + "  w : a b\n  v : a[1..] b\n", layout=FILE + '  ⟦wv = (w: a b + v: a b) as "wv"\n'), "x(2)", {}),
    ("E208", "has no label, and other parts have", text(model=MODEL + "  w : a b\n", layout=FILE + '  ⟦wv = (w: a + a) b as "wv"\n'), "x(2)", {}),
    ("E209", "has only a range of `a`", text(model="  dim a = 4, hi = 2, lo = 2\n  dtype f32\n  index a = (hi lo)\n  ⟧w : a[1..]\n", layout=FILE + '  ⟦w = (lo hi) as "w"\n'), "x(2)", {}),
    ("E210", "buckets 0", text(layout=W + '  ⟦state * = flat(each) buckets 0 as "s"\n'), "x(2)", {}),
    ("E211", "group `g` is stated by a checkpoint", text(layout=W + '  ⟦group g = from weights "k"\n  state * of g = flat(each) as "s"\n'), "x(2)", {}),
    ("E213", "rank 2 of 2", text(layout=W), "x(2)", {}),
    ("E215", "two tensors, or two pieces of one, have one place: w of f.0", text(layout=FILE + '  ⟧w = a b as "w"\n  ⟦v = a as "w"\n'), "x(2)", {}),
    ("E154", "how copies are put together: `mean` and `sum`", text(layout='  let tp = 2\n  file weights = torch "{dp}{tp}"\n  w = a b ⟦mean @tp ⟧sum @dp as "w"\n', mesh="  mesh dp tp\n"), "x(2)", {}),
    ("E217", "`w` has two values in one flat buffer", text(layout=FILE + '  ⟧w = a b value x - 1 as "w"\n  ⟦state weight = flat(each) value x - 2 as "s"\n'), "x(2)", {}),
    ("E218", "`w` is on mesh `q`, and there is none of that name", text(layout=FILE + '  ⟦w = a b on q as "w"\n'), "x(2)", {}),
    ("E219", "`w` is on mesh `other` and is cut over `dp`, an axis of the mesh `dp`", text(layout=OTHER + '  ⟦w = a@dp b on other as "w"\n'), "x(2)", {"remedy": "mesh other has p, q: take one"}),
    ("E219", "`w` is on mesh `other` and is cut over `dp`", text(layout=OTHER + '  ⟦w = a@dp b on other as "w"\n'), "x(1)", {}),
    ("E219", "`w` is on mesh `other` and is dealt over `dp`", text(layout=OTHER + '  index a = a@dp\n  ⟦w[a] = b on other as "w{a}"\n'), "x(2)", {}),
    ("E219", "`w` is on mesh `other` and uses a coordinate of `dp`", text(layout=OTHER + '  ⟦w = a b on other at dp[0] as "w"\n'), "x(2)", {}),
    ("E219", "`w` is on mesh `other` and says `mean` of `dp`", text(layout=OTHER + '  ⟦w = a b mean @dp on other as "w"\n'), "x(2)", {}),
    ("E219", "`w` is on mesh `other` and says `any` of `dp`", text(layout=OTHER + '  ⟦w = a b any @dp on other as "w"\n'), "x(2)", {}),
    ("E219", "`w` is on mesh `other` and names in its key `dp`", text(layout=OTHER + '  ⟦w = a b on other as "w{dp}"\n'), "x(2)", {}),
    ("E219", "a state line is on mesh `other` and is cut over `dp`", text(layout=OTHER + '  w = a b as "w"\n  ⟦state * = pad(flat(each), dp)@dp on other as "s"\n'), "x(2)", {}),
    ("E219", "a state line is on mesh `other` and uses", text(layout=OTHER + '  w = a b as "w"\n  ⟦state * = like on other at dp[0] as "s"\n'), "x(2)", {}),
    ("E218", "a state line is on mesh `q`", text(layout=OTHER + '  w = a b as "w"\n  ⟦state * = like on q as "s"\n'), "x(2)", {}),
    ("E219", "`w` is cut over `tp` on mesh `other`, where other ranks have its coordinates than on the mesh `dp tp`", text(layout='  mesh other: tp dp\n' + FILE + '  ⟦w = a@tp b on other as "w{tp}"\n', mesh="  mesh dp tp\n  let tp = 2\n"), "x(2)", {"remedy": "let other_tp = tp"}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("code", "message", "body", "call", "more"), REFUSED, ids=[f"{c}-{n}" for n, (c, *_) in enumerate(REFUSED)]
)
def test_refused(code: str, message: str, body: str, call: str, more: dict[str, Any]) -> None:
    if code == "E213":
        with pytest.raises(UcplError) as caught:
            locate(resolve(load(("refused.ucpl", body)), parse_call(call)), rank=2)
        assert (caught.value.diagnostics[0].code, caught.value.diagnostics[0].message) == (code, message)
        return
    check(code, message, body, call, **more)


def layouts(first: str, second: str, model: str = MODEL + "  w : a b\n  v : a\n  state s : f32\n") -> str:
    return f"ucpl 1\nmodel m {{\n{model}}}\nlayout x(dp) of m {{\n  mesh dp\n{first}}}\nlayout y(dp) of m {{\n  mesh dp\n{second}}}\n"


BOTH = layouts(W, W)
JOINED: list[tuple[str, str, str, dict[str, Any]]] = [
    ("E300", "--drop q: no tensor or state", BOTH, {"drop": ("q",)}),
    ("E303", "the target stores s of `w` and 1 more, and the source has none", layouts(W, W + '  state * = like as "{key}.{state}"\n'), {}),
    ("E305", "no dtype is known for weight of `w`", layouts(W, W, "  dim a = 4, b = 3\n  w : a b\n  v : a\n"), {}),
    ("E306", "weight of `w` would lose: f32 in the source, bf16 in the target", layouts(W, FILE + '  ⟧w = a b dtype bf16 as "w"\n  v = a as "v"\n'), {}),
    ("E308", "6 elements of weight of `w` are nowhere in the source, the first w[a=2, b=0]", layouts(FILE + '  w = a@dp b at dp[0] as "w"\n  v = a as "v"\n', W), {}),
    ("E309", "6 elements of weight of `w` are nowhere in the target, the first w[a=0, b=0]", layouts(W, FILE + '  w = a@dp b at dp[-1] as "w"\n  v = a as "v"\n'), {}),
    ("E310", "weight of v has no place in the target", layouts(W, FILE + '  w = a b as "w"\n'), {}),
    ("E310", "s of w has no place in the target", layouts(W + '  state * = like as "{key}.{state}"\n', W), {}),
    ("E304", "w[a=2, b=0] has two places", layouts(FILE + '  w = (a[..3]@chunk(dp) + a[2..]@chunk(dp)) b as "w.{dp}"\n  v = a as "v"\n', W), {}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("code", "message", "body", "more"), JOINED, ids=[f"{c}-{n}" for n, (c, *_) in enumerate(JOINED)]
)
def test_refused_where_two_layouts_meet(code: str, message: str, body: str, more: dict[str, Any]) -> None:
    check(code, message, body, "x(2)", target="y(2)", **more)


def test_models_that_differ_are_refused_with_both_places() -> None:
    one = 'ucpl 1\nmodel m {\n  dim a = 4, b = 3\n  dtype f32\n  w : a b\n}\nlayout x() of m {\n  file weights = torch "f"\n  w = a b as "w"\n}\n'
    for other, code, message in (
        (one.replace("a = 4", "a = 5"), "E302", "`w` is [a=4, b=3] in the source and [a=5, b=3] in the target"),
        (
            one.replace("  w : a b\n", "  w : a b\n  u : a\n"),
            "E301",
            "the target stores `u`, which the source's model lacks",
        ),
    ):
        source, target = (
            locate(resolve(load((n, t)), parse_call("x()"))) for n, t in (("one.ucpl", one), ("two.ucpl", other))
        )
        with pytest.raises(UcplError) as caught:
            build(source, target)
        found = caught.value.diagnostics[0]
        assert (found.code, found.message) == (code, message)
        lines = [(label.file, label.line, label.column) for label in found.labels]
        assert lines == ([("one.ucpl", 5, 3), ("two.ucpl", 5, 3)] if code == "E302" else [("two.ucpl", 6, 3)])


def test_imports_in_a_circle(tmp_path: Path) -> None:
    (tmp_path / "a.ucpl").write_text('ucpl 1\nfrom "b.ucpl" import n\nmodel m {\n  w : 1\n}\n')
    (tmp_path / "b.ucpl").write_text('ucpl 1\nfrom "a.ucpl" import m\nmodel n {\n  w : 1\n}\n')
    with pytest.raises(UcplError) as caught:
        load((str(tmp_path / "a.ucpl"), (tmp_path / "a.ucpl").read_text()), read=text_at)
    found = caught.value.diagnostics[0]
    assert found.code == "E111" and "b.ucpl" in found.labels[0].file and found.labels[0].line == 2


def test_what_the_checkpoint_states_otherwise() -> None:
    body = text(layout=W + '  group g = from weights "k"\n  state * of g = flat(each) as "s"\n')
    for flat, message in (
        ([("u", (4,))], "states `u` in a flat buffer"),
        ([("v", (5,))], "`v`: the checkpoint says [5], the layout [4]"),
    ):
        with pytest.raises(UcplError) as caught:
            locate(resolve(load(("f.ucpl", body)), parse_call("x(1)")), stated=lambda *_, flat=flat: [flat])
        assert caught.value.diagnostics[0].code == "E212" and message in caught.value.diagnostics[0].message


def test_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["ucpl.layout.models"], "TENSOR_LIMIT", 1)
    check("E131", "a model of more than 1 tensors", text(model="  dim a = 4\n  w : a\n  ⟦v : a\n"), "x(2)")
    monkeypatch.undo()
    monkeypatch.setattr(sys.modules["ucpl.placement.entries"], "PIECE_LIMIT", 3)
    pairs = "  dim a = 8, hi = 4, lo = 2\n  dtype f32\n  index a = (hi lo)\n  w : a\n"
    check("E206", "falls into more than 3 boxes", text(model=pairs, layout=FILE + '  ⟦w = (lo hi) as "w"\n'), "x(2)")
    monkeypatch.undo()
    monkeypatch.setattr(sys.modules["ucpl.placement.entry_parts"], "HOME_LIMIT", 3)
    check("E214", "`w` is stored in more than 3 tensors", text(layout=FILE + '  ⟦w[a] = b as "w.{a}"\n'), "x(2)")
    monkeypatch.undo()
    monkeypatch.setattr(sys.modules["ucpl.placement.entries"], "CHOICE_LIMIT", 10)
    check(
        "E202",
        "has more than 10 choices of its indices",
        text(layout=FILE + '  ⟦w[a, b] = () as "w.{a}.{b}"\n'),
        "x(2)",
    )


def test_uses_that_multiply() -> None:
    """Each model uses the one before twice.

    Thirty of them would be a thousand million statements.
    """
    models = ["model m0 {\n  dim a = 2\n  w : a\n}\n"]
    models += [f"model m{i} {{\n  use m{i - 1}() as x\n  use m{i - 1}() as y\n}}\n" for i in range(1, 31)]
    body = "ucpl 1\n" + "".join(models) + "layout x() of m30 {\n}\n"
    with pytest.raises(UcplError) as caught:
        resolve(load(("f.ucpl", body)), parse_call("x()"))
    assert caught.value.diagnostics[0].code == "E166"


def test_every_code_of_these_rooms_is_provoked_here() -> None:
    here = Path(__file__).read_text(encoding="utf-8")
    rooms = [
        c for c in catalogue() if ("E100" <= c < "E170" and c != "E163") or "E200" <= c < "E220" or "E300" <= c < "E311"
    ]
    assert [c for c in rooms if f'"{c}"' not in here] == []
