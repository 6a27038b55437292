"""Models with arguments and bases: results of calls, replaced lines, refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.cli.command import good, ucpl
from ucpl.errors import UcplError
from ucpl.extents import key_text
from ucpl.graph import build
from ucpl.language import nodes, parse_call, print_file
from ucpl.layout import Layout, close, load, resolve
from ucpl.layout.statements import called_model
from ucpl.placement import locate

MODELS = """ucpl 1

model gpt(layers = 2, width = 4, tied = 0) {
  dim l = layers, h = width, v = 6
  dtype f32
  embed : v h
  attn  : l h
  head  : v h  when not tied
  alias head.tied = embed when tied
  bias  : h
  state fp32, m : f32
  group decay = embed, attn
}

model big(width = 8) extends gpt(layers = 4, width = width) {
  bias : none
  attn : l h dtype bf16
  gate : l
  state m : bf16
  group decay = none
}

model bare(size) {
  dim s = size
  w : s
}

"""
BODY = ' {\n  file weights = torch "a.pt"\n  * = ... as "{name}"\n}\n'


def laid(of: str, call: str = "x()", *, more: str = "", head: str = "x()", **given: Any) -> Layout:
    text = f"{MODELS}{more}layout {head} of {of}{BODY}"
    return resolve(load(("calls.ucpl", text)), parse_call(call), **given)


def shapes(layout: Layout) -> dict[str, tuple[int, ...]]:
    return {path: t.counts for path, t in layout.tensors.items()}


def refused(*args: Any, **more: Any) -> tuple[str, str, str]:
    with pytest.raises(UcplError) as caught:
        laid(*args, **more)
    found = caught.value.diagnostics[0]
    return found.code, found.message, found.remedy


def test_arguments_come_from_the_layout_its_parameters_and_defaults() -> None:
    assert shapes(laid("gpt"))["attn"] == (2, 4)
    assert shapes(laid("gpt(layers = 3)"))["attn"] == (3, 4)
    assert shapes(laid("gpt(5, width = 2 * 3)"))["attn"] == (5, 6)
    assert shapes(laid("gpt(layers = n, width = n + 1)", "x(7)", head="x(n)"))["attn"] == (7, 8)
    assert shapes(laid("gpt(layers = layers)", "x(7)", head="x(layers)"))["attn"] == (7, 4)
    assert laid("gpt(tied = 1)").aliases == {"head.tied": "embed"}
    assert laid("gpt(tied = 1)").model_call == "gpt(layers = 2, width = 4, tied = 1)"


def test_the_command_line_wins_over_arguments_and_gives_what_nobody_does() -> None:
    assert shapes(laid("gpt(layers = 3)", define_sizes={"layers": 5}))["attn"] == (5, 4)
    assert shapes(laid("gpt(layers = 3)", define_sizes={"l": 6}))["attn"] == (6, 4)
    assert shapes(laid("bare", define_sizes={"size": 9})) == {"w": (9,)}
    assert refused("bare") == (
        "E124", "`bare` needs a value for `size`", "write bare(size = ...), or give it with -D size=...",
    )  # fmt: skip


def test_a_base_is_kept_but_for_what_is_replaced_added_or_taken_back() -> None:
    found = laid("big")
    assert list(shapes(found).items()) == [("embed", (6, 8)), ("attn", (4, 8)), ("head", (6, 8)), ("gate", (4,))]
    assert {p: t.dtype for p, t in found.tensors.items()}["attn"] == "bf16"
    assert [(s.name, s.dtype) for s in found.states] == [("fp32", "f32"), ("m", "bf16")]
    assert found.model_groups == ()


def test_a_dim_of_the_derived_model_wins() -> None:
    more = "model wide extends gpt() {\n  dim h = 10\n  let layers = 3\n}\n\n"
    assert shapes(laid("wide", more=more))["attn"] == (3, 10)


def test_a_base_of_a_base_is_called_through_both() -> None:
    more = "model huge(w = 16) extends big(width = 2 * w) {\n  last : l h\n}\n\n"
    assert shapes(laid("huge(w = 5)", more=more))["last"] == (4, 10)


def test_a_model_inside_another_has_numbers_of_the_outer_one() -> None:
    more = "model large() extends big() {\n  state m : f32\n}\n\n"
    more += "model pair(n = 3) {\n  use gpt(layers = n, width = w) as a\n  dim w = 2 * n\n  use large() as b\n}\n\n"
    found = shapes(laid("pair(n = 4)", more=more))
    assert found["a.attn"] == (4, 8) and found["b.attn"] == (4, 8) and "b.bias" not in found and "a.bias" in found
    deeper = more + "model all {\n  use pair(n = 5) as p\n}\n\n"
    assert shapes(laid("all", more=deeper))["p.a.attn"] == (5, 10)


def test_what_two_models_say_of_dtype_and_states_is_of_each_or_of_both() -> None:
    """A default dtype applies to a model's own tensors.

    A state has one type, and the groups of all models that declare it.
    """
    one = "model one {\n  use bare(size = 2) as a\n  dtype i32\n  v : 3 dtype u8\n"
    one += "  group own = a.w\n  state m : f32 of own\n}\n\n"
    two = "model two {\n  use one() as x\n  use gpt() as y\n  use bare(size = 3) as z\n  dtype f16\n  use one() as x2\n}\n\n"
    found = laid("two", more=one + two)
    dtypes = {path: tensor.dtype for path, tensor in found.tensors.items()}
    assert dtypes == {
        "x.a.w": "i32", "x.v": "u8", "y.embed": "f32", "y.attn": "f32", "y.head": "f32", "y.bias": "f32", "z.w": "f16",
        "x2.a.w": "i32", "x2.v": "u8",
    }  # fmt: skip
    assert [(s.name, s.dtype, s.groups) for s in found.states] == [("m", "f32", None), ("fp32", "f32", None)]
    both = "model both {\n  use one() as x\n  use one() as y\n}\n\n"
    assert [s.groups for s in laid("both", more=one + both).states] == [("x.own", "y.own")]
    odd = "model odd {\n  use gpt() as a\n  use big() as b\n}\n\n"  # m is f32 in gpt and bf16 in big
    mixed = laid("odd", more=odd)
    assert {path: mixed.dtype_of(path, "m") for path in ("a.embed", "a.attn", "b.embed", "b.gate")} == {
        "a.embed": "f32", "a.attn": "f32", "b.embed": "bf16", "b.gate": "bf16",
    }  # fmt: skip
    scalar = odd.replace("model odd {", "model odd {\n  state m : f32 scalar")
    code, message, remedy = refused("odd", more=scalar)
    assert (code, message) == ("E008", "the state `m` is defined twice, differently") and "one form" in remedy


def test_a_model_alone_declares_each_state_once() -> None:
    """The form that `--model` gives.

    It is used in places that do not know the models inside it.
    """
    more = "model pair {\n  use gpt() as a\n  use gpt() as b\n}\n\n"
    model = called_model(load(("calls.ucpl", MODELS + more)), nodes.Call("pair"))
    names = [name for item in model.items if isinstance(item, nodes.State) for name in item.names]
    assert names == ["fp32", "m"] and not any(isinstance(item, nodes.Use) for item in model.items)


def test_states_of_what_a_derived_model_uses_are_united_with_those_of_its_base() -> None:
    """As in one body: a used model replaces nothing."""
    extra = "model extra(t = bf16) {\n  use bare(size = 2) as a\n  group g = a.w\n  state m : f32 of g\n}\n\n"
    more = extra + "model up extends gpt() {\n  use extra() as e\n}\n\n"
    assert [(s.name, s.groups) for s in laid("up", more=more.replace("(t = bf16)", "")).states] == [
        ("fp32", None),
        ("m", None),
    ]
    odd = more.replace("(t = bf16)", "").replace("m : f32 of g", "m : bf16 of g")
    of_both = laid("up", more=odd)
    assert (of_both.dtype_of("attn", "m"), of_both.dtype_of("e.a.w", "m")) == ("f32", "bf16")
    own = odd.replace("  use extra() as e\n", "  use extra() as e\n  state m : bf16\n")
    assert [(s.name, s.dtype) for s in laid("up", more=own).states] == [("fp32", "f32"), ("m", "bf16")]


@pytest.mark.parametrize("of", ["one", "two"])
def test_models_used_twice_written_out_are_the_same_layout(of: str) -> None:
    more = "model one {\n  use gpt() as a\n  use gpt(layers = 3) as b\n}\n\n"
    more += "model two {\n  use one() as x\n  use one() as y\n}\n\n"
    library = load(("calls.ucpl", f"{MODELS}{more}layout x() of {of}{BODY}"))
    straight = resolve(library, parse_call("x()"))
    again = resolve(load(("closed.ucpl", print_file(close(library, parse_call("x()"))))), parse_call("stored()"))
    assert again.tensors.keys() == straight.tensors.keys() and again.states == straight.states
    assert [t.dtype for t in again.tensors.values()] == [t.dtype for t in straight.tensors.values()] != []


def test_a_layout_written_out_is_the_same_layout() -> None:
    library = load(("calls.ucpl", f"{MODELS}layout x(n) of big(width = n){BODY}"))
    text = print_file(close(library, parse_call("x(3)")))
    again = resolve(load(("closed.ucpl", text)), parse_call("stored()"))
    assert shapes(again) == shapes(resolve(library, parse_call("x(3)")))


def test_a_layout_that_is_used_is_of_the_model_that_is_used() -> None:
    more = (
        "model two {\n  use gpt(layers = 3) as a\n}\n\n"
        'layout one(n = 3) of gpt(layers = n) {\n  file weights = torch "b.pt"\n  bias = h  as "b"\n}\n\n'
        'layout both(n) of two {\n  file weights = torch "a.pt"\n  use one(n = n) as a\n}\n\n'
    )
    library = load(("calls.ucpl", MODELS + more))
    assert resolve(library, parse_call("both(3)")).entries
    with pytest.raises(UcplError) as caught:
        resolve(library, parse_call("both(5)"))
    found = caught.value.diagnostics[0]
    assert (found.code, found.message) == ("E160", "`a.layers == a.n` does not hold")


def test_what_a_call_gets_wrong_is_refused() -> None:
    assert refused("gpt(layer = 3)")[::2] == ("E117", "did you mean `layers`?")
    assert refused("gpt(1, 2, 3, 4)")[0] == "E116"
    assert refused("gpt(1, layers = 2)")[0] == "E118"
    assert refused("gpt", "x(7)", head="x(layers)")[::2] == (
        "E125", "hand it on: of gpt(layers = layers), or give one of the two another name",
    )  # fmt: skip
    code, _, remedy = refused("pair", more="model pair {\n  use gpt(layer = 1) as b\n}\n\n")
    assert (code, remedy) == ("E117", "did you mean `layers`?")
    assert refused("up", more="model up(layers = 9) extends gpt(layers = 3) {\n}\n\n")[0] == "E125"
    assert refused("up", more="model up extends bare() {\n}\n\n")[0] == "E124"


@pytest.mark.parametrize("line", ["let h = 6", "dim h = 6", "let n = 3, h = 2 * n"])
def test_a_number_of_a_layout_is_no_second_meaning_of_one_of_its_model(line: str) -> None:
    """A second meaning would silently change the model.

    With the same value it changes nothing, and -D comes last.
    """
    text = f"{MODELS}layout x(l = 5) of gpt(layers = 5){BODY}layout y(l = 1) of gpt(layers = 5){BODY}"
    library = load(("calls.ucpl", text + f"layout z() of gpt(){BODY}".replace("{\n", f"{{\n  {line}\n")))
    assert resolve(library, parse_call("x()")).sizes["l"] == 5
    assert resolve(library, parse_call("z()"), define_sizes={"h": 6}).sizes["h"] == 6
    for call, said in (
        ("y()", "`l` is 5 in the model and 1"),
        ("y(3)", "`l` is 5 in the model and 3"),
        ("z()", "`h` is "),
    ):
        with pytest.raises(UcplError) as caught:
            resolve(library, parse_call(call))
        found = caught.value.diagnostics[0]
        assert (found.code, len(found.labels)) == ("E125", 2) and said in found.message, found


def test_circles_are_refused() -> None:
    assert refused("a", more="model a extends b() {\n}\nmodel b extends a() {\n}\n\n")[:2] == (
        "E119", "`a` extends itself: a -> b -> a",
    )  # fmt: skip
    assert refused("a", more="model a extends b() {\n}\nmodel b {\n  use a() as x\n}\n\n")[0] == "E165"


@pytest.mark.parametrize("line", ["haed : none", "alias haed = none", "state fp23 : none", "group dekay = none"])
def test_only_what_a_base_says_is_taken_back(line: str) -> None:
    code, _, remedy = refused("less", more=f"model less extends gpt() {{\n  {line}\n}}\n\n")
    assert code == "E139" and remedy.startswith("did you mean `")
    assert refused("less", more=f"model less {{\n  {line}\n}}\n\n")[0] == "E139"


def test_one_model_called_differently_is_two() -> None:
    """Even where all shapes agree: `unused` changes none."""
    more = "model odd(unused = 1) {\n  w : 4 dtype f32\n}\n\n"
    library = load(("calls.ucpl", f"ucpl 1\n{more}layout x() of odd{BODY}layout y() of odd(unused = 2){BODY}"))
    x, y = (locate(resolve(library, parse_call(call))) for call in ("x()", "y()"))
    build(x, x)
    with pytest.raises(UcplError) as caught:
        build(x, y)
    assert caught.value.diagnostics[0].code == "E319"


def test_the_command_line_calls_a_model(tmp_path: Path) -> None:
    file = tmp_path / "m.ucpl"
    file.write_text(MODELS)
    printed = good("show", "--after", "resolve", "plain()", "--model", f"{file}:gpt(layers = 3)").out
    assert "tensor     attn : l=3 h=4 f32" in printed
    assert "size=9" not in printed
    assert (
        "tensor     w : s=9"
        in good("show", "--after", "resolve", "plain()", "--model", f"{file}:bare", "-D", "size=9").out
    )
    assert "E117" in ucpl("show", "plain()", "--model", f"{file}:gpt(layer = 3)").err


def test_a_used_layout_has_the_sizes_of_its_model() -> None:
    text = """ucpl 2
model tower(rows) {
  dim r = rows
  w : r
}
model two {
  dim n = 3
  use tower(rows = n) as a
  use tower(rows = 2 * n) as b
}
layout part() of tower {
  w = r  as "w"
}
layout whole() of two {
  file weights = torch "w"
  use part() as a key "a.{key}"
  use part() as b key "b.{key}"
}
"""
    placement = locate(resolve(load(("a.ucpl", text)), parse_call("whole()")))
    assert {key_text(h.key): h.shape for p in placement.parts for h in p.homes.each} == {"a.w": (3,), "b.w": (6,)}
    refused = text.replace("part()", "part(m)", 1).replace("use part()", "use part(m = n)")
    with pytest.raises(UcplError) as caught:
        resolve(load(("a.ucpl", refused)), parse_call("whole()"))
    assert (
        caught.value.diagnostics[0].code == "E101"
        and "`layout part(...) of tower`" in caught.value.diagnostics[0].remedy
    )
