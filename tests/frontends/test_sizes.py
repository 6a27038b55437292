"""Sizes from shapes: what one stored axis says of a dim, and when it says nothing."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from tests.frontends.facts import checkpoint
from ucpl.errors import UcplError
from ucpl.frontends.sizes import Found, sizes_from, with_sizes
from ucpl.layout import load
from ucpl.syntax import nodes, parse_call

MODEL = """ucpl 1
model m {
  dim n = 4
  w : l h d
  e : v h
}
"""


def found(
    entries: str, stored: Mapping[str, tuple[int, ...]], call: str = "s()", head: str = "s()", **given: int
) -> Found:
    text = f"{MODEL}layout {head} of m {{\n  mesh tp\n  let tp = 2\n{entries}\n}}\n"
    library = load(("m.ucpl", text.replace("  let tp = 2\n", "") if "tp" in head else text))
    return sizes_from(checkpoint(stored=stored), library, parse_call(call), None, dict(given))


@pytest.mark.parametrize(
    ("axes", "shape", "sizes"),
    [
        ("v h", (7, 3), {"v": 7, "h": 3}),
        ("v@tp h", (7, 3), {"v": 14, "h": 3}),
        ("v@chunk(tp) h", (7, 3), {"h": 3}),
        ("v@spread(tp) h", (7, 3), {"h": 3}),
        ("(n v) h", (8, 3), {"v": 2, "h": 3}),
        ("(v n)@tp h", (8, 3), {"v": 4, "h": 3}),
        ("(n v) h", (9, 3), {"h": 3}),
        ("(v h)", (9,), {}),
        ("v[2..] h", (9, 3), {"h": 3}),
        ("(v + v) h", (9, 3), {"h": 3}),
        ("pad(v, 4) h", (8, 3), {"h": 3}),
        ("v h", (7,), {}),
        ("v h", (7, 3, 1), {}),
    ],
)
def test_what_an_axis_says(axes: str, shape: tuple[int, ...], sizes: dict[str, int]) -> None:
    made = found(f'  e = {axes} as "e"', {"e": shape})
    assert {name: size for name, (size, _) in made.items()} == sizes
    assert all(origin == "shape of e" for _, origin in made.values())


def test_one_entry_s_size_is_the_next_one_s_divisor() -> None:
    """Whatever the order in which they stand: h is known by e, so that (h d) says d."""
    made = found('  w[l] = (h d) as "w.{l}"\n  e = v h as "e"', {"e": (7, 3), "w.0": (15,), "w.1": (15,)})
    assert made["d"] == (5, "shape of w.0") and made["l"] == (2, "names like w.1")


def test_indices_are_counted_by_the_largest_number_of_a_whole_name() -> None:
    entries = '  w[l] = h d as "x.{l}.w"'
    stored = {
        "model/x.2.w": (3, 5),
        "model/x.11.w": (3, 5),
        "model/x.40.w.more": (3, 5),
        "model/ax.40.w": (3, 5),
        "x.0012.w": (3, 5),
        "model/x.4.w": (3, 5),
    }
    assert found(entries, stored)["l"] == (13, "names like x.0012.w")
    assert "l" not in found(entries, {"x.².w": (3, 5)}) and "l" not in found(
        entries, {"x." + "9" * 5000 + ".w": (3, 5)}
    )
    assert "l" not in found(entries, {"x.-1.w": (3, 5)})


def test_a_size_that_is_given_or_an_argument_is_not_looked_for() -> None:
    entries = '  e = v h as "e"'
    assert set(found(entries, {"e": (7, 3)}, v=9)) == {"h"}
    assert set(found(entries, {"e": (7, 3)}, "s(v = 9)", "s(v)")) == {"h"}
    assert found('  e = v@tp h as "e"', {"e": (7, 3)}, "s(3)", "s(tp)")["v"][0] == 21
    assert found('  e = v@tp h as "e"', {"e": (7, 3)}, "s()", "s(tp = 5)")["v"][0] == 35
    assert found('  e = v@tp h as "e"', {"e": (7, 3)}, "s(3)", "s(tp = 5)")["v"][0] == 21


def test_layouts_that_extend_another_know_its_entries() -> None:
    text = (
        MODEL
        + 'layout base() of m {\n  e = v h as "e"\n}\nlayout s() of m extends base() {\n  w[l] = h d as "w{l}"\n}\n'
    )
    made = sizes_from(checkpoint(stored={"e": (7, 3), "w0": (3, 5)}), load(("m.ucpl", text)), nodes.Call("s"))
    assert {name: size for name, (size, _) in made.items()} == {"v": 7, "h": 3, "d": 5, "l": 1}


def test_two_shapes_that_disagree_are_both_named() -> None:
    with pytest.raises(UcplError) as caught:
        found('  e = v h as "e"\n  w[l] = h d as "w"', {"e": (7, 3), "w": (4, 5)})
    (d,) = caught.value.diagnostics
    assert (d.code, d.message) == ("E163", "dim `h` is 3 by the shape of e and 4 by the shape of w")
    assert d.labels[1].where == "shape of e" and d.labels[0].line is not None


def test_a_model_is_told_its_sizes_and_others_are_left() -> None:
    library = load(("m.ucpl", MODEL))
    told = with_sizes(library, "m", {"v": (7, "a shape")})
    model = told.model("m").node
    assert isinstance(model, nodes.Model)
    assert model.items[0] == nodes.Dims((nodes.Binding("v", nodes.Number(7)),))
    assert library.model("m").node.items == model.items[1:], "the library itself is as it was"  # type: ignore[union-attr]
    assert with_sizes(library, "m", {}) is library and with_sizes(library, "any", {"v": (7, "x")}) is library
