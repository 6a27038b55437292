"""Globs over names: matches, precedence and reports."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ucpl.conversion.checking import check
from ucpl.conversion.requests import Given
from ucpl.errors import UcplError
from ucpl.language import nodes, parse, parse_call, print_file
from ucpl.layout import Layout, close, expand, globs, load, resolve
from ucpl.layout.globs import Globs, matches

MODEL = """ucpl 1
model m {
  dtype f32
  a.to_q.weight : 4 6
  a.to_k.weight : 4 6
  a.norm.bias   : 4
  "b*c.weight"  : 8
  head          : 2 is buffer
  alias tied.weight = a.to_q.weight
}
"""
LAYOUT = 'layout g(tp = 2) of any {{\n  mesh tp\n  file weights = torch "{{tp}}.pt"\n{}\n}}\n'


def library(body: str, more: str = "") -> Any:
    return load(("t.ucpl", MODEL + LAYOUT.format(body) + more))


def model_of(known: Any) -> nodes.Model:
    return next(s for s in known.files["t.ucpl"].statements if isinstance(s, nodes.Model))


def resolved(body: str, more: str = "", call: str = "g()") -> Layout:
    known = library(body, more)
    return resolve(known, parse_call(call), model=model_of(known) if call == "g()" else None)


def keys(layout: Layout) -> dict[str, str]:
    return {e.alias or e.path: e.storing.key.text.partition("/")[0] for e in layout.entries if e.storing.key}


def code(body: str, more: str = "", call: str = "g()") -> Any:
    with pytest.raises(UcplError) as caught:
        resolved(body, more, call)
    return caught.value.diagnostics[0]


# ---- matching --------------------------------------------------------------------------------------------------------

texts = st.text("ab.", max_size=4)
some_globs = st.lists(st.lists(texts, min_size=2, max_size=4).map(tuple), min_size=1, max_size=12)


@given(some_globs, st.lists(st.text("ab.", max_size=12), max_size=8))
def test_a_name_has_the_globs_that_match_it_completely(many: list[tuple[str, ...]], names: list[str]) -> None:
    known = Globs(many)
    for name in names:
        wanted = [i for i, g in enumerate(many) if re.fullmatch(".*".join(map(re.escape, g)), name)]
        assert known.of(name) == wanted


def test_texts_of_a_glob_do_not_overlap() -> None:
    assert matches(("ab", "ba"), "abba") and not matches(("ab", "ba"), "aba")
    assert matches(("", "a", "a", ""), "aa") and not matches(("", "a", "a", ""), "a")


def test_a_name_is_held_against_few_of_many_globs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lists of patterns have hundreds of lines with the same end.

    Models have 100,000 tensors.
    """
    asked = 0

    def counted(glob: tuple[str, ...], name: str) -> bool:
        nonlocal asked
        asked += 1
        return matches(glob, name)

    monkeypatch.setattr(globs, "matches", counted)
    kinds = (("", ".m{}.weight"), ("", ".x{}.", ".weight"), ("layers.{}.", ".weight"), ("", ".y{}.", ""))
    many = [tuple(text.format(n) for text in kind) for n in range(50) for kind in kinds]
    names = [f"layers.{n}.mlp.x{n % 50}.m{n % 60}.weight" for n in range(2000)]
    known = Globs(many)
    found = [known.of(name) for name in names]
    assert sum(map(len, found)) == sum(bool(re.fullmatch(".*".join(map(re.escape, g)), n)) for g in many for n in names)
    assert asked < 4 * len(names)


# ---- which line speaks -----------------------------------------------------------------------------------------------


def test_names_then_the_most_literal_glob_then_classes() -> None:
    layout = resolved(
        '  * = ... as "all/{name}"\n  "*.weight" = ... as "weight/{name}"\n  "*.to_q.weight" = ... as "q/{name}"\n'
        '  "*a.to_k.weight" = none\n  a.norm.bias = _ as "name/"'
    )
    assert keys(layout) == {"a.to_q.weight": "q", "b*c.weight": "weight", "head": "all", "a.norm.bias": "name"}


def test_a_class_narrows_a_glob_and_of_equals_the_narrower_speaks() -> None:
    layout = resolved(
        '  * = ... as "all/{name}"\n  "*a*" = ... as "any/{name}"\n  "*a*" of trainable = ... as "trained/{name}"\n'
        '  "*d" of alias = ... as "{alias}"\n  "t*" of alias = ... as "alias/{alias}"'
    )
    assert keys(layout) == {
        "a.to_q.weight": "trained",
        "a.to_k.weight": "trained",
        "a.norm.bias": "trained",
        "b*c.weight": "all",
        "head": "any",
        "tied.weight": "alias",
    }


def test_the_more_literal_speaks_whatever_its_class() -> None:
    layout = resolved('  "*.weight" of trainable = ... as "narrow/"\n  "*.to_q.weight" = ... as "literal/"')
    assert keys(layout)["a.to_q.weight"] == "literal"


def test_a_glob_that_matches_nothing_of_the_files_own_model_is_a_remark(tmp_path: Path) -> None:
    file = tmp_path / "t.ucpl"
    file.write_text(MODEL + LAYOUT.format('  * = ... as "{name}"\n  "*.nrom.*" = none\n  "*.norm.*" = none'))
    found = check(str(file), Given())
    assert [r for r in found.remarks if "matches" in r] == ['g: "*.nrom.*" matches no tensor of m']
    assert found.findings == () and not any("stores nothing" in r for r in found.remarks)  # `none` is meant
    file.write_text("ucpl 1\n" + LAYOUT.format('  "*.nrom.*" = none'))
    assert not any(
        "matches" in r for r in check(str(file), Given()).remarks
    )  # tried over a model of ours, which says nothing


