"""`check` at degrees above one.

These mistakes show only in cut layouts.
"""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path

import pytest

from tests.cli.command import FIXTURES, ROOT, good, ucpl
from ucpl.conversion.checking import Checked, check
from ucpl.conversion.degrees import TOGETHER, combinations
from ucpl.conversion.requests import Given
from ucpl.language import parse_call
from ucpl.layout import load, resolve
from ucpl.layout.scope import Value
from ucpl.placement import locate

SPEC = """ucpl 2

model tiny {
  dim r = 6, c = 4, l = 2
  w    : r c dtype f32
  b    : r
  ln   : l c
  state m : f32
}

layout x(tp, pp = 1) of tiny {
  mesh pp tp
  index l = l@pp
  file weights = torch "{pp}_{tp}.pt"
  w     = r@tp c  as "w"
  b     = r       as "b"
  ln[l] = c       as "ln.{l}"
  state * = none
}
"""


@pytest.fixture
def spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path / "x.ucpl"


def checked(spec: Path, *edit: str, call: str = "") -> Checked:
    text = SPEC
    for before, after in zip(edit[::2], edit[1::2], strict=True):
        assert before in text
        text = text.replace(before, after)
    spec.write_text(text)
    return check(f"x.ucpl{call}", Given())


def test_each_axis_is_tried_alone_and_all_together(spec: Path) -> None:
    found = checked(spec)
    assert (found.findings, found.remarks) == ((), ())
    assert found.tried == ("x holds at tp = 2; pp = 2; tp = 2, pp = 2",)
    assert checked(spec, "r = 6", "r = 9").tried == ("x holds at tp = 3; pp = 2; tp = 3, pp = 2",)


def test_a_degree_that_none_suits_is_reported_with_what_does_not_divide(spec: Path) -> None:
    found = checked(spec, "r = 6", "r = 11")
    assert found.tried == ("x holds at pp = 2",) and not found.findings
    (remark,) = found.remarks
    assert remark.startswith("no tp from 2 to 8 suits x: at tp = 2, pp = 1, `w`: 11 does not divide by tp = 2.")
    assert not checked(spec, "r = 6", "r = 11", call=":x(tp = 11)").findings
    assert checked(spec, "r = 6", "r = 11", call=":x(tp = 3)").findings[0].code == "E204"


def test_a_degree_that_axes_are_made_of_is_tried(spec: Path) -> None:
    found = checked(spec, "  mesh pp tp\n", "  let t = tp\n  mesh pp t\n", "r@tp c", "r@t c", "{tp}", "{t}")
    assert found.tried == ("x holds at tp = 2; pp = 2; tp = 2, pp = 2",)


WIDE = ("dim r = 6,", "dim r = wide,", "model tiny")


@pytest.mark.parametrize(
    ("edit", "sizes", "code", "places"),
    [
        (("pp = 1)", "pp = 0)"), {}, "E140", ((11, ""), (12, "needed here"))),
        (("pp = 1)", 'pp = "2")'), {}, "E104", ((11, ""), (12, "needed here"))),
        ((*WIDE, "let wide = 6\nmodel tiny"), {"wide": -4}, "E132", ((None, ""), (6, "needed here"))),
        ((*WIDE, "let wide = 6\nmodel tiny"), {"wide": "2.5"}, "E104", ((None, ""), (6, "needed here"))),
        ((*WIDE, 'let wide = "six"\nmodel tiny'), {}, "E104", ((3, ""), (6, "needed here"))),
        (("none\n}", "none\n}\nplan go = x(tp = 1) -> x(tp = 0)"), {}, "E140", ((20, ""), (12, "needed here"))),
        (("none\n}", "none\n}\nplan go = x(tp = 1) -> xx(tp = 2)"), {}, "E110", ((20, ""),)),
    ],
)  # fmt: skip
def test_a_value_is_blamed_where_it_is_written(
    edit: tuple[str, ...], sizes: dict[str, Value], code: str, places: tuple[tuple[int | None, str], ...], spec: Path
) -> None:
    text = SPEC
    for before, after in zip(edit[::2], edit[1::2], strict=True):
        text = text.replace(before, after)
    spec.write_text(text)
    (found,) = check("x.ucpl", Given(sizes=sizes)).findings
    assert (found.code, tuple((label.line, label.text) for label in found.labels)) == (code, places)
    assert not sizes or found.labels[0].where == f"-D wide={sizes['wide']}"


