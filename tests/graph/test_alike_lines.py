"""Tensors of one kind, joined once, every element in its place."""

from __future__ import annotations

import numpy as np

from ucpl.graph import build, drawn
from ucpl.graph.graph import SourceBoxes
from ucpl.language import nodes, parse_call
from ucpl.layout import load, resolve
from ucpl.placement import Placement, locate
from ucpl.planning import order
from ucpl.tables.operations import Extract
from ucpl.testing import assert_round_trip, lay_out, numbered, run
from ucpl.verification.proof.coverage import prove

TEXT = """ucpl 1
model raw {
  "a.w" : 6 5
  "b.w" : 6 5
  "c.w" : 6 5
  "a.b" : 7
  "b.b" : 7
  odd   : 3 4
  dtype f32
  state exp_avg, exp_avg_sq : f32
}
layout cut(dp) of any {
  mesh dp
  file weights = torch "rank_{dp}.pt" key "model/{key}"
  file optim   = torch "rank_{dp}.pt" key "optim/{key}/{state}"
  * = _@chunk(dp) ... as "{name}"
  state * = like in optim
}
layout columns(tp) of any {
  mesh tp
  file weights = torch "w_{tp}.pt"
  file optim   = torch "o.pt" key "{state}/{key}"
  *     = _ _@spread(tp) as "{name}.{tp}"
  "a.b" = _ as "a.b"
  "b.b" = _ as "b.b"
  state exp_avg, exp_avg_sq = like in optim
}
"""


def located(call: str) -> Placement:
    library = load(("raw.ucpl", TEXT))
    model = library.model("raw").node
    assert isinstance(model, nodes.Model)
    return locate(resolve(library, parse_call(call), model=model))


def test_one_of_a_kind_is_joined_and_given_for_all() -> None:
    a, b = located("cut(dp = 4)"), located("cut(dp = 3)")
    taken = [n.label for n in drawn(a, b).net if isinstance(n, SourceBoxes)]
    assert taken == ["a.w", "a.b", "odd"]
    graph = build(a, b)
    prove(graph)
    boxes = {n.label: len(n.boxes) for n in graph.net if isinstance(n, Extract)}
    assert set(boxes) == {"a.w", "b.w", "c.w", "a.b", "b.b", "odd"}
    assert boxes["a.w"] == boxes["b.w"] == boxes["c.w"]


def test_every_element_goes_to_its_own_tensor() -> None:
    """All tensors hold their own numbers.

    They go through other degrees and another cut, and back.
    """
    for there in ("cut(dp = 3)", "cut(dp = 1)", "columns(tp = 2)", "columns(tp = 3)"):
        a, b = located("cut(dp = 4)"), located(there)
        start = lay_out(a, numbered(a, {}))
        graph = build(a, b)
        prove(graph)
        plan = order(graph)
        for m in plan.moves:  # by their own names
            assert [plan.tensors[t] for t in m.tensor.tolist()] == [plan.targets[i].label for i in m.target.tolist()]
        found = run(plan, start)
        wanted = lay_out(b, numbered(b, {}))
        assert set(found) == set(wanted)
        for place, array in wanted.items():
            np.testing.assert_array_equal(found[place], array, err_msg=f"{there} {place}")
        assert_round_trip(a, b)


def test_tensors_of_one_kind_are_placed_once() -> None:
    parts = {(p.label, p.state): p for p in located("cut(dp = 4)").parts}
    one, other = parts["a.w", "weight"], parts["c.w", "exp_avg"]
    assert one.folded.low is other.folded.low  # `alike_lines_of` recognises them by it
    assert one.folded is parts["a.w", "exp_avg"].folded
    assert set(one.folded.tensor.tolist()) == {0} and set(other.folded.tensor.tolist()) == {2}
    assert [h.shape for h in one.homes] == [h.shape for h in other.homes]