def test_one_glob_twice_is_two_homes() -> None:
    layout = resolved('  "*bias" = _ as "one"\n  "*bias" = _ as "two"')
    assert [e.storing.key.text for e in layout.entries if e.storing.key] == ["one", "two"]
    assert [t.names for t in layout.taken] == [("a.norm.bias",)]


def test_a_glob_under_a_condition_that_does_not_hold_is_not_there() -> None:
    assert resolved('  "*bias" = _ as "one" when tp > 2').taken == ()


def test_what_each_glob_took_is_reported() -> None:
    layout = resolved('  * = ... as "{name}"\n  "*.to_?.weight" = none\n  "*.to_*" of frozen = none\n  "*.to_*" = none')
    assert [(t.glob, t.names) for t in layout.taken] == [
        ('"*.to_?.weight"', ()),
        ('"*.to_*" of frozen', ()),
        ('"*.to_*"', ("a.to_q.weight", "a.to_k.weight")),
    ]
    assert ('"*.to_*"', 2, "tensors that t.ucpl:17 takes") in layout.origins
    assert ('"*.to_?.weight"', 0, "t.ucpl:15 matches no tensor") in layout.origins


def test_a_star_that_is_part_of_a_name_is_written_by_its_number() -> None:
    layout = resolved('  * = ... as "all"\n  "b\\u{2a}c.weight" = _ as "name"')
    assert keys(layout)["b*c.weight"] == "name"
    assert layout.taken == ()


def test_a_base_has_its_glob_replaced_by_its_text() -> None:
    more = 'layout h(tp = 2) of any extends g(tp = tp) {\n  "*bias" = _@tp as "new"\n  "*bia*" = none\n}\n'
    known = library('  "*bias" = _ as "old"\n  * = none', more)
    layout = resolve(known, parse_call("h()"), model=model_of(known))
    assert keys(layout) == {"a.norm.bias": "new"}


# ---- written out -----------------------------------------------------------------------------------------------------

BODY = '  * = ... as "all/{name}"\n  "*to_q*" = _@tp ... as "q/{name}"\n  "*to_k*" = none\n  "t*" of alias = ... as "{alias}"'


@pytest.mark.parametrize("closing", ["expand", "close"])
def test_a_layout_that_is_written_out_means_the_same(closing: str) -> None:
    """And is a layout of a named model, without a glob."""
    known = library(BODY, "layout n(tp = 2) of m extends g(tp = tp) {\n}\n")
    model = model_of(known)
    if closing == "expand":
        text = print_file(nodes.File("x", 1, (model, expand(known, parse_call("g()"), model))))
    else:
        text = print_file(close(known, parse_call("n()")))
    written = resolve(load(("x.ucpl", text)), parse_call("stored()"))
    wanted = resolved(BODY)
    assert written.taken == ()

    def said(layout: Layout) -> set[Any]:
        return {
            (e.alias or e.path, e.shape, e.storing.key and e.storing.key.text.replace("{name}", e.path))
            for e in layout.entries
        }

    assert {(n, s) for n, s, _ in said(written)} == {(n, s) for n, s, _ in said(wanted)}
    assert "a.to_k.weight" not in keys(written) and keys(written)["a.to_q.weight"] == "q"


@pytest.mark.parametrize("path", ["a.*.b", "**", 'x"*"y'])
def test_a_name_with_a_star_is_printed_so_that_it_is_read_as_one(path: str) -> None:
    entry = nodes.Entry(path, (), None)
    layout = nodes.Layout("x", (), "any", None, (entry,))
    (back,) = parse(print_file(nodes.File("x", 1, (layout,))), "x").statements
    assert back == layout


# ---- refusals --------------------------------------------------------------------------------------------------------


def test_two_globs_of_equal_length_are_refused() -> None:
    found = code('  "*.to_q.*" = none\n  "a*.to_q*" = none\n  * = none')
    assert found.code == "E127" and "`a.to_q.weight`" in found.message
    assert [label.line for label in found.labels] == [14, 15]
    assert '"a.to_q.weight" = ...' in found.remedy


def test_a_tie_of_globs_that_a_more_literal_one_wins_over_is_none() -> None:
    assert keys(resolved('  "*.to_q*" = none\n  "a*to_q*" = none\n  "*.to_q.w*" = ... as "won"')) == {
        "a.to_q.weight": "won"
    }


def test_a_layout_of_a_named_model_has_no_globs() -> None:
    found = code("", 'layout n() of m {\n  file weights = torch "w"\n  "*bias" = _ as "b"\n}\n', "n()")
    assert found.code == "E126" and "of any" in found.remedy


def test_a_layout_of_a_named_model_can_extend_one_with_globs() -> None:
    layout = resolved('  "*bias" = _ as "b"', "layout n() of m extends g() {\n}\n", "n()")
    assert [t.names for t in layout.taken] == [("a.norm.bias",)]


@pytest.mark.parametrize("line", ['"*bias"[l] = _', "*[l] = _", "head of buffer = _"])
def test_brackets_and_classes_stand_where_they_belong(line: str) -> None:
    assert code("  " + line).code == "E128"
