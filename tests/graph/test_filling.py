"""`fill`, number by number by hand, and with planted faults."""

from __future__ import annotations

from typing import Any

import pytest
from attrs import evolve

from tests.laws import moves as mv
from ucpl.errors import UcplError
from ucpl.extents import holds
from ucpl.graph import Graph, build
from ucpl.language import parse_call
from ucpl.layout import load, resolve
from ucpl.placement import Placement, locate
from ucpl.planning import order
from ucpl.tables.operations import Fill
from ucpl.verification.proof.coverage import prove

TEXT = """ucpl 1
model m(rows = 3, new = 0) {
  dim l = 3, v = rows
  w : l v dtype f32
  b : v   dtype bf16
  c : v   dtype f32   when new
  d : v   dtype f32   is frozen when not new
  d : v   dtype f32   when new
  group first = w
  state e, g : f32
  state fp32 : f32
}
layout old() of m {
  file weights = torch "old"
  w = l v  as "w"
  b = v    as "b"
  d = v    as "d"
  state e  = like in weights as "{state}/{key}"
  state fp32 = like in weights as "{state}/{key}"
  state g  = none
}
layout less() of m extends old() {
  w[l[..2]] = v  as "w{l}"
}
layout new(tp, rows = 3, new = 0) of m(rows = rows, new = new) {
  mesh tp
  file weights = torch "{tp}"
  w = l v                     as "w"
  b = pad(v, tp)@tp           as "b"
  c = v  value x - 1          as "c"  when new
  d = v                       as "d"
  state * = like in weights   as "{state}/{key}"
  FILLS
}
"""


def sides(fills: str, source: str, target: str) -> tuple[Placement, Placement]:
    text = TEXT.replace("FILLS", fills.replace("; ", "\n  "))
    library = load(("a.ucpl", text))
    here, there = (locate(resolve(library, parse_call(call))) for call in (source, target))
    return here, there


def graph_of(fills: str, source: str, target: str) -> Graph:
    made = build(*sides(fills, source, target))
    prove(made)
    return made


def stored(graph: Graph) -> dict[tuple[str, str], dict[int, float]]:
    """(file, key) -> position -> the number that is put there."""
    out: dict[tuple[str, str], dict[int, float]] = {}
    for (file, key, at), (value,) in mv.filled(order(graph)).items():
        out.setdefault((file, key), {})[at] = value
    return out


def refused(fills: str, source: str, target: str) -> Any:
    with pytest.raises(UcplError) as caught:
        graph_of(fills, source, target)
    (found,) = caught.value.diagnostics
    return found


def test_states_that_the_source_lacks_are_filled_and_those_it_has_are_not() -> None:
    found = graph_of("fill state e, g = 0", "old()", "new(tp = 1)")
    assert stored(found) == {("0", "g/w"): dict.fromkeys(range(9), 0), ("0", "g/b"): dict.fromkeys(range(3), 0)}
    assert found.filled == ("g with 0: 12 elements of `w`, `b` (the source lacks them)",)


def test_a_tensor_that_has_grown_keeps_what_it_had() -> None:
    fills = "fill w[v[3..]] = 5; fill b = 7; fill d = 0; fill state e, g = 2"
    found = stored(graph_of(fills, "old()", "new(tp = 2, rows = 4)"))
    assert found["0", "w"] == {3: 5, 7: 5, 11: 5} == found["1", "w"] == found["0", "fp32/w"]
    assert found["1", "b"] == {1: 7} == found["1", "fp32/b"] and ("0", "b") not in found
    assert found["0", "e/w"] == {3: 2, 7: 2, 11: 2} and found["0", "g/w"] == dict.fromkeys(range(12), 2)
    assert found["0", "d"] == {3: 0}


def test_layers_that_the_source_does_not_store_are_filled() -> None:
    found = stored(graph_of("fill w = 1; fill state e, g = 0", "less()", "new(tp = 1)"))
    assert found["0", "w"] == {6: 1, 7: 1, 8: 1} == found["0", "fp32/w"] and found["0", "e/w"] == {6: 0, 7: 0, 8: 0}


def test_a_new_tensor_is_filled_as_it_is_stored() -> None:
    fills = "fill c = 1; fill state e, g = 0; fill state fp32 = weight"
    found = graph_of(fills, "old()", "new(tp = 1, new = 1)")
    assert stored(found)["0", "c"] == {0: 0, 1: 0, 2: 0}, "value x - 1"
    assert stored(found)["0", "fp32/c"] == {0: 0, 1: 0, 2: 0}, "the master of a parameter is stored as it is"
    assert ("0", "d") not in stored(found) and ("0", "fp32/d") not in stored(found), "it has its weight"
    assert "fp32 of 1 tensor is made of the weight: the source has none" in found.derived
    assert "fp32 with 1: 3 elements of `c` (the source lacks them)" in found.filled


