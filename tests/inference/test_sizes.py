"""Sizes of dims from single stored axes, and axes without information."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from tests.inference.facts import checkpoint
from ucpl.errors import UcplError
from ucpl.inference.sizes import Found, sizes_from, with_sizes
from ucpl.language import nodes, parse_call
from ucpl.layout import load, resolve

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
        ("v[2..] h", (9, 3), {"v": 11, "h": 3}),
        ("v[..2] h", (2, 3), {"h": 3}),
        ("v[0, 1] h", (2, 3), {"h": 3}),
        ("(v + v) h", (9, 3), {"h": 3}),
        ("(v + n) h", (9, 3), {"v": 5, "h": 3}),
        ("(v + n) h", (3, 3), {"h": 3}),
        ("(n v + n) h", (12, 3), {"v": 2, "h": 3}),
        ("(v n + v d) h", (12, 3), {"h": 3}),
        ("(v@tp + n) h", (9, 3), {"v": 10, "h": 3}),
        ("(v[..2] + v[2..]) h", (9, 3), {"v": 9, "h": 3}),
        ("trim(pad(v, 4)) h", (7, 3), {"v": 7, "h": 3}),
        ("pad(n, 3) (v h)", (6, 9), {}),
        ("(pad(n, 3) v) h", (12, 3), {"v": 2, "h": 3}),
        ("pad(v, q) h", (7, 3), {"h": 3}),
        ("v h", (7,), {}),
        ("v h", (7, 3, 1), {}),
    ],
)
def test_what_an_axis_says(axes: str, shape: tuple[int, ...], sizes: dict[str, int]) -> None:
    made = found(f'  e = {axes} as "e"', {"e": shape})
    assert {name: size for name, (size, _) in made.items()} == sizes
    assert all(origin == "shape of e" for _, origin in made.values())


def test_one_entry_s_size_is_the_next_one_s_divisor() -> None:
    """In any order of lines.

    H follows from e, and d from (h d).
    """
    made = found('  w[l] = (h d) as "w.{l}"\n  e = v h as "e"', {"e": (7, 3), "w.0": (15,), "w.1": (15,)})
    assert made["d"] == (5, "shape of w.0") and made["l"] == (2, "names like w.1")


def test_a_list_of_sizes_is_no_size_and_hides_no_other() -> None:
    text = MODEL.replace("dim n = 4", "dim n = 4, f = [2, 4] by l\n  up : l f")
    text += 'layout s() of m {\n  up[l] = f as "up.{l}"\n  e = v h as "e"\n}\n'
    stored = {"up.0": (2,), "up.1": (4,), "e": (7, 3)}
    made = sizes_from(checkpoint(stored=stored), load(("m.ucpl", text)), parse_call("s()"), None, {})
    assert {name: size for name, (size, _) in made.items()} == {"l": 2, "v": 7, "h": 3}


def test_indices_are_counted_by_the_largest_number_of_a_full_name() -> None:
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
    assert set(found('  w[l] = h d as "w{l}"', {"w0": (3, 5)}, l=4)) == {"h", "d"}  # names do not say it either
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


def test_a_model_gets_its_sizes_and_others_are_unchanged() -> None:
    library = load(("m.ucpl", MODEL))
    told = with_sizes(library, "m", {"v": (7, "a shape")})
    model = told.model("m").node
    assert isinstance(model, nodes.Model)
    assert model.items[0] == nodes.Dims((nodes.Binding("v", nodes.Number(7)),))
    assert library.model("m").node.items == model.items[1:], "the library itself is as it was"  # type: ignore[union-attr]
    assert with_sizes(library, "m", {}) is library and with_sizes(library, "any", {"v": (7, "x")}) is library


def on_ranks(entries: str, *files: Mapping[str, tuple[int, ...]], model: str = MODEL, **given: int) -> dict[str, int]:
    """Sizes of dims, found in the files of two ranks (or more)."""
    text = f"{model}layout s() of m {{\n  mesh tp\n  let tp = 2\n{entries}\n}}\n"
    stored = checkpoint(stored={})
    for i, shapes in enumerate(files):
        for (_, key), extent in checkpoint(stored=shapes).extents.items():
            stored.extents[f"{i}", key] = extent
    found = sizes_from(stored, load(("m.ucpl", text)), parse_call("s()"), None, dict(given))
    return {name: size for name, (size, _) in found.items()}


@pytest.mark.parametrize(
    ("axes", "lengths", "v"),
    [
        ("v@spread(tp)", (4, 3), 7),
        ("v@chunk(tp, 4)", (4, 3), 7),
        ("v@tp[5, 2]", (5, 2), 7),
        ("(v@spread(tp) n)", (16, 12), 7),
        ("(v@spread(tp) + n@spread(tp))", (6, 5), 7),
        ("(v@spread(tp) + n)", (8, 7), 7),  # each rank has all of n
        ("v@spread(tp)", (4, 3, 4, 3), 7),  # copies on other ranks
        ("v@spread(tp)", (4,), None),  # a rank is missing
        ("v@spread(tp)", (4, 3, 4), None),
        ("v@tp", (4, 3), None),
        ("(v@spread(tp) n@tp)", (8, 6), None),  # one axis cannot cut two factors
    ],
)
def test_uneven_pieces_are_added_up(axes: str, lengths: tuple[int, ...], v: int | None) -> None:
    made = on_ranks(f'  e = {axes} h as "e"', *({"e": (n, 3)} for n in lengths))
    assert made == {"h": 3} | ({"v": v} if v is not None else {})


def test_each_unknown_is_eliminated_by_what_another_tensor_says() -> None:
    """qkv gives q + 2 k, k gives k, and padding follows."""
    model = MODEL.replace("  e : v h\n", "  e : v h\n  q : a h\n  k : b h\n  x : v\n")
    entries = '  qk = (q: a@spread(tp) + k: b@spread(tp)) h as "qk"\n  k = b h as "k"\n'
    entries += '  e = pad(v, 8)@tp h as "e"\n  x = v as "x"'
    first, second = (
        {"qk": (8, 3), "k": (4, 3), "e": (8, 3), "x": (11,)},
        {"qk": (7, 3), "k": (4, 3), "e": (8, 3), "x": (11,)},
    )
    assert on_ranks(entries, first, second, model=model) == {"h": 3, "b": 4, "a": 11, "v": 11}


def test_padding_alone_asks_with_the_sizes_that_it_leaves() -> None:
    with pytest.raises(UcplError) as caught:
        found('  e = pad(v, 4 * tp)@tp h as "e"', {"e": (8, 3)})
    (d,) = caught.value.diagnostics
    assert (d.code, d.message) == ("E101", "dim `v` has no size: it is from 9 to 16 by the padded shape of e")
    assert "-D v=" in d.remedy and d.labels[0].line == 10
    assert set(found('  e = pad(v, 4 * tp)@tp h as "e"', {"e": (8, 3)}, v=9)) == {"h"}


def test_two_paddings_that_leave_one_size_say_it() -> None:
    entries = '  e = pad(v, 4) h as "e"\n  e = pad(v, 3) h as "f"'
    made = found(entries, {"e": (12, 3), "f": (9, 3)})
    assert made["v"][0] == 9


def test_a_size_that_is_open_can_be_given_by_its_name() -> None:
    text = f'{MODEL}layout s() of m {{\n  file weights = torch "a"\n  w[l] = h d as "w.{{l}}"\n  e = none\n}}\n'
    library = load(("m.ucpl", text))
    assert resolve(library, parse_call("s()"), define_sizes={"l": 2, "h": 3, "d": 5, "v": 7}).sizes["d"] == 5
    with pytest.raises(UcplError, match="E115: -D dd: neither model nor layout"):
        resolve(library, parse_call("s()"), define_sizes={"l": 2, "h": 3, "dd": 5, "v": 7})


def test_a_degree_of_the_base_is_the_one_that_the_extension_gives() -> None:
    text = (
        f'{MODEL}layout base(tp) of m {{\n  mesh tp\n  e = v@tp h as "e"\n}}\n'
        "layout s() of m extends base(tp = 3) {\n}\n"
    )
    said = sizes_from(checkpoint(stored={"e": (5, 2)}), load(("m.ucpl", text)), parse_call("s()"), None, {})
    assert {name: size for name, (size, _) in said.items()} == {"v": 15, "h": 2}
