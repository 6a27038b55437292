"""The proof refuses a mean or sum of other members than declared.

It shares nothing with the code that made the graph.
"""

from __future__ import annotations

import numpy as np
import pytest
from attrs import evolve

from tests.laws import moves as mv
from ucpl.errors import UcplError
from ucpl.graph import Graph, build
from ucpl.placement import locate
from ucpl.testing import Example
from ucpl.verification.proof.coverage import prove
from ucpl.verification.proof.intervals import pairs_in
from ucpl.verification.proof.reductions import CombinedParts, places

TEXT = (
    "ucpl 1\nmodel m {\n dim a = 4\n dtype f32\n v : a\n}\n"
    'layout x(dp, tp) of m {\n mesh dp tp\n file weights = torch "{dp}.{tp}.pt"\n v = a sum @tp as "v"\n}\n'
    'layout y(tp) of m {\n mesh tp\n file weights = torch "{tp}.pt"\n v = a@tp as "v"\n}\n'
)


def graph() -> Graph:
    a, b = (locate(Example(TEXT, call).layout()) for call in ("x(dp = 2, tp = 3)", "y(tp = 2)"))
    return build(a, b)


def refused(made: Graph) -> str:
    return found(made)[0]


def found(made: Graph) -> tuple[str, str]:
    with pytest.raises(UcplError) as caught:
        prove(made)
    (it,) = caught.value.diagnostics
    return it.code, it.message


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


BOTH = TEXT.replace("sum @tp", "mean @tp").replace("v = a@tp as", "v = a as")


def twice() -> Graph:
    """A mean of three parts that is written to two places."""
    a, b = (locate(Example(BOTH, call).layout()) for call in ("x(dp = 1, tp = 3)", "y(tp = 2)"))
    return build(a, b)


def row_of(made: Graph, source: str, target: str) -> tuple[int, int]:
    (runs,) = mv.told(made)
    ends = [
        (made.sources[s].file, made.targets[t].file)
        for s, t in zip(runs.source.tolist(), runs.target.tolist(), strict=True)
    ]
    return 0, ends.index((source, target))


@pytest.mark.parametrize("target", ["0.pt", "1.pt"])
def test_a_part_that_one_of_two_places_lacks_is_missed_though_it_is_used(target: str) -> None:
    prove(twice())
    made = twice()
    mv.drop(made, row_of(made, "0.1.pt", target))
    assert found(made) == ("E346", "weight of v[a=0] is put together without its part in 0.1.pt: v")
    made = twice()
    mv.cut_short(made, row_of(made, "0.1.pt", target))
    assert found(made) == ("E346", "weight of v[a=3] is put together without its part in 0.1.pt: v")


def test_a_part_that_is_put_in_twice_is_reported() -> None:
    made = twice()
    mv.instead(made, row_of(made, "0.1.pt", "1.pt"), row_of(made, "0.2.pt", "1.pt"))
    assert found(made) == ("E346", "weight of v[a=0] is put together without its part in 0.1.pt: v")
    made = twice()
    (runs,) = mv.told(made)
    mv._plant(made, [runs.take(np.array([*range(len(runs)), row_of(made, "0.2.pt", "1.pt")[1]]))])
    assert found(made) == ("E346", "weight of v[a=0] has one of its parts twice: 0.2.pt: v")


def test_places_that_two_sources_divide_in_two_ways_count_once() -> None:
    """One part has a piece in one box, another in two.

    A third piece is another tensor's.
    """
    low = np.array([[0, 0], [0, 0], [2, 0], [1, 1]])
    high = np.array([[4, 3], [2, 3], [4, 3], [2, 2]])
    boxes = places(CombinedParts(np.array([0, 1, 2, 3]), np.array([5, 5, 5, 6]), low, high), 2)
    for piece, size in ((5, 12), (6, 1)):
        mine = boxes.piece == piece
        index = [i for a, b in zip(boxes.low[mine], boxes.high[mine], strict=True) for i in np.ndindex(*(b - a))]
        assert len(index) == size and boxes.volume[mine].sum() == size
    assert not len(pairs_in(boxes)[0])
