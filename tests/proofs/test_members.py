"""A mean or sum of other members than its layout says is refused by the proof, which is told nothing by who made the graph."""

from __future__ import annotations

import pytest
from attrs import evolve

from tests.laws import moves as mv
from ucpl.errors import UcplError
from ucpl.graph import Graph, build
from ucpl.proofs.coverage import prove
from ucpl.regions import locate
from ucpl.testing import Example

TEXT = (
    "ucpl 1\nmodel m {\n dim a = 4\n dtype f32\n v : a\n}\n"
    'layout x(dp, tp) of m {\n mesh dp tp\n file weights = torch "{dp}.{tp}.pt"\n v = a sum @tp as "v"\n}\n'
    'layout y(tp) of m {\n mesh tp\n file weights = torch "{tp}.pt"\n v = a@tp as "v"\n}\n'
)


def graph() -> Graph:
    a, b = (locate(Example(TEXT, call).layout()) for call in ("x(dp = 2, tp = 3)", "y(tp = 2)"))
    return build(a, b)


def refused(made: Graph) -> str:
    with pytest.raises(UcplError) as caught:
        prove(made)
    return caught.value.diagnostics[0].code


def over(made: Graph, axes: tuple[tuple[int, int], ...]) -> Graph:
    (runs,) = mv.told(made)
    mv._plant(made, [evolve(runs, over=axes)])
    return made


def test_a_sum_over_its_own_axes_is_proved_and_over_others_is_refused() -> None:
    prove(over(graph(), ((1, 3),)))
    for axes in (((3, 2),), ((1, 3), (3, 2)), ()):
        assert refused(over(graph(), axes)) == "E346"


def test_a_mean_where_the_layout_says_sum_is_refused() -> None:
    made = graph()
    mv.rename(made, 0, kind="mean")
    assert refused(made) == "E346"


def test_one_addend_that_is_copied_is_refused() -> None:
    made = graph()
    (runs,) = mv.told(made)
    rank_of = [made.sources[int(s)].rank for s in runs.source.tolist()]
    one = runs.take(runs.source == runs.source[rank_of.index(4)])
    mv._plant(made, [evolve(one, kind="copy", over=())])
    assert refused(made) in ("E343", "E346")
    rest = runs.take(runs.source != runs.source[rank_of.index(4)])
    mv._plant(made, [evolve(one, kind="copy", over=()), evolve(rest, kind="check", over=())])
    assert refused(made) == "E346"