def test_the_master_of_a_weight_that_is_there_is_no_number() -> None:
    found = refused("fill c = 1; fill d = 0; fill state e, g = 0", "old()", "new(tp = 1, new = 1)")
    assert found.code == "E303" and "fp32 of `d`" in found.message and "fill state fp32 = weight" in found.remedy


def test_a_master_that_is_new_in_part_is_not_filled_in_part() -> None:
    """The existing weight would have no master.

    No line gives its value, and the graph has no hole.
    """
    fills = "fill w = 0; fill b = 0; fill d = 0; fill state e, g = 0"
    found = refused(fills, "old()", "new(tp = 1, rows = 4, new = 1)")
    assert found.code in ("E301", "E303"), found
    fills += "; fill c = 0"
    found = refused(fills, "old()", "new(tp = 1, rows = 4, new = 1)")
    assert (found.code, "fp32 of `d`" in found.message) == ("E303", True), found


def test_the_most_special_line_holds() -> None:
    fills = (
        "fill state e, g = 0; fill * = 1; fill * of trainable = 2; fill w = 3; fill w[l[2..]] = 4; fill w[v[..1]] = 4"
    )
    found = graph_of(fills, "less()", "new(tp = 1)")
    assert stored(found)["0", "w"] == {6: 4, 7: 4, 8: 4}
    fills = "fill state g of first = 5; fill state g = 6; fill state * = 7"
    assert stored(graph_of(fills, "old()", "new(tp = 1)")) == {
        ("0", "g/w"): dict.fromkeys(range(9), 5),
        ("0", "g/b"): dict.fromkeys(range(3), 6),
    }


def test_a_line_that_has_nothing_to_fill_is_reported() -> None:
    found = graph_of("fill b = 7; fill state g = 0", "old()", "new(tp = 1)")
    assert found.filled[-1] == "nothing by `fill b = 7`: the source has all of it"
    found = graph_of("fill * of buffer = 7; fill state g = 0", "old()", "new(tp = 1)")
    assert found.filled[-1] == "nothing by `fill * of buffer = 7`: no tensor of the model is called so"


@pytest.mark.parametrize(
    ("fills", "source", "target", "code", "said"),
    [
        ("fill state g = 0", "old()", "new(tp = 1, new = 1)", "E301", "fill c = 0"),
        ("fill state g = 0", "old()", "new(tp = 1, rows = 4)", "E302", "fill w = 0"),
        ("fill w = 0", "old()", "new(tp = 1, rows = 2)", "E302", ""),
        ("fill w[l[2..]] = 0; fill state e, g = 0", "old()", "new(tp = 1)", "", ""),
        ("fill w[v[2..]] = 0; fill state e, g = 0", "less()", "new(tp = 1)", "E308", "fill w = 0"),
        ("fill w = 0", "old()", "new(tp = 1)", "E303", "fill state g = 0"),
        ("fill w[l[2..]] = 0; fill w[v[1..]] = 1; fill state g, e = 0", "less()", "new(tp = 1)", "E318", ""),
        ("fill * = 257; fill state g, e = 0", "old()", "new(tp = 1, rows = 4)", "E315", ""),
        ('fill state g = "1e39"', "old()", "new(tp = 1)", "E315", ""),
    ],
)
def test_a_missing_or_impossible_fill_is_refused(fills: str, source: str, target: str, code: str, said: str) -> None:
    if not code:
        assert stored(graph_of(fills, source, target))["0", "g/w"]
        return
    found = refused(fills, source, target)
    assert found.code == code and said in found.remedy, found


@pytest.mark.parametrize(
    "line",
    [
        "fill state h = 0",
        "fill state weight = 0",
        "fill state fp32 = 0",
        "fill state g = weight",
        "fill w[x] = 0",
        "fill w[(l v)] = 0",
        "fill * [l] = 0",
        "fill w of trainable = 0",
        'fill w = "much"',
        'fill w = "nan"',
    ],
)
def test_a_line_that_says_nothing_is_refused(line: str) -> None:
    found = refused(line, "old()", "new(tp = 1)")
    assert found.code == "E326" and found.remedy


# ---- planted -----------------------------------------------------------------------------------------------------------