def test_more_axes_than_a_mesh_has_ranks_for_are_tried_alone(spec: Path) -> None:
    names = [f"a{n}" for n in range(30)]
    defaults = "".join(f", {name} = 1" for name in names)
    found = checked(spec, "pp = 1", f"pp = 1{defaults}", "mesh pp tp", f"mesh pp tp {' '.join(names)}")
    assert [text.partition("all of its 32 axes above 1: ")[2] for text in found.remarks] == [
        "a mesh of 4,294,967,296 ranks, and 262,144 are the limit"
    ]


def test_combinations_come_with_few_ones_and_small_first() -> None:
    axes = ("a", "b", "c")
    every = sorted(product(TOGETHER, repeat=3), key=lambda c: (c.count(1), sum(c)))
    assert [tuple(c.values()) for c in combinations(axes, {"a": 3})] == [(3, 2, 2), *every]


@pytest.mark.parametrize(
    ("before", "after", "line"),
    [
        ("w     = r@tp c", "w     = (r[..2] + r[2..8]) c", 15),
        ("w     = r@tp c", "w     = r@tp[5, -1] c", 15),
        ("w     = r@tp c", "w     = r@tp[5, 4] c", 15),
        ("w     = r@tp c", "w     = r@chunk(tp, 0) c", 15),
        ("w     = r@tp c", "w     = r@spread(tp, 4) c", 15),
        ("w     = r@tp c", "w     = pad(r, 0)@tp c", 15),
        ("w     = r@tp c", "w     = pad(r, -8)@tp c", 15),
        ("dim r = 6", "dim r = 9 / 2", 4),
        ("dim r = 6", "let n = 3\n  dim r = 1 - n", 5),
        ("dim r = 6", 'dim r = "6"', 4),
        ("  mesh pp tp", "  assert 4 == 5\n  mesh pp tp", 12),
    ],
)
def test_what_the_text_itself_says_wrong_is_no_matter_of_the_degrees(
    before: str, after: str, line: int, spec: Path
) -> None:
    found = checked(spec, before, after)
    assert [d.labels[0].line for d in found.findings] == [line], found
    assert not any("not checked further" in one for one in found.remarks)


@pytest.mark.parametrize(
    "edits",
    [
        ("  mesh pp tp", "  assert tp > 64\n  mesh pp tp"),
        ("w     = r@tp c", "w     = pad(r, tp - 1)@tp c"),
        ("w     = r@tp c", "let n = tp - 1, k = n\n  w     = pad(r, k)@tp c"),
        ('r@tp c  as "w"', 'pad(r, 0)@tp c  as "w"  when tp < 16'),
        ("w     = r@tp c", "w     = r@tp@spread(pp, 4) c"),
        ("w     = r@tp c", "w     = r@tp[1, 1, 1, 3] c"),
        ("model tiny {", "model tiny(wide) {", "r = 6", "r = wide", "w     = r@tp c", "w     = r@spread(tp, 4) c"),
        ("model tiny {", "model tiny(wide) {", "r = 6", "r = wide", "w     = r@tp c", "w     = _@spread(tp, 4) c"),
        ("model tiny {", "model tiny(wide = 6) {", "r = 6", "r = wide", "of tiny {", "of tiny(wide = tp) {", "w     = r@tp c",
         "w     = r@spread(tp, 4) c"),
    ],
)  # fmt: skip
def test_what_another_degree_may_suit_stays_a_remark(edits: tuple[str, ...], spec: Path) -> None:
    found = checked(spec, *edits)
    assert not found.findings
    assert found.tried or any("x is not checked further: at " in one for one in found.remarks), found


def test_axes_that_suit_only_together_are_found(spec: Path) -> None:
    found = checked(spec, "  mesh pp tp\n", "  mesh pp tp\n  assert tp == 1 or pp == 3\n", "l = 2", "l = 3")
    assert found.tried == ("x holds at pp = 3; tp = 2, pp = 3",) and not found.remarks


