"""Texts that say a thing once.

Several left sides of a statement, keys of the extended layout, and texts within templates.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.laws.agreement import check
from tests.oracle import homes, mean
from ucpl.errors import UcplError
from ucpl.inference.sizes import sizes_of_shapes
from ucpl.language import format_text, nodes, parse, parse_call, print_file
from ucpl.layout import Layout, load, resolve
from ucpl.layout import axes as ax
from ucpl.placement import locate

LONG = """ucpl 1
model m {
  dim l = 2, r = 4, q = 2
  w : l r q  dtype f32
  v : l r q  dtype f32
  u : l q r  dtype f32
  norm : r
}
layout base() of m {
  file weights = torch "all.pt"
  w[l] = (r q)  as "layers.{l}.self_attn.w"
  v[l] = (r q)  as "layers.{l}.self_attn.v"
  u[l] = q r    as "layers.{l}.self_attn.u"
  norm = r      as "norm"
}
layout cut(tp) of m extends base() {
  mesh tp
  file weights = torch "{tp}.pt"
  w[l] = (r@tp q)  as "layers.{l}.self_attn.w"
  v[l] = (r@tp q)  as "layers.{l}.self_attn.v"
  u[l] = q r@tp    as "layers.{l}.self_attn.u"
}
"""
SHORT = """ucpl 1
model m {
  dim l = 2, r = 4, q = 2
  w, v : l r q  dtype f32
  u    : l q r  dtype f32
  norm : r
}
layout base() of m {
  let attn = "{layer}self_attn.", layer = "layers.{l}."
  file weights = torch "all.pt"
  w[l] = (r q)  as "{attn}w"
  v[l] = (r q)  as "{attn}v"
  u[l] = q r    as "{attn}u"
  norm = r      as "norm"
}
layout cut(tp) of m extends base() {
  mesh tp
  file weights = torch "{tp}.pt"
  w[l], v[l] = (r@tp q)
  u[l]       = q r@tp
}
"""


def resolved(text: str, call: str) -> Layout:
    return resolve(load(("a.ucpl", text)), parse_call(call))


@pytest.mark.parametrize("call", ("base()", "cut(2)"))
def test_the_short_text_means_what_the_long_one_does(call: str) -> None:
    long, short = (resolved(text, call) for text in (LONG, SHORT))
    assert long.tensors == short.tensors and long.entries == short.entries
    assert long.files == short.files and long.sizes == short.sizes
    assert homes(mean(SHORT, call)) == homes(mean(LONG, call))
    assert check(SHORT, call)


def test_records_are_one_a_tensor_and_the_text_stays_as_it_is() -> None:
    file = parse(SHORT, "a.ucpl")
    model, _, cut = file.statements
    assert isinstance(model, nodes.Model) and isinstance(cut, nodes.Layout)
    assert [i.path for i in model.items if isinstance(i, nodes.Tensor)] == ["w", "v", "u", "norm"]
    assert len({i.span for i in model.items}) == len(model.items)
    printed = print_file(file)
    assert "  w[l], v[l] = (r@tp q)\n" in printed and "  w, v : l r q  dtype f32\n" in printed
    assert parse(printed, "a.ucpl") == file and format_text(printed) == printed
    noted = SHORT.replace("  u[l]       = q r@tp", "  # of columns\n  u[l] = q r@tp  # here").replace(
        "  u    :", "  u :"
    )
    assert "  # of columns\n  u[l]       = q r@tp  # here\n" in format_text(noted)


def test_names_taken_back_together() -> None:
    file = parse("ucpl 1\nmodel n extends m() {\n  a, b : none\n}\n")
    assert isinstance(file.statements[0], nodes.Model)
    assert file.statements[0].items == (nodes.Gone("tensor", ("a",)), nodes.Gone("tensor", ("b",)))
    layout = parse('ucpl 1\nlayout n() of any extends m() {\n  "a", * of frozen = none\n}\n').statements[0]
    assert isinstance(layout, nodes.Layout) and layout.items[1] == nodes.Entry("*", (), None, (), "frozen")


def test_a_long_list_is_broken_at_its_commas() -> None:
    names = ", ".join(f"part{i}.of.a.long.name[l, e]" for i in range(9))
    text = f'ucpl 1\nlayout n() of any {{\n  {names} = a b  as "{{name}}"\n}}\n'
    printed = format_text(text)
    assert max(map(len, printed.split("\n"))) <= 120
    assert parse(printed) == parse(text) and format_text(printed) == printed


def test_two_lines_of_the_base_have_no_one_key() -> None:
    text = SHORT.replace("  norm = r      as", '  u[l] = q r    as "again.{l}"\n  norm = r      as')
    assert [e.storing.key for e in resolved(text, "cut(2)").entries if e.path == "u"] == [None]


def test_a_derived_layout_gives_the_text_another_value() -> None:
    text = SHORT.replace("  w[l], v[l]", '  let layer = "h.{l}."\n  w[l], v[l]')
    keys = [e.storing.key.text for e in resolved(text, "cut(2)").entries if e.storing.key]
    assert keys == ["h.{l}.self_attn.w", "h.{l}.self_attn.v", "h.{l}.self_attn.u", "norm"]


def test_a_text_of_a_layout_that_is_used_has_its_own_names() -> None:
    text = SHORT + (
        "model two {\n  use m() as a\n}\n"
        "layout both(tp) of two {\n"
        '  let layer = "outer.{tp}."\n'
        '  mesh tp\n  file weights = torch "{tp}.pt"\n  use cut(tp = tp) as a key "part.{key}"\n'
        "}\n"
    )
    keys = [e.storing.key.text for e in resolved(text, "both(2)").entries if e.storing.key]
    assert keys[0] == "part.layers.{a.l}.self_attn.w"


IMPLIED = """ucpl 2
model m {
  dim l = 2, e = 3, r = 4, k = 2, two = 2
  index r = (two k)
  a, b : l e r
  q, v : l r
  norm : r
}
layout long(tp, pp) of m {
  mesh pp tp
  index l = l@pp
  file weights = torch "{pp}.{tp}.pt"
  file layer   = torch "{l}.{tp}.pt"  key "{two}/{key}"
  a[l, e], b[l, e] = r@tp              as "{l.local}.{e}.{name}"
  qv[l]            = (q: r@tp + v: r)  as "{l}.qv"
  norm             = r                 as "norm"
  q[l, r]          = ()                in layer as "q.{k}"
}
"""
BRACKETS = ("[l, e]", "[l, r]", "[l]")


def test_indices_that_a_key_implies_need_no_brackets() -> None:
    short = IMPLIED
    for brackets in BRACKETS:
        short = short.replace(brackets, "")
    for call in ("long(1, 1)", "long(2, 2)"):
        assert homes(mean(short, call)) == homes(mean(IMPLIED, call))
        assert check(short, call)
        assert resolved(short, call).entries == resolved(IMPLIED, call).entries


def test_an_index_of_the_key_joins_those_in_brackets() -> None:
    some = IMPLIED.replace("a[l, e], b[l, e] ", "a[e], b[l] ")
    entries = {e.path: e for e in resolved(some, "long(2, 2)").entries}
    assert [list(ax.dims_of(*entries[path].indices)) for path in ("a", "b")] == [["e", "l"], ["l", "e"]]
    assert check(some, "long(2, 2)")


def test_a_dim_of_the_pattern_is_no_index() -> None:
    text = IMPLIED.replace('norm             = r                 as "norm"', 'norm = r  as "norm.{r}"')
    with pytest.raises(UcplError, match="names `r`, which has no value here"):
        resolved(text, "long(1, 1)")


def test_digits_of_the_pattern_are_no_index() -> None:
    text = IMPLIED.replace(
        '  q[l, r]          = ()                in layer as "q.{k}"', '  q[l] = (k two)  as "q.{l}.{k}"'
    )
    assert text != IMPLIED
    with pytest.raises(UcplError, match="names `k`, which has no value here"):
        resolved(text, "long(1, 1)")


def test_a_line_takes_the_indices_of_the_key_that_it_keeps() -> None:
    text = IMPLIED.replace("[l, e]", "") + (
        'layout stacked(tp, pp = 1) of m extends long() {\n  a, b = l e r@tp  as "{name}"\n}\n'
        "layout cut(tp, pp = 1) of m extends long() {\n  a, b = r\n}\n"
    )
    assert [e.indices for e in resolved(text, "stacked(2)").entries if e.path in "ab"] == [(), ()]
    assert [len(e.indices) for e in resolved(text, "cut(2)").entries if e.path in "ab"] == [2, 2]


LISTS = """ucpl 1
let names = ["q", "k", "v"], sizes = config.sizes
model m {
  dim r = length(names), a = sizes[1], b = floor(sizes[-1], 2)
  w : r a b
}
layout x(tp) of m {
  mesh tp
  file weights = torch "{names[tp]}.pt"
  w[r] = (a b)  as "{names[length(names) - 1 - r]}"
}
"""


def test_items_of_lists_in_sizes_keys_and_names_of_files() -> None:
    config: dict[str, Any] = {"sizes": [1, 2, 7]}
    layout = resolve(load(("a.ucpl", LISTS)), parse_call("x(2)"), config=config)
    assert (layout.sizes["r"], layout.sizes["a"], layout.sizes["b"]) == (3, 2, 3)
    assert {(h.file, h.key) for h in homes(mean(LISTS, "x(2)", config=config))} == {
        (f"{file}.pt", key) for file in "qk" for key in "vkq"
    }
    assert check(LISTS, "x(2)", config=config)
    assert parse(print_file(parse(LISTS))) == parse(LISTS)


def test_a_text_within_itself_is_refused() -> None:
    with pytest.raises(UcplError) as caught:
        resolved(SHORT.replace('layer = "layers.{l}."', 'layer = "{attn}{l}"'), "base()")
    assert caught.value.diagnostics[0].code in ("E102", "E121")


def test_brackets_are_of_one_left_side() -> None:
    layout = parse("ucpl 1\nlayout n() of m {\n  w[l, e], v[l], u = r\n}\n").statements[0]
    assert isinstance(layout, nodes.Layout)
    found = [len(i.indices) for i in layout.items if isinstance(i, nodes.Entry)]
    assert found == [2, 1, 0]


def test_an_open_dim_is_read_from_keys_that_a_text_begins() -> None:
    text = SHORT.replace("dim l = 2, r = 4, q = 2", "dim q = 2")
    stored = [(f"layers.{n}.self_attn.{name}", (8,)) for n in range(3) for name in "wv"]
    found = sizes_of_shapes(stored, load(("a.ucpl", text)), parse_call("cut(1)"))
    assert (found["l"][0], found["r"][0]) == (3, 4)


HANDED = """ucpl 2
model short(rows = 2) {
  dim r = rows, q = 2
  w : r q
}
model m(rows = 4) extends short() { }
layout base(tp = 2, file = "base", unit = 1) of m {
  mesh tp
  file weights = torch "{file} {tp}"
  w = r@spread(tp, unit) q  as "w"
}
layout between(tp = 2) of m extends base() { }
layout last(tp = 2, unit = 2, file = "last") of m extends between() { }
layout fixed(tp = 2, unit = 2) of m extends base(unit = 1, file = "fixed") { }
"""


def made(call: str) -> list[tuple[str, tuple[int, ...]]]:
    found = locate(resolve(load(("handed.ucpl", HANDED)), parse_call(call)))
    return [(home.file, home.shape) for part in found.parts for home in part.homes]


def test_a_parameter_of_a_base_has_the_value_of_its_name() -> None:
    """Through a layout without it, too.

    Defaults are those of the layout that is called.
    """
    assert made("last()") == [("last 0", (2, 2)), ("last 1", (2, 2))]
    assert made("last(tp = 3, unit = 1)") == [("last 0", (2, 2)), ("last 1", (1, 2)), ("last 2", (1, 2))]
    assert made("last(4)") == [("last 0", (2, 2)), ("last 1", (2, 2)), ("last 2", (0, 2)), ("last 3", (0, 2))]
    assert made("between(4)") == [(f"base {i}", (1, 2)) for i in range(4)]
    assert check(HANDED, "last(tp = 2, unit = 1)") and check(HANDED, "between(tp = 4)")
    with pytest.raises(UcplError, match="E125: `unit` is 2 here and 1 in the layout that is extended"):
        made("fixed()")


USED = """ucpl 2
model stack(layers) {
  dim l = layers, n = 4
  q, k : l n
}
model both {
  use stack(layers = 2) as one
  use stack(layers = 3) as two
}
layout part(tp) of stack {
  mesh tp
  file weights = torch "{tp}"
  let layer = "layers.{l}.{name}"
  q[l], k[l] = n@tp  as "{layer}"
}
layout all(tp) of both {
  mesh tp
  use part(tp = tp) as one key "one.{key}"
  use part(tp = tp) as two key "two.{key}"
}
"""


def test_the_key_of_a_used_layout_has_the_name_there() -> None:
    found = locate(resolve(load(("used.ucpl", USED)), parse_call("all(2)")))
    keys = {"/".join(map(str, home.key)) for part in found.parts for home in part.homes}
    assert keys == {f"{s}.layers.{i}.{n}" for s, many in (("one", 2), ("two", 3)) for i in range(many) for n in "qk"}
    assert check(USED, "all(2)") == len(keys) * 2


def test_a_size_is_of_the_tensor_that_the_key_names() -> None:
    """The name in a key is no wildcard."""
    text = """ucpl 2
model m {
  a, b : l r
  c    : l q
}
layout base(tp = 1) of m {
  mesh tp
  file weights = torch "{tp}"
  let layer = "layers.{l}.{name}"
  a[l], b[l] = r@tp  as "{layer}"
  c[l]       = q     as "{layer}"
}
layout two(tp = 2) of m extends base() { }
"""
    stored = [(f"layers.{i}.{name}", (n,)) for i in range(2) for name, n in (("a", 3), ("b", 3), ("c", 5))] * 2
    found = sizes_of_shapes(stored, load(("sizes.ucpl", text)), parse_call("two()"))
    assert {name: size for name, (size, _) in found.items()} == {"l": 2, "r": 6, "q": 5}