def planted(change: Any) -> str:
    """Code of the proof's refusal for a graph with one changed fill."""
    made = build(*sides("fill w = 1; fill state e, g = 0", "less()", "new(tp = 1)"))
    fill = next(n for n in made.net if isinstance(n, Fill) and n.lacking and (n.label, n.state) == ("w", "weight"))
    (write,) = made.net.successors(fill)
    made.net.remove_node(fill)
    for other in change(fill):
        made.net.add_edge(other, write)
    with pytest.raises(UcplError) as caught:
        prove(made)
    return caught.value.diagnostics[0].code


def test_a_fill_that_is_wrong_is_found() -> None:
    def at(fill: Fill, by: int) -> Fill:
        return evolve(fill, boxes=fill.boxes.replace(offset=fill.boxes.offset + by))

    assert planted(lambda fill: [fill, evolve(fill)]) == "E341"
    assert planted(lambda fill: []) == "E342"
    assert planted(lambda fill: [evolve(fill, value=2.0)]) == "E349"
    assert planted(lambda fill: [at(fill, 1)]) == "E349", "past the end"
    assert planted(lambda fill: [fill, at(fill, -3)]) == "E341", "over what is moved"


def test_a_fill_of_what_the_source_has_is_found_where_nothing_moves_there() -> None:
    made = build(*sides("fill w = 1; fill state e, g = 0", "less()", "new(tp = 1)"))
    fill = next(n for n in made.net if isinstance(n, Fill) and n.lacking and (n.label, n.state) == ("w", "weight"))
    lost = next(n for n in made.net if str(n).startswith("split   weight of w"))
    for node in [n for n in made.net if "weight of w" in str(n) and str(n)[:5] in ("extra", "merge", "split")]:
        made.net.remove_node(node)
    (write,) = made.net.successors(fill)
    made.net.add_edge(evolve(fill, boxes=lost.boxes, elements=lost.boxes.elements), write)
    with pytest.raises(UcplError) as caught:
        prove(made)
    assert caught.value.diagnostics[0].code == "E349" and "the source has it" in caught.value.diagnostics[0].message


LIVE = """ucpl 1
model m(rows = 5) {
  dim v = rows, h = 2
  embed : v h  dtype f32
  state e : f32
}
layout old(tp) of m {
  mesh tp
  file weights = torch "{tp}"
  embed = pad(v, 8, live)@tp h  as "embed"
  state e = none
}
layout new(tp, rows = 5) of m(rows = rows) {
  mesh tp
  file weights = torch "{tp}"
  embed = pad(v, 8, live)@tp h  as "embed"
  state e = like in weights     as "e"
  fill embed   = 3
  fill state e = 0
}
"""


@pytest.mark.parametrize(("rows", "weights", "moments"), [(5, 0, 16), (6, 2, 12)])
def test_live_rows_are_rows_and_of_a_tensor_that_has_grown_they_are_others(
    rows: int, weights: int, moments: int
) -> None:
    library = load(("a.ucpl", LIVE))
    here, there = (locate(resolve(library, parse_call(c))) for c in ("old(tp = 2)", f"new(tp = 4, rows = {rows})"))
    made = build(here, there)
    prove(made)
    found = stored(made)
    assert sum(len(at) for (_, key), at in found.items() if key == "embed") == weights
    assert sum(len(at) for (_, key), at in found.items() if key == "e") == moments


@pytest.mark.parametrize(
    ("dtype", "held", "lost"),
    [
        ("bf16", (0.0, 0.5, 256.0, -3.0, 2.0**-133), (257.0, 0.1, 2.0**-134, 3.4e38)),
        ("f16", (65504.0, 2.0**-24, 2047.0), (65505.0, 2.0**-25, 2049.0)),
        ("f32", (16777216.0, 2.0**-149), (16777217.0, 0.1, 1e39)),
        ("f64", (0.1, 1e300), ()),
        ("f8_e4m3fn", (448.0, 0.5), (449.0, 17.0)),
        ("i8", (-128.0, 127.0), (128.0, 0.5)),
        ("u8", (255.0,), (-1.0, 256.0)),
        ("bool", (0.0, 1.0), (2.0,)),
        ("f4_e2m1fn", (), (0.0,)),
    ],
)
def test_which_numbers_a_type_has(dtype: str, held: tuple[float, ...], lost: tuple[float, ...]) -> None:
    assert [v for v in held if not holds(dtype, v)] == [] == [v for v in lost if holds(dtype, v)]