MISTAKES = {
    "no mesh": (("  mesh pp tp\n", ""), "E201", "`tp`, which is in no mesh"),
    "a file without its rank": (("{pp}_{tp}.pt", "{pp}.pt"), "E215", "w of 0.pt"),
    "a file without its stage": (("{pp}_{tp}.pt", "{tp}.pt", "ln.{l}", "ln.{l.local}"), "E215", "ln.0 of 0.pt"),
    "half of a cut tensor": (("r@tp c ", "r@tp c at tp[0] "), "E313", "12 of 24 elements of weight of `w`"),
    "a dtype of torch": (("dtype f32\n", "dtype float32\n"), "E023", "`float32`"),
    "a state's dtype": (("state m : f32", "state m : fp32"), "E023", "`fp32`"),
    "an entry's dtype": (("r@tp c  as", "r@tp c dtype bfloat16 as"), "E023", "`bfloat16`"),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_that_shows_at_two_ranks_is_found(name: str, spec: Path) -> None:
    edit, code, said = MISTAKES[name]
    (found,) = checked(spec, *edit).findings
    assert (found.code, said in found.message) == (code, True), found


def test_the_degrees_of_a_finding_are_reported(spec: Path) -> None:
    (found,) = checked(spec, *MISTAKES["a file without its stage"][0]).findings
    assert found.notes[-1] == "at tp = 1, pp = 2"
    remedy = checked(spec, "r@tp c  as", "r@tp c dtype bfloat16 as").findings[0].remedy
    assert remedy is not None and remedy.endswith('write: w     = r@tp c dtype bf16 as "w"')


def test_what_no_entry_stores_is_reported_unless_none_is_written(spec: Path) -> None:
    (remark,) = checked(spec, '  b     = r       as "b"\n', "").remarks
    assert remark == "x stores nothing of `b`: no entry speaks of it. If that is meant, write `b = none`"
    assert checked(spec, 'b     = r       as "b"', "b = none").remarks == ()
    (remark,) = checked(
        spec,
        "state m : f32",
        "state m, n : f32",
        "state * = none",
        'state m = like as "{key}.m"',
    ).remarks
    assert remark == "x stores no `n`. If that is meant, write `state n = none`"


def test_a_number_that_is_in_names_alone_is_no_mesh(spec: Path) -> None:
    found = checked(spec, "  mesh pp tp\n", "  mesh pp\n", "r@tp c", "r c")
    assert found.remarks == ("tp of x is in no mesh, and nothing is cut by it: ranks need `mesh tp`",)


def test_a_parameter_of_a_mesh_that_the_base_has_is_no_remark(spec: Path) -> None:
    """A repeated `mesh tp` would be a remark, too."""
    more = "  state * = none\n}\n\nlayout y(tp, pp = 1) of tiny extends x(pp = pp) {\n  framework torch()\n}\n"
    found = checked(
        spec,
        "layout x(tp, pp = 1) of tiny {\n",
        "layout x(pp = 1) of tiny {\n  let tp = 1\n",
        "  state * = none\n}\n",
        more,
    )
    assert found.remarks == ()
    assert found.tried[-1] == "y holds at tp = 2; pp = 2; tp = 2, pp = 2"


@pytest.mark.parametrize("d", ["h / n", "default(config.head_dim, h / (n * 2))"])
def test_drawn_sizes_satisfy_the_divisions_of_the_text(d: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Independent draws of four widths and heads seldom divide."""
    monkeypatch.chdir(tmp_path)
    uses = "".join(f"  use tower() as {t}\n" for t in "abce")
    entries = "".join(f'  {t}.w = ({t}.n@tp {t}.d) {t}.h  as "{t}"\n' for t in "abce")
    (tmp_path / "x.ucpl").write_text(
        "ucpl 2\n\nmodel tower {\n  dim h = config.hidden_size, n = config.num_attention_heads\n"
        f"  dim d = {d}\n  w : n d h\n}}\n\nmodel m {{\n{uses}}}\n\nlayout x(tp) of m {{\n  mesh tp\n"
        f'  file weights = torch "{{tp}}.pt"\n{entries}}}\n'
    )
    found = check("x.ucpl", Given())
    assert found.findings == () and found.tried[0].startswith("x holds at tp = 2")
    assert good("roundtrip", "x.ucpl:x").out.startswith("x: 2")


def test_the_verb_says_all_of_it(spec: Path) -> None:
    checked(spec, '  b     = r       as "b"\n', "")
    done = good("check", "x.ucpl")
    assert done.out.splitlines()[0] == "x.ucpl: x holds at tp = 2; pp = 2; tp = 2, pp = 2"
    assert done.out.splitlines()[-1] == "x.ucpl: good, 1 remark; 1 model, 1 layout"
    assert good("check", "x.ucpl", "--json").json["tried"] == ["x.ucpl: x holds at tp = 2; pp = 2; tp = 2, pp = 2"]
    assert good("check", "x.ucpl:x(tp = 2)").out.splitlines()[-1] == "x.ucpl: good, 1 remark; 1 layout"
    assert ucpl("check", "x.ucpl:y(tp = 2)").status == 2


PACKED = """ucpl 1

model tiny {
  dim l = 3, r = 2, c = 4
  dtype f32
  q : l r c
  k : l r c
  o : l r c
}

layout each() of tiny {
  file weights = torch "a.pt"
  q[l] = r c  as "q.{l}"
  k[l] = r c  as "k.{l}"
  o[l] = r c  as "o.{l}"
}

layout packed() of tiny extends each() {
  qk[l] = (q: r + k: r) c  as "qk.{l}"
  k     = none
}
"""


def test_what_an_extension_and_its_base_both_store_is_a_remark(spec: Path) -> None:
    """Never a fault: of `check`, and of `plan` for either side."""
    spec.write_text(PACKED)
    text = (
        "packed stores `q` twice: line 19 of x.ucpl does, and line 13 of x.ucpl of the layout that it extends."
        " If one is meant, write `q = none`"
    )
    found = check("x.ucpl", Given())
    assert (found.findings, found.remarks[:-1]) == ((), (text,)) and "q and k in qk" in found.remarks[-1]
    for source, target in (("packed()", "each()"), ("each()", "packed()")):
        assert f"remark     {text}\n" in good("plan", "--from", f"x.ucpl:{source}", "--to", f"x.ucpl:{target}").out
    assert "remark" not in good("plan", "--from", "x.ucpl:each()", "--to", "x.ucpl:each()").out


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("  k     = none", "  k     = none\n  q     = none"),
        ("  k     = none", '  k     = none\n  q[l[..1]] = r c as "q.{l}"'),  # its own line, and meant
        ("extends each()", "extends half()"),
        ('  qk[l] = (q: r + k: r) c  as "qk.{l}"', '  q[l] = c r  as "q.{l}"'),
    ],
)
def test_what_is_stored_once_or_by_one_layout_is_none(spec: Path, before: str, after: str) -> None:
    """`half` stores q of the first layer, the packed line the others."""
    half = PACKED[PACKED.index("layout each") : PACKED.index("layout packed")]
    half = half.replace("each", "half").replace("  q[l] = r c", "  q[l[..1]] = r c")
    text = PACKED.replace(before, after) + half
    if "half" in after:
        text = text.replace("qk[l] =", "qk[l[1..]] =")
    spec.write_text(text)
    assert not any("twice" in remark for remark in check("x.ucpl:packed()", Given()).remarks)


STACKS = """ucpl 1

model stack(rows) {
  dim r = rows, c = 2
  w : r c dtype f32
}
model both {
  use stack(rows = 4) as one
  use stack(rows = 6) as two
}
layout cut(tp, word = 7) of stack {
  mesh tp
  file weights = torch "{tp}.pt"
  w = r@tp c  as "w{word}"
}
layout ranks(tp, pp = 2) of both {
  mesh pp tp
  file weights = torch "{pp}_{tp}.pt"
  use cut(tp = tp)           as one  key "one.{key}"
  use cut(tp = tp, word = 8) as two  key "two.{key}"
}
"""


def test_a_mesh_of_what_is_used_is_a_part_of_the_one_that_is_here(spec: Path) -> None:
    """A layout of an open model is checked without its sizes."""
    spec.write_text(STACKS)
    found = check("x.ucpl", Given())
    assert (found.findings, found.remarks) == ((), ())
    assert found.tried == ("ranks holds at tp = 2, pp = 2",)


def test_a_layout_without_files_is_a_part_of_those_that_use_it_and_is_in_theirs(spec: Path) -> None:
    part = STACKS.replace('  mesh tp\n  file weights = torch "{tp}.pt"\n', "  mesh tp\n")
    spec.write_text(part)
    found = check("x.ucpl", Given())
    assert (found.findings, found.remarks) == ((), ())
    layout = resolve(load(("x.ucpl", part)), parse_call("ranks(tp = 2)"))
    assert {home.file for p in locate(layout).parts for home in p.homes} == {
        f"{p}_{t}.pt" for p in (0, 1) for t in (0, 1)
    }
    layout = resolve(load(("x.ucpl", STACKS)), parse_call("ranks(tp = 2)"))
    assert {home.file for p in locate(layout).parts for home in p.homes} == {"0.pt", "1.pt"}  # those that it has itself
    alone = part[: part.index("layout ranks")]
    spec.write_text(alone)
    assert [d.code for d in check("x.ucpl", Given()).findings] == ["E151"]


def fused(spec: Path, dims: str, pattern: str, more: str = "") -> tuple[str, ...]:
    """Remarks on q, k and v of these dims, fused so."""
    tensors = more + "".join(f"  {name} : l {dim}\n" for name, dim in zip("qkv", dims, strict=True))
    entry = f'  qkv[l] = ({pattern})  as "qkv.{{l}}"\n'
    return checked(
        spec, "  b    : r\n", f"  b    : r\n{tensors}", "  state * = none\n", f"{entry}  state * = none\n"
    ).remarks


def test_parts_of_one_size_side_by_side_are_a_remark(spec: Path) -> None:
    (remark,) = fused(spec, "ccr", "q: c + k: c + v: r")
    assert remark.startswith("of one size and side by side: q and k in qkv. Swapped, they pass every check:")
    (remark,) = fused(spec, "ccc", "q: c + k: c + v: c")
    assert "q, k and v in qkv" in remark
    (remark,) = fused(spec, "crc", "q: c + k: r + v: c")
    assert "q and v in qkv" in remark
    (remark,) = fused(spec, "www", "q: w + k: w + v: w", "  dim w[l] = [2, 3]\n")  # layers of one size are no line each
    assert remark.startswith("of one size and side by side: q, k and v in qkv. Swapped")


@pytest.mark.parametrize(
    "name", ["z0_dp2_bf16", "z2_dp2_roundrobin", "z3_dp2_subgroup", "autoep_ep2_dp4_z3", "pp2_dp2_z1_functions"]
)
def test_of_a_text_that_infer_writes_nothing_is_remarked(spec: Path, name: str) -> None:
    spec.write_text(good("infer", FIXTURES / name).out)
    found = check("x.ucpl", Given())
    assert (found.findings, found.remarks) == ((), ())


OF_DCP = """ucpl 1
model m {
  w : 6 4 dtype f32
  b : 6 dtype f32
  group a = w
  group z = b
}
layout here(fsdp) of m {
  framework dcp(fsdp = fsdp, prefix = "model.", states = "optim.state.")
  mesh fsdp
  file weights = dcp ".metadata"
  w = _@chunk(fsdp) _  as "model.w"
  b = _@chunk(fsdp)    as "model.b"
}
plan grow = here(fsdp = 1) -> here(fsdp = 2)
  drop extra
"""


def test_groups_and_what_a_caller_saved_are_not_advised_away(spec: Path) -> None:
    """DCP's files have groups, and may have keys that no model says.

    Neither is for `check` to take out.
    """
    spec.write_text(OF_DCP)
    found = check(str(spec), Given())
    assert not found.findings, found.findings
    assert not any("`group" in text for text in found.remarks), found.remarks
    assert any("drops `extra`" in text and "client_state" in text for text in found.remarks)


HALVES = """ucpl 1
model m {
  dim n = 16
  dtype f32
  w : n
}
layout x(tp) of m {
  framework torch()
  mesh tp
  file weights = safetensors "t{tp}.safetensors"
  w = n@tp as "w{TEXT}"
}
"""


def test_a_name_that_no_degree_above_one_gives_is_an_error(spec: Path) -> None:
    """Coordinate 1 exists at every degree above 1.

    1 / 2 leaves a remainder.
    """
    spec.write_text(HALVES.replace("TEXT", "tp / 2"))
    (finding,) = check("x.ucpl", Given()).findings
    assert (finding.code, finding.message) == ("E108", "1 / 2 leaves a remainder of 1")
    assert finding.notes == ("at tp = 2",) and "floor(a, b) rounds down" in finding.remedy
    spec.write_text(HALVES.replace("TEXT", "tp / (16 / size(tp))"))
    found = check("x.ucpl", Given())
    assert not found.findings and any("no tp from 2 to 8 suits x" in r for r in found.remarks), "tp = 16 suits it"


@pytest.mark.parametrize("said", ["tp // 2", "1 + tp//2", "(tp + 1) // 2", "size(tp) // 2"])
def test_the_line_that_is_offered_for_a_division_that_rounds_down_holds(said: str, spec: Path) -> None:
    spec.write_text(HALVES.replace("{TEXT}", ".{tp}.{TEXT}").replace("TEXT", said))
    (finding,) = check("x.ucpl", Given()).findings
    offered = finding.remedy.partition("write: ")[2]
    assert finding.code == "E001" and "floor(" in offered
    spec.write_text(HALVES.replace('"w{TEXT}"', offered))
    assert not check("x.ucpl", Given()).findings


PARTS = """ucpl 1
model m {
  dim g = 2, d = 3
  dtype f32
  k : g d
}
layout x(tp) of m {
  framework torch()
  mesh tp
  file weights = torch "{tp}.pt"
  SHAPE
}
"""


@pytest.mark.parametrize(
    "shape", ['k = (g + g) d as "k"', 'k = (g@tp (k: d + k: d)) as "k"', 'k = ((g d) + (g d)) as "k"']
)
def test_what_no_plan_takes_is_no_good_layout(shape: str, spec: Path) -> None:
    """`plan` refuses the layout as either side.

    A part is in a stored tensor once.
    """
    spec.write_text(PARTS.replace("SHAPE", shape))
    codes = [d.code for d in check("x.ucpl", Given()).findings]
    assert "E304" in codes and codes[-1] == "E304"


@pytest.mark.parametrize(
    "shape", ['k = (g d) as "k"', 'k = (g@tp d) as "k"', 'k = g d mean @tp as "k"', 'k = g d sum @tp as "k"']
)
def test_copies_and_members_that_are_declared_are_good(shape: str, spec: Path) -> None:
    spec.write_text(PARTS.replace("SHAPE", shape))
    assert not check("x.ucpl", Given()).findings


OF_A_CONFIG = """ucpl 1

model m {{
  dim g = config.heads, d = config.size
  k : g d
}}

layout one() of m {{
  file weights = torch "a.pt"
  k = (g d) as "k"
}}

layout two(tp) of m {{
  mesh tp
  file weights = torch "{{tp}}.pt"
  kk = (g@tp ({parts})) as "k"
}}
"""


def test_a_fault_of_the_text_is_found_without_a_config(tmp_path: Path) -> None:
    """Sizes are drawn.

    Copies inside one tensor have no plan at any size.
    """
    path = tmp_path / "x.ucpl"
    path.write_text(OF_A_CONFIG.format(parts="k: d + k: d"))
    found = check(str(path), Given())
    assert [d.code for d in found.findings] == ["E304"]
    assert "at drawn sizes: g = " in found.findings[0].notes[-1]
    path.write_text(OF_A_CONFIG.format(parts="k: d"))
    found = check(str(path), Given())
    assert not found.findings and not found.unchecked
    assert found.tried[0].startswith("two holds at tp = 2, if g = ")
    assert found.remarks[0].endswith("there is no config: sizes are drawn. Give --config to check at yours")
    assert check(str(path), Given(config={"heads": 4, "size": 3})).tried == ("two holds at tp = 2",)


def test_a_fault_at_some_drawn_sizes_is_no_fault_of_the_text(tmp_path: Path) -> None:
    """Blocks of scales and halves of bytes have their own edges.

    Small sizes need not meet them; an assert wants one size.
    """
    cut = OF_A_CONFIG.format(parts="k: d").replace("kk = (g@tp (k: d))", "k = g d@tp")
    scaled = cut.replace(
        "k : g d", "k : g d dtype f8_e4m3fn\n  let b = ceil(d, 128)\n  dim n = b\n  s : g n is scale of k by 128"
    )
    halves = cut.replace("k : g d", "k : g d dtype f4_e2m1fn").replace("d = config.size", "d = config.size + 1")
    asserted = cut.replace("  mesh tp\n", '  mesh tp\n  assert g == 1001, "g"\n')
    for text in (scaled, halves, asserted):
        path = tmp_path / "x.ucpl"
        path.write_text(text)
        found = check(str(path), Given())
        assert not found.findings
        sentence = " ".join(found.remarks)
        assert ("two is not checked, no drawn sizes suit it (" in sentence) == (text is asserted)
        assert ("two" in found.unchecked) == (text is asserted)
        assert ("no tp from 2 to 8 suits two: " in sentence) == (text is scaled), "of an f4 some sizes are even"


def test_a_list_that_a_config_has_is_drawn(tmp_path: Path) -> None:
    path = tmp_path / "x.ucpl"
    text = OF_A_CONFIG.format(parts="k: d").replace("k : g d", "let some = where(config.kinds, 1)\n  k : g[some] d")
    path.write_text(text)
    found = check(str(path), Given())
    assert (found.findings, found.unchecked) == ((), ())


def test_an_index_of_an_open_dim_is_dealt_at_a_drawn_size(tmp_path: Path) -> None:
    """As the same text without the line `index g` is.

    The name may be misspelt, so a remark has it.
    """
    path = tmp_path / "x.ucpl"
    text = OF_A_CONFIG.format(parts="k: d").replace("  dim g = config.heads, d = config.size\n", "")
    for line in ("  index g = g@tp\n", ""):
        path.write_text(
            text.replace("  mesh tp\n", "  mesh tp\n" + line)
            .replace("g@tp (", "(g " if line else "g@tp (")
            .replace("(g k: d))", "g (k: d))")
        )
        found = check(str(path), Given())
        assert not found.findings and not found.unchecked
        (said,) = [text for text in found.remarks if "sizes are drawn" in text]
        assert said.startswith("`g`, `d` of m have no size") and "-D g=..." in said and "its shapes give them" in said


OPEN = """ucpl 1
model m {
  w : v d
  MORE
}
layout a(tp = 1) of m {
  framework torch()
  mesh tp
  file weights = torch "{tp}.pt"
  w = LINE as "w"
}
"""


@pytest.mark.parametrize("line", ["v@tp d", "d v@chunk(tp)", "(d v)@tp", "pad(d, 4) v@tp"])
def test_dims_without_a_size_are_drawn(line: str, spec: Path) -> None:
    spec.write_text(OPEN.replace("LINE", line).replace("MORE", ""))
    found = check("x.ucpl", Given())
    assert not found.findings and not found.unchecked
    assert found.tried[0].startswith("a holds at tp = 2, if v = ")
    assert "`v`, `d` of m have no size: sizes are drawn. Give it a size" in found.remarks[0]
    padded = [text for text in found.remarks if "a as a source needs -D d=..." in text]
    assert bool(padded) == ("pad" in line), "the begin of padding is unknown"


@pytest.mark.parametrize(
    ("line", "more", "code"),
    [
        ("v@tp", "", "E205"),
        ("v@tp e", "", "E169"),
        ("d v@tp", "", "E215"),
        ("v@tp d[..2]", "", "E313"),
        ("v@tp d", "b : v frozen", "E101"),
    ],
)
def test_faults_at_any_size_are_found_at_drawn_ones(line: str, more: str, code: str, spec: Path) -> None:
    text = OPEN.replace("LINE", line).replace("MORE", more)
    spec.write_text(text.replace('"{tp}.pt"', '"0.pt"') if code == "E215" else text)
    assert [d.code for d in check("x.ucpl", Given()).findings] == [code]


def test_digits_in_a_circle_are_a_fault_without_a_config(spec: Path) -> None:
    """No config could make sense of them."""
    text = (ROOT / "specs/decoder.ucpl").read_text()
    assert text.count("index l = l@pp") == 1
    spec.write_text(text.replace("index l = l@pp", "index l = (l pp)"))
    assert {d.code for d in check("x.ucpl", Given()).findings} == {"E167"}


def test_models_alone_and_plans_have_drawn_sizes_too(spec: Path) -> None:
    spec.write_text("ucpl 1\nmodel m {\n  w : v d\n  dim e = 2 * d\n  x : e\n}\n")
    found = check("x.ucpl", Given())
    assert not found.findings and not found.unchecked and len(found.remarks) == 1
    text = OPEN.replace("LINE", "v@tp d").replace("MORE", "")
    spec.write_text(text + "plan p = a(tp = 2) -> a()\n")
    assert not check("x.ucpl", Given()).findings
    spec.write_text(text + "plan p = a(tp = 2) -> a() drop u\n")
    assert [d.code for d in check("x.ucpl", Given()).findings] == ["E300"]


def test_the_sizes_of_a_list_determine_an_open_dim(spec: Path) -> None:
    text = OPEN.replace("LINE", "v d").replace("MORE", "dim f = [2, 4, 2] by l\n  up : l f\n  x : n")
    spec.write_text(text.replace('"w"', '"w" at tp[0]\n  up[l] = f@tp as "{l}"\n  x = n@tp[3, 4] as "x"'))
    found = check("x.ucpl:a(tp = 2)", Given(sizes={"v": 1, "d": 1, "l": 3, "n": 7}))
    assert not found.findings
    found = check("x.ucpl", Given())
    assert not found.findings and "l`, `n` of m have no size" in found.remarks[0]
    assert not any("as a source needs" in text for text in found.remarks)


def test_a_plan_that_needs_a_config_is_not_checked(tmp_path: Path) -> None:
    path = tmp_path / "x.ucpl"
    path.write_text(OF_A_CONFIG.format(parts="k: d") + "\nplan p = one() -> two(tp = 2)\n")
    assert check(str(path), Given()).unchecked == ("plan p",)
    assert not check(str(path), Given(config={"heads": 4, "size": 3})).unchecked


@pytest.mark.parametrize("path", sorted((Path(__file__).parents[2] / "specs").glob("*.ucpl")), ids=lambda p: p.stem)
def test_a_spec_that_ships_is_good_without_a_config(path: Path) -> None:
    assert check(str(path), Given()).findings == ()


def test_a_word_of_a_config_s_list_that_nothing_asks_for(spec: Path) -> None:
    text = """ucpl 1
let full = where(config.kinds, "attention")
model m {
  dim l = 3, h = 2
  w : l[full] h
  b : l[not full] h
}
layout x() of m {
  file weights = torch "a.pt"
  w[l] = h as "{l}.w"
  b[l] = h as "{l}.b"
}
"""
    spec.write_text(text)
    (said,) = check("x.ucpl", Given(config={"kinds": ["linear", "full_attention", "linear"]})).remarks
    assert said == (
        '`where(config.kinds, "attention")` (line 2): "attention" is not in config.kinds, which has linear, full_attention.'
        ' Write `where(config.kinds, "full_attention")`'
    )
    spec.write_text(text.replace("not full", 'where(config.kinds, "linear")'))
    assert not check("x.ucpl", Given(config={"kinds": ["linear"] * 3})).remarks, "another config has the others"


OWNERS = """ucpl 1
model m {
  dim t = 4, h = 2
  w : t h
}
layout x(pp, owner) of m {
  mesh pp
  file weights = torch "{pp}.pt"
  w[t[..1]] = h as "w.{t}" at pp[0]
  w[t[where(owner, 0)]] = h as "w.{t}" at pp[0]
  w[t[where(owner, 1)]] = h as "NAME" at pp[1] when pp > 1
}
"""


def test_a_list_without_a_default_is_drawn_so_that_the_layout_holds(spec: Path) -> None:
    """No owner has tensor 0, which is stored; the others need one."""
    spec.write_text(OWNERS.replace("NAME", "w.{t}"))
    found = check("x.ucpl", Given())
    assert not found.findings and not found.unchecked
    assert re.fullmatch(r"x holds at pp = 2, owner = \[[19]?[0-9]*(, [01]){3}\]", found.tried[0])


def test_a_fault_at_every_list_is_the_text_s(spec: Path) -> None:
    spec.write_text(OWNERS.replace('as "NAME"', 'h as "w.{t}"'))
    assert [d.code for d in check("x.ucpl", Given()).findings] == ["E205"]


def test_members_of_a_bucket_that_do_not_divide_are_no_internal_error(spec: Path) -> None:
    spec.write_text(
        """ucpl 1
model m {
  dtype f32
  dim r = 3
  a : r
  state s : f32
}
layout x(dp = 2) of m {
  mesh dp
  file weights = torch "{dp}.pt"
  a = r as "a"
  state * = flat(each@dp) buckets 1 as "{state}{bucket}"
}
"""
    )
    (found,) = check("x.ucpl", Given()).findings
    assert found.code == "E204" and "3 does not divide by dp = 2" in found.message


def test_a_cut_with_a_remainder_in_a_line_without_a_key_is_refused(tmp_path: Path) -> None:
    """A plan states the cuts of all lines."""
    spec = tmp_path / "x.ucpl"
    spec.write_text(SPEC.replace('w     = r@tp c  as "w"', "w     = r@tp c"))
    assert [one.code for one in check(f"{spec}:x(tp = 4)", Given()).findings] == ["E204"]
    assert check(f"{spec}:x(tp = 2)", Given()).findings == ()


LISTS = """ucpl 2
let linear = where(config.layer_types, "linear_attention")
model m {
  let kinds = config.layer_types, part = config.text_config
  dim l = config.num_hidden_layers, h = config.hidden_size, f[l] = config.intermediate_size
  ln  : l h
  att : l[where(kinds, "full_attention")] h
  lin : l[linear] h
  on  : l[where(part.flags)] h
  up  : l f h
}
layout x(tp) of m {
  mesh tp
  file weights = torch "{tp}.pt"
  ln[l], att[l], lin[l], on[l] = h@tp  as "{l}.{name}"
  up[l] = f@tp h  as "{l}.up"
}
"""


def test_lists_of_an_absent_config_are_drawn(tmp_path: Path) -> None:
    spec = tmp_path / "x.ucpl"
    spec.write_text(LISTS)
    found = check(str(spec), Given())
    assert (found.findings, found.unchecked) == ((), ()) and found.tried[0].startswith("x holds at tp = 2, if l = ")
    assert "linear = " not in found.tried[0] and "kinds = " not in found.tried[0]
    spec.write_text(LISTS.replace("f@tp h", "f@tpp h"))
    assert check(str(spec), Given()).unchecked == ("x",), "a fault may be that of a drawn list, and nothing is proved"
    spec.write_text(LISTS.replace('"linear_attention"', '"ful_attention"'))
    (remark,) = (one for one in check(str(spec), Given()).noted if one.rule == "unknown-kind")
    assert '"full_attention"' in remark.text and '"ful_attention" (line' in remark.text


@pytest.mark.parametrize("name", ["gemma3n", "qwen3_next"])
def test_examples_with_lists_are_checked_without_a_config(name: str) -> None:
    found = check(str(Path(__file__).parents[2] / "examples" / "architectures" / f"{name}.ucpl"), Given())
    assert found.unchecked == () and any("tp = 2, pp = 2" in one for one in found.tried)
