"""A resolved layout: numbers and their sources, `extends`, and prefixes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest

from tests.layout.fuzzing import TRIAL
from ucpl.errors import UcplError
from ucpl.extents.train_state import is_of_default
from ucpl.language import nodes, parse, parse_call, print_file
from ucpl.layout import Layout, close, expand, load, resolve
from ucpl.layout.axes import dims_of
from ucpl.layout.expand import wildcards_of
from ucpl.layout.layout import Policy
from ucpl.layout.templates import PLACE_WORDS, render
from ucpl.placement import locate
from ucpl.texts import text_at

BASE = """ucpl 1
let unit = 2
model m {
  dim a = 4 * unit, b = default(config.width, 3)
  dtype bf16
  w : a b
  v : a dtype f32
  buf : b is buffer
  ice : b is frozen
  alias t = w
  state s, fp32 : f32
  state step : i64 scalar
  state late : f32 of tail
  group head = w
  group tail = v
  head_only : a when config.head
}
layout base(dp, pp = dp / 2) of m {
  mesh pp dp
  file weights = torch "f.{pp}.{dp}" key "module/{key}"
  file optim   = torch "o.{pp}.{dp}"
  w = a b as "w"
  v = a   as "v"
  * of buffer = ... as "{name}"
  * of frozen = ... as "{name}"
  group * = model
  state * of * = flat(each) as "{state}/{bucket}"
  blob rng @dp keep  in weights as "rng"
  blob lr  @dp first
  derive fp32 from weight when unit
}
layout derived(dp) of m extends base(dp, pp = 2) {
  let unit = 1
  v = none
  w = a@dp b as "w.{dp}"
  w = a b at pp[-1] as "again"
  file weights = torch "g.{dp}.{pp}"
  blob rng @dp drop
}
"""


def layout(call: str, text: str = BASE, **more: Any) -> Layout:
    return resolve(load(("base.ucpl", text)), parse_call(call), **more)


def test_sizes_come_from_lets_configs_and_the_command_line() -> None:
    assert layout("base(2)").sizes["a"] == 8
    assert layout("base(2)").tensors["w"].counts == (8, 3)
    assert layout("base(2)", config={"width": 5}).tensors["w"].counts == (8, 5)
    assert layout("base(2)", config={"width": 5}, define_sizes={"b": 7}).tensors["w"].counts == (8, 7)
    assert layout("base(2)", define_sizes={"unit": 3}).tensors["w"].counts == (12, 3)


def test_a_condition_decides_whether_a_tensor_is_there() -> None:
    assert "head_only" not in layout("base(2)").tensors
    assert "head_only" in layout("base(2)", config={"head": True}).tensors


def test_parameters_have_values_and_origins() -> None:
    found = layout("base(4)")
    assert [(m.axes, m.degrees) for m in found.meshes] == [(("pp", "dp"), (2, 4))]
    assert found.ranks == 8
    assert found.call == "base(dp = 4, pp = 2)"
    assert found.origins == (("dp", 4, "given"), ("pp", 2, "default of base.ucpl:18"))
    assert is_of_default(found.origins[1][2]) and not is_of_default(found.origins[0][2])
    inherited = layout("base()", inherited={"dp": (2, "ds_config of the source"), "pp": (1, "ds_config of the source")})
    assert inherited.origins == (("dp", 2, "ds_config of the source"), ("pp", 1, "ds_config of the source"))
    assert ("unit", 3, "-D") in layout("base(2)", define_sizes={"unit": 3}).origins


def test_a_call_wins_over_what_is_inherited() -> None:
    assert layout("base(dp = 4)", inherited={"dp": (2, "ds_config")}).sizes["dp"] == 4


def test_tensors_have_dtypes_kinds_and_second_names() -> None:
    found = layout("base(2)")
    assert {p: t.dtype for p, t in found.tensors.items()} == {"w": "bf16", "v": "f32", "buf": "bf16", "ice": "bf16"}
    assert [t.kind for t in found.tensors.values()] == ["parameter", "parameter", "buffer", "frozen"]
    assert found.aliases == {"t": "w"}
    assert found.model_groups == (("head", ("w",)), ("tail", ("v",)))


def test_extends_replaces_in_place_keeps_the_rest_and_none_takes_back() -> None:
    found = layout("derived(2)")
    assert [(e.path, e.storing.key.text if e.storing.key else None) for e in found.entries] == [
        ("w", "w.{dp}"), ("w", "again"), ("buf", "{name}"), ("ice", "{name}"),
    ]  # fmt: skip
    assert found.files["weights"].path is not None and found.files["weights"].path.text == "g.{dp}.{pp}"
    assert found.sizes["unit"] == 1
    assert found.entries[1].storing.at == (("pp", 1),)
    assert [(b.name, b.fate) for b in found.blobs] == [("rng", "drop"), ("lr", "first")]
    assert [m.degrees for m in found.meshes] == [(2, 2)]


def test_blobs_say_over_which_axes_and_where() -> None:
    rng, lr = layout("base(2)").blobs
    assert (rng.name, rng.mesh_axes, rng.fate, rng.file, rng.key.text) == (
        "rng",
        ("dp",),
        "keep",
        "weights",
        "rng",
    )
    assert (lr.fate, lr.file, lr.key.text) == ("first", "weights", "{name}")


def test_states_of_a_group_are_kept_for_that_group_alone() -> None:
    parts = locate(layout("base(2, 1)")).parts
    assert sorted((p.state, p.label) for p in parts if p.label.startswith("group")) == [
        ("late", "group tail"), ("s", "group head"), ("s", "group tail"),
    ]  # fmt: skip


def test_what_is_derived_is_stored_by_no_wildcard_line() -> None:
    found = layout("base(2)")
    assert [(d.state, d.source) for d in found.derived] == [("fp32", "weight")]
    assert "fp32" not in {p.state for p in locate(found).parts}
    assert layout("base(2)", define_sizes={"unit": 0}).derived == ()


def test_values_are_sums_and_dtypes_and_lossy_are_kept() -> None:
    text = BASE.replace('w = a b as "w"\n  v', 'w = a b value 3 + x - 1 dtype f16 lossy as "w"\n  v')
    storing = layout("base(2)", text).entries[0].storing
    assert (storing.value, storing.dtype, storing.lossy) == ((1.0, 2.0), "f16", True)


def test_a_value_is_the_parameter_s_own_and_not_its_moments() -> None:
    text = BASE.replace('w = a b as "w"\n  v', 'w = a b value x - 1 as "w"\n  v').replace(
        'state * of * = flat(each) as "{state}/{bucket}"', 'state s = like in optim as "{key}.{state}"'
    )
    parts = {(p.state, p.label): p.value for p in locate(layout("base(2)", text)).parts}
    assert parts["weight", "w"] == (1.0, -1.0)
    assert parts["s", "w"] == (1.0, 0.0)


def test_plans_are_found_by_name() -> None:
    library = load(("base.ucpl", BASE + "plan grow = base(2) -> derived(dp = 4) drop s, late\n"))
    plan = library.plan("grow").node
    assert isinstance(plan, nodes.Plan)
    assert (plan.source.name, plan.target.name, plan.drop) == ("base", "derived", ("s", "late"))
    with pytest.raises(UcplError, match="E110"):
        library.plan("grwo")


EXPRESSIONS = [
    ("7 - 2 * 3", 1), ("(7 - 2) * 3", 15), ("-4 + 9", 5), ("12 / 4", 3), ("13 % 5", 3), ("2 == 2", 1), ("2 == 3", 0),
    ("2 != 3", 1),
    ("2 != 2", 0), ("2 < 2", 0), ("2 <= 2", 1), ("3 > 2", 1), ("2 >= 3", 0), ("1 and 0", 0), ("2 and 3", 1), ("0 or 4", 1),
    ("not 4", 0), ("not 0", 1), ("min(4, 2, 3)", 2), ("max(4, 2)", 4), ("lcm(4, 6)", 12), ("gcd(4, 6)", 2), ("ceil(7, 2)", 4),
    ("size(a) + a.size", 16), ("default(config.none, 5)", 5), ("config.on", 1), ("config.deep.er", 9),
    ("default(config.on, 5)", 1),
]  # fmt: skip


@pytest.mark.parametrize(("text", "value"), EXPRESSIONS)
def test_expressions(text: str, value: int) -> None:
    """As the compiler has them, and as the oracle has them."""
    from tests.oracle import mean

    config = {"on": True, "deep": {"er": 9}}
    whole = BASE.replace("let unit = 2", f"let unit = 2, asked = {text}")
    assert layout("base(2)", whole, config=config).sizes["asked"] == value
    assert mean(whole, "base(2)", config=config).numbers.name("asked") == value


INSIDE = """ucpl 1
model vision {
  dim l = 2, h = 3
  dtype f32
  blocks : l[1..] h
  patch  : h
  state s : f32 of late
  group late = patch
}
layout laid(tp = 1, width = 2) of vision {
  mesh tp
  file weights = torch "v.{l}.{tp:02}.pt" key "in/{key}"
  blocks[l] = h@tp as "blocks.{l}.{l.local}.{size(tp)}.{size(h)}"
  patch = pad(h[..1], width) h[1..] in extra as "patch"
  file extra = torch "x.{tp}"
}
model both {
  use vision() as eye
  dim h = 4
  w : h eye.h
}
layout all(tp) of both {
  mesh tp
  file weights = torch "w.pt"
  use laid(tp = tp, width = 5) as eye key "tower.{key}"
  w = h eye.h as "w"
}
"""


def test_names_of_a_used_layout_stand_under_its_prefix() -> None:
    text = INSIDE.replace("patch = pad(h[..1], width) h[1..]", "patch = pad((h[..1] + h[1..]), width)")
    found = layout("all(3)", text)
    assert set(found.tensors) == {"eye.blocks", "eye.patch", "w"}
    assert found.tensors["w"].dims == ("h", "eye.h") and found.tensors["w"].counts == (4, 3)
    assert found.model_groups == (("eye.late", ("eye.patch",)),)
    assert found.states[0].groups == ("eye.late",)
    homes = {(h.file, "/".join(map(str, h.key)), h.shape) for p in locate(found).parts for h in p.homes}
    assert homes == {
        ("w.pt", "w", (4, 3)),
        *((f"v.1.{rank:02}.pt", "in/tower.blocks.1.1.3.3", (1,)) for rank in range(3)),
        *((f"x.{rank}", "tower.patch", (5,)) for rank in range(3)),
    }


@pytest.mark.parametrize(
    "call",
    ["zero0(dp = 2, bf16 = 1)", "zero1(dp = 3)", "zero2(dp = 2)", "zero3(dp = 2, sub_group_size = 9)", "plain()"],
)
def test_a_layout_of_any_model_written_out_means_the_same(call: str) -> None:
    """expand gives text that needs no other file; it is located alike."""
    from tests.laws.agreement import table
    from tests.laws.test_round_trip import ANY

    (model,) = parse(ANY, "any.ucpl").statements
    assert isinstance(model, nodes.Model)
    library = load()
    closed = expand(library, parse_call(call), model)
    text = print_file(nodes.File("closed.ucpl", 1, (model, closed)))
    straight = locate(resolve(library, parse_call(call), model=model))
    written = locate(resolve(load(("closed.ucpl", text), shipped=False), parse_call("stored")))
    assert table(written) == table(straight)


def test_a_wildcard_speaks_of_what_another_entry_names_too() -> None:
    """A wildcard also applies to tensors that another entry names.

    A replacing cut is reported with the wildcard's statements about the tensor and its second name.
    """
    text = (
        "ucpl 1\nmodel m {\n  dim a = 4\n  w : a\n  v : a\n  alias t = w\n}\nlayout x(tp) of any {\n  mesh tp\n"
        '  file weights = torch "f.{tp}"\n  * = _ ... as "all.{name}"\n  * of alias = _ ... as "{alias}"\n'
        '  w = _@tp as "own"\n  t = _@tp as "second"\n}\n'
    )
    library = load(("x.ucpl", text))
    model = library.model("m").node
    assert isinstance(model, nodes.Model)
    said = wildcards_of(library, parse_call("x(tp = 2)"), model)
    keys = {path: [str(c.args[0]) for e in lines for c in e.clauses if c.word == "as"] for path, lines in said.items()}
    assert {path: len(found) for path, found in keys.items()} == {"w": 1, "v": 1, "t": 1}


STACKED = """ucpl 1
model m {
  dim a = 4
  dtype f32
  w : a
  v : a
  ice : a is frozen
  buf : a is buffer
}
layout low(dp, alignment = 2, tag = 7) of m {
  mesh dp
  let own = 1, other = 5
  file weights = torch "f.{dp}"
  w = pad(a, alignment) as "w.{own}.{other}.{tag}"
  v = a as "v"
  v = a as "again"
  * of frozen = ... as "low/{name}"
  * of buffer = ... as "low/{name}"
}
layout high(dp, tag = 8) of m extends low(dp, tag = tag) {
  let own = 2
  v = a as "instead"
  * of frozen = ... as "high/{name}"
  * of parameter = ... as "never/{name}"
}
"""


def keys(found: Layout) -> dict[str, str]:
    return {e.path: render(e.storing.key, e.variables) for e in found.entries if e.storing.key is not None}


def test_a_statement_about_one_class_leaves_the_others_as_they_were() -> None:
    assert keys(layout("high(2)", STACKED)) == {"w": "w.2.5.8", "v": "instead", "ice": "high/ice", "buf": "low/buf"}
    assert keys(layout("low(2)", STACKED)) == {"w": "w.1.5.7", "v": "again", "ice": "low/ice", "buf": "low/buf"}
    assert keys(layout("high(2, 3)", STACKED))["w"] == "w.2.5.3"
    # Two homes in the base are one here, and all other entries keep their places.
    assert [e.path for e in layout("low(2)", STACKED).entries] == ["w", "v", "v", "ice", "buf"]
    assert [e.path for e in layout("high(2)", STACKED).entries] == ["w", "v", "ice", "buf"]


def test_only_the_layout_that_is_called_inherits() -> None:
    inherited = {"alignment": (8, "the source"), "tag": (9, "the source")}
    assert layout("high(2)", STACKED, inherited=inherited).sizes["alignment"] == 2
    assert layout("low(2)", STACKED, inherited=inherited).sizes["alignment"] == 8
    assert layout("low(2, 4)", STACKED, inherited=inherited).sizes["alignment"] == 4
    assert keys(layout("high(2)", STACKED, inherited=inherited))["w"] == "w.2.5.9"


def test_a_number_that_is_repeated_is_closed_once() -> None:
    library = load(("stacked.ucpl", STACKED.replace("ucpl 1", "ucpl 1\nlet own = 9, apart = 3")))
    straight = resolve(library, parse_call("high(2)"))
    text = print_file(close(library, parse_call("high(2)")))
    again = resolve(load(("closed.ucpl", text), shipped=False), parse_call("stored"))
    assert (again.sizes["own"], again.sizes["apart"], again.sizes["other"]) == (2, 3, 5)
    assert keys(again) == keys(straight) and again.tensors.keys() == straight.tensors.keys()


USED = """ucpl 1
model inner {
  dim a = 4
  dtype f32
  w : a
  state s : f32
}
layout low(dp) of inner {
  mesh dp
  mesh other: dp
  framework deepspeed(stage = 1)
  file weights = torch "low.{dp}"
  w = a@dp on other as "w"
  group * = model
  derive s from weight
}
model outer {
  use inner() as in
  z : 3 dtype f32
}
layout high(dp) of outer {
  mesh dp
  use low(dp) as in
  framework deepspeed(stage = 2)
  file weights = torch "high"
  z = _ as "z"
  group * = model
  derive s from weight
}
"""


# If a named mesh is used twice, each of the two uses names it.
TWICE = USED.replace("  use inner() as in\n", "  use inner() as in\n  use inner() as more\n").replace(
    "  use low(dp) as in\n", '  use low(dp) as in\n  use low(dp) as more key "more.{key}"\n'
)


@pytest.mark.parametrize(("call", "text"), [("high(2)", USED), ("low(2)", USED), ("high(2)", TWICE)])
def test_what_a_used_layout_says_again_is_closed_once(call: str, text: str) -> None:
    library = load(("used.ucpl", text))
    straight = resolve(library, parse_call(call))
    file = parse(print_file(close(library, parse_call(call))), "closed.ucpl")
    again = resolve(load(("closed.ucpl", print_file(file)), shipped=False), parse_call("stored"))
    assert (again.framework, again.settings) == (straight.framework, straight.settings)
    assert set(again.derived) == set(straight.derived)
    assert [(m.name, m.axes, m.degrees) for m in again.meshes] == [("", ("dp",), (2,)), ("other", ("dp",), (2,))]
    homes = [{(p.state, h.file, h.key, h.shape) for p in locate(x).parts for h in p.homes} for x in (again, straight)]
    assert homes[0] == homes[1]


def test_imports_are_found_next_to_the_file_and_among_the_shipped(tmp_path: Path) -> None:
    (tmp_path / "one.ucpl").write_text(BASE)
    imports = 'ucpl 1\nfrom "one.ucpl" import m, base\nfrom "deepspeed.ucpl" import zero1\n'
    text = imports + "layout mine(dp) of m extends base(dp, 1) {\n}\n"
    library = load((str(tmp_path / "two.ucpl"), text), read=text_at)
    assert resolve(library, parse_call("mine(2)")).sizes["a"] == 8
    assert isinstance(library.layout("zero1").node, nodes.Layout)


SHIPPED = ("zero1(dp = 2, round_robin = 0)", "zero3(dp = 2)", "universal()", "safetensors()", "plain()")


def leaves(value: object) -> Iterator[object]:
    """The leaves of a record."""
    kind: type = type(value)
    if attrs.has(kind):
        yield from (leaf for f in attrs.fields(kind) for leaf in leaves(getattr(value, f.name)))
    elif isinstance(value, tuple | list | frozenset):
        yield from (leaf for one in value for leaf in leaves(one))
    elif isinstance(value, dict):
        yield from (leaf for pair in value.items() for leaf in leaves(pair))
    else:
        yield value


@pytest.mark.parametrize("call", ["base(2)", "derived(2)", *SHIPPED])
def test_a_layout_is_data_and_prints(call: str) -> None:
    """Records hold numbers and names only.

    No template has a name in braces that needs a scope.
    """
    library = load(("base.ucpl", BASE))
    model = parse(TRIAL).statements[0]
    assert isinstance(model, nodes.Model)
    found = resolve(library, parse_call(call), model=model if call in SHIPPED else None)
    assert {type(leaf) for leaf in leaves(found)} <= {int, str, float, bool, type(None), range, Policy}
    assert repr(found).startswith("Layout(name=") and "Scope" not in repr(found)
    assert str(found).startswith(f"{found.call} of trial, ") or str(found).startswith(f"{found.call} of m")
    written = [t for rule in found.files.values() for t in (rule.path, rule.key) if t is not None]
    storings = [*(e.storing for e in found.entries), *(line.storing for line in found.state_lines)]
    written += [s.key for s in storings if s.key is not None]
    coordinates = {a for m in found.meshes for a in m.axes}
    for template in written:
        assert template.names <= coordinates | PLACE_WORDS | {t for e in found.entries for t in dims_of(*e.indices)}


NESTED = """ucpl 1
let outside = 1
model vision {
  dim h = 3
  dtype f32
  p : h
}
model both {
  use vision() as eye
  dim l = 2
  w : l
}
layout inner(tp = 1, n = 1) of vision {
  mesh tp
  file weights = torch "v{tp}.{n}"
  p = pad(h, n) as "p"
}
layout base(tp) of both {
  mesh tp
  let n = 2 * step, step = 2
  use inner(tp = tp, n = n) as eye
  w = l as "w"
  file weights = torch "w{tp}"
}
layout derived(tp) of both extends base(tp) {
  let step = 3
}
layout third(tp) of both extends derived(tp) {
  let step = 5
}
"""


@pytest.mark.parametrize(
    ("call", "file", "size"), [("base(1)", "v0.4", 4), ("derived(1)", "v0.6", 6), ("third(1)", "v0.10", 10)]
)
def test_the_arguments_of_use_know_what_the_layout_and_its_base_define(call: str, file: str, size: int) -> None:
    from tests.laws.agreement import check

    homes = {(h.file, h.shape) for p in locate(layout(call, NESTED)).parts for h in p.homes}
    assert (file, (size,)) in homes
    assert check(NESTED, call)


def test_ranks_are_shared_with_a_layout_that_is_used() -> None:
    with pytest.raises(UcplError) as caught:
        layout("base(2)", NESTED.replace("tp = tp, n = n", "tp = 4, n = n"))
    found = caught.value.diagnostics[0]
    assert (found.code, found.message) == ("E125", "`tp` is 2 here and 4 in `inner`, which is used here")
    assert found.labels[0].line == 21
    assert layout("base(4)", NESTED.replace("tp = tp, n = n", "tp = 4, n = n")).ranks == 4


WITHIN = """ucpl 1
model vision {
  dim h = 8
  dtype f32
  assert h == 8, "{h} is not eight"
  p : h
}
model eyes {
  use vision() as eye
}
model both {
  use eyes() as two
  dim l = 2
  dtype f32
  w : l
}
layout whole(tp = 1, n = 1, m = n + 1) of vision {
  mesh tp
  file weights = torch "v{tp}.{n}.{m}"
  p = h@tp as "p"
}
layout cut(tp = 1) of vision extends whole(tp = tp, n = 3) {
}
layout renamed(t = 1) of vision extends whole(tp = t) {
}
layout pair(n = 1) of eyes {
  use whole(n = n + 1) as eye
}
layout nested(n = 10) of both {
  use pair(n = 4) as two
  w = l as "w"
  file weights = torch "w{n}"
}
layout direct(tp = 1) of eyes {
  mesh tp
  use whole(tp = tp) as eye
}
"""


def _files_of(call: str, text: str = WITHIN) -> set[str]:
    from tests.laws.agreement import check

    assert check(text, call)
    return {h.file for p in locate(layout(call, text)).parts for h in p.homes}


def test_what_is_used_has_numbers_of_its_own() -> None:
    assert _files_of("nested()") == {"w10", "v0.5.6"}, "n is 4 for `pair`, whose argument n + 1 is 5"
    assert _files_of("direct(2)") == {"v0.1.2", "v1.1.2"}, "defaults rest on the parameters beside them"


def test_axes_that_what_is_used_leaves_open_are_as_they_are_here() -> None:
    text = WITHIN.replace("layout direct(tp = 1) of eyes {", "layout direct() of eyes {\n  let tp = 2")
    assert _files_of("direct()", text.replace("whole(tp = tp)", "whole()")) == {"v0.1.2", "v1.1.2"}


@pytest.mark.parametrize(
    ("used", "by"),
    [("whole(tp = 4)", "whole"), ("cut(tp = 4)", "cut"), ("renamed(t = 4)", "renamed"), ("renamed()", "renamed")],
)
def test_ranks_are_shared_whichever_base_has_the_mesh(used: str, by: str) -> None:
    with pytest.raises(UcplError) as caught:
        layout("direct(2)", WITHIN.replace("use whole(tp = tp)", f"use {used}"))
    found = caught.value.diagnostics[0]
    here = 1 if used == "renamed()" else 4
    assert (found.code, found.message) == ("E125", f"`tp` is 2 here and {here} in `{by}`, which is used here")
    assert [label.line for label in found.labels] == [36, 22 if by == "cut" else 17]
    assert _files_of("direct(4)", WITHIN.replace("use whole(tp = tp)", "use cut(tp = 4)")) == {
        f"v{tp}.3.4" for tp in range(4)
    }


def test_a_number_of_ranks_that_what_is_used_sets_itself() -> None:
    text = WITHIN.replace("layout whole(tp = 1, n = 1", "layout whole(n = 1").replace(
        "mesh tp\n  file", "mesh tp\n  let tp = 4\n  file"
    )
    text = text.replace("whole(tp = tp, n = 3)", "whole()").replace("whole(tp = t)", "whole()")
    text = text.replace("use whole(tp = tp)", "use whole()")
    assert _files_of("direct(4)", text) == {f"v{tp}.1.2" for tp in range(4)}
    with pytest.raises(UcplError) as caught:
        layout("direct(2)", text)
    assert caught.value.diagnostics[0].code == "E160"


def test_an_argument_that_what_is_used_lacks_is_asked_for() -> None:
    with pytest.raises(UcplError) as caught:
        layout("direct(2)", WITHIN.replace("n = 1, m = n + 1", "n, m = n + 1"))
    assert (caught.value.diagnostics[0].code, caught.value.diagnostics[0].labels[0].line) == ("E124", 17)


def test_what_an_assert_of_a_used_model_says_has_its_numbers() -> None:
    with pytest.raises(UcplError) as caught:
        layout("direct(2)", WITHIN.replace("dim h = 8", "dim h = 7"))
    assert (caught.value.diagnostics[0].code, caught.value.diagnostics[0].message) == ("E160", "7 is not eight")


def test_a_number_of_a_layouts_file_that_is_another_in_the_models() -> None:
    texts = {
        "model.ucpl": "ucpl 1\nlet n = 3\nmodel m {\n  dim h = n\n  dtype f32\n  w : h\n}\n",
        "lay.ucpl": 'ucpl 1\nfrom "model.ucpl" import m\nlet n = 8\n'
        'layout x() of m {\n  file weights = torch "v{n}"\n  w = h as "w"\n}\n',
    }

    def resolved(lay: str) -> Layout:
        return resolve(load(("lay.ucpl", lay), read=texts.get), parse_call("x()"))

    with pytest.raises(UcplError) as caught:
        resolved(texts["lay.ucpl"])
    found = caught.value.diagnostics[0]
    assert (found.code, found.message) == ("E125", "`n` is 8 in the layout's file and 3 for its model")
    assert [(label.file, label.line) for label in found.labels] == [("lay.ucpl", 3), ("model.ucpl", 2)]
    for same in ("let n = 3", "let n = 1 + 2"):
        assert resolved(texts["lay.ucpl"].replace("let n = 8", same)).tensors["w"].counts == (3,)
