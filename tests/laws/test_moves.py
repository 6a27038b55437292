"""Laws of `build`, `order` and `prove`, against the oracle.

Each element goes to its own place, once, and no mistake passes.

The oracle gives the elements and their places, one by one; tests/laws/moves.py reads the moves.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from tests.laws import moves as mv
from tests.laws.agreement import TOGETHER, both
from tests.oracle import Meaning
from ucpl.errors import UcplError
from ucpl.graph import Graph, build
from ucpl.placement import locate
from ucpl.placement.placement import LOOSE
from ucpl.planning import Plan, order
from ucpl.testing import Example, layout_pairs, models
from ucpl.verification.proof.coverage import prove

Pair = tuple[Example, Example]


class Case:
    """A pair of layouts.

    The graph between them, and the oracle's result for both sides, computed on request, since it is slow.
    """

    def __init__(self, pair: Pair) -> None:
        self.pair = pair
        self.placements = [locate(e.layout()) for e in pair]
        self.graph = build(*self.placements)

    @cached_property
    def source(self) -> mv.Cells:
        return self.sides[0]

    @cached_property
    def target(self) -> mv.Cells:
        return self.sides[1]

    @cached_property
    def sides(self) -> tuple[mv.Cells, mv.Cells]:
        counts = {path: t.counts for path, t in self.placements[0].layout.tensors.items()}
        return mv.without_lone_rows((mv.cells(self._meaning(0)), mv.cells(self._meaning(1))), counts)

    @cached_property
    def parts(self) -> dict[mv.Cell, list[tuple[mv.Place, int]]]:
        """Of each element of the source that is put together.

        If its parts are, each on one rank.
        """
        return mv.parts(self._meaning(0))

    def _meaning(self, side: int) -> Meaning:
        e = self.pair[side]
        return both(e.text, e.call, name=e.name)[0]

    def name(self, cell: mv.Cell) -> str:
        state, path, index = cell
        layout = self.placements[0].layout
        tensor = layout.tensors[path]
        rows = zip(tensor.dims, tensor.indices, index, strict=True)
        named = [f"{d}={has[i] if i < len(has) else layout.sizes[d] + i - len(has)}" for d, has, i in rows]
        return f"{state} of {path}[{', '.join(named)}]"

    def result(self, fills: list[mv.Fill]) -> dict[tuple[mv.Place, int], list[tuple[str, mv.Cell | None]]]:
        """The source of each position of the target.

        (kind, element of the source), by `fills`.
        """
        out: dict[tuple[mv.Place, int], list[tuple[str, mv.Cell | None]]] = {}
        for f in fills:
            place, position = f.source
            held = self.source.get(place, [])
            cell = held[position] if 0 <= position < len(held) else None
            out.setdefault(f.target, []).append((f.kind, cell))
        return out


@given(models().flatmap(layout_pairs))
@settings(max_examples=40)
def test_a_plan_is_right_element_by_element(pair: Pair) -> None:
    case = Case(pair)
    plan = order(case.graph)
    fills = mv.fills(plan)
    comes_once_to_each_of_its_places(case, fills, mv.second_names(plan))
    is_moved_or_checked(case, fills)
    is_written_shortly(plan)


def comes_once_to_each_of_its_places(case: Case, fills: list[mv.Fill], shared: dict[mv.Place, mv.Place]) -> None:
    """Every element, and nothing else anywhere.

    Combined values, with every part once.
    """
    found = case.result(fills)
    together: dict[tuple[mv.Place, int], list[tuple[mv.Place, int]]] = {}
    for f in fills:
        if f.kind in TOGETHER:
            together.setdefault(f.target, []).append(f.source)
    for place, cells in case.target.items():
        owner = shared.get(place, place)
        for position, cell in enumerate(cells):
            came = found.pop((place, position), []) if owner == place else []
            if owner != place:
                assert case.target[owner][position] == cell, (place, position, "one storage, two meanings")
                continue
            if cell is None:
                assert came == [], (place, position, "is padding")
                continue
            assert {c for _, c in came} == {cell}, (place, position, case.name(cell))
            written = [kind for kind, _ in came if kind != "check"]
            assert written == ["copy"] or (len(set(written)) == 1 and written[0] in TOGETHER), (place, position)
            if written != ["copy"]:
                assert sorted(together[place, position]) == case.parts[cell], (place, position, case.name(cell))
    assert found == {}, "what no tensor of the target has"


def is_moved_or_checked(case: Case, fills: list[mv.Fill]) -> None:
    """Every element of the source, unless any of its copies will do."""
    used = {f.source for f in fills}
    checked = [f.source for f in fills if f.kind == "check"]
    assert len(checked) == len(set(checked)), "held against one place of the target, and not against each"
    loose = {
        (home.file, "/".join(map(str, home.key)))
        for part in case.placements[0].parts
        for number, home in enumerate(part.homes)
        if np.isin(part.pieces.policy[part.pieces.home == number], LOOSE).any()
    }
    for place, cells in case.source.items():
        for position, cell in enumerate(cells):
            assert cell is None or place in loose or (place, position) in used, case.name(cell)


def is_written_shortly(plan: Plan) -> None:
    """Sorted by target and position; neighbours on both sides are one move.

    The expensive operations are counted here.
    """
    for m in plan.moves:
        places = list(zip(m.target.tolist(), m.target_offset.tolist(), strict=True))
        assert places == sorted(places)
        assert (m.shape >= 1).all() and ((m.shape == 1).all(axis=1) | (m.shape[:, 0] > 1)).all()
        for strides, sizes in zip(m.target_stride.tolist(), m.shape.tolist(), strict=True):
            steps = [s for s, n in zip(strides, sizes, strict=True) if n > 1]
            assert steps == sorted(steps, reverse=True)
        runs = [r for r in range(len(m)) if m.shape[r, 1:].max(initial=1) == 1]
        for a, b in pairwise(runs):
            if b != a + 1 or (m.source[a], m.target[a]) != (m.source[b], m.target[b]):
                continue
            ones = [m.shape[r, 0] == 1 or (m.source_stride[r, 0], m.target_stride[r, 0]) == (1, 1) for r in (a, b)]
            n = m.shape[a, 0]
            follows = m.source_offset[a] + n == m.source_offset[b] and m.target_offset[a] + n == m.target_offset[b]
            assert not (all(ones) and follows), "two runs that are one"


def test_numbers_of_moves_are_those_of_a_person_with_a_pencil() -> None:
    """Rows to rows is one run.

    Rows to columns one strided box a rank; states of a line are joined alike.
    """
    text = """ucpl 1
model m {
  dim a = 4, b = 6
  dtype f32
  w : a b
}
layout rows(tp) of m {
  mesh tp
  file weights = torch "{tp}.pt"
  w = a@tp b as "w"
}
layout columns(tp) of m {
  mesh tp
  file weights = torch "{tp}.pt"
  w = a b@tp as "w"
}
"""

    def count(a: str, b: str) -> list[tuple[int, ...]]:
        plan = order(build(*(locate(Example(text, call).layout()) for call in (a, b))))
        (m,) = plan.moves
        return sorted(tuple(n for n in shape if n > 1) for shape in m.shape.tolist())

    assert count("rows(tp = 1)", "rows(tp = 1)") == [(24,)]
    assert count("rows(tp = 2)", "rows(tp = 4)") == [(6,)] * 4
    assert count("rows(tp = 4)", "rows(tp = 2)") == [(6,)] * 4
    assert count("rows(tp = 1)", "columns(tp = 2)") == [(4, 3)] * 2
    assert count("rows(tp = 2)", "columns(tp = 3)") == [(2, 2)] * 6


# ---- planted mistakes --------------------------------------------------------------------------------------------------

Plant = Callable[[Graph, Any], None]


def _shift(graph: Graph, chance: Any) -> None:
    mv.shift(graph, chance.choice(mv.moves(graph)), chance.randrange(2), chance.choice([-2, -1, 1, 2, 5]))


def _swap(graph: Graph, chance: Any) -> None:
    pairs = mv.rows_alike(graph)
    assume(pairs)
    one, other = chance.choice(pairs)
    mv.swap(graph, one, other, chance.randrange(2))


def _square(graph: Graph) -> list[Any]:
    """Moves of boxes that have two dims at least."""
    return [w for w, shape in mv.shapes_of(graph).items() if sum(n > 1 for n in shape) >= 2]


def _turn(graph: Graph, chance: Any) -> None:
    mv.turn(graph, chance.choice(_square(graph)), chance.randrange(2))


def _drop(graph: Graph, chance: Any) -> None:
    mv.drop(graph, chance.choice(mv.moves(graph)))


def _hole_and_overlap(graph: Graph, chance: Any) -> None:
    pairs = mv.rows_alike(graph)
    assume(pairs)
    lost, twice = chance.choice(pairs)
    mv.instead(graph, lost, twice)


def _cut_short(graph: Graph, chance: Any) -> None:
    long = [w for w, shape in mv.shapes_of(graph).items() if shape[0] > 1]
    assume(long)
    mv.cut_short(graph, chance.choice(long))


def _kind(graph: Graph, chance: Any) -> None:
    runs = mv.told(graph)
    which = chance.randrange(len(runs))
    mv.rename(graph, which, kind="check" if runs[which].kind == "copy" else "copy")


def _state(graph: Graph, chance: Any) -> None:
    runs = mv.told(graph)
    which = chance.randrange(len(runs))
    others = {p.state for p in (*graph.source.parts, *graph.target.parts)} - {runs[which].state}
    assume(others)
    mv.rename(graph, which, state=chance.choice(sorted(others)))


MISTAKES: dict[str, Plant] = {
    "a shifted end": _shift,
    "two ends swapped": _swap,
    "two strides swapped": _turn,
    "a hole": _drop,
    "a hole beside an overlap of its size": _hole_and_overlap,
    "an element too few": _cut_short,
    "another kind": _kind,
    "another state": _state,
}


def effect(graph: Graph) -> list[Any]:
    """All that a graph does, element by element.

    The rest is the form of the table.
    """
    return sorted((f.kind, f.state, f.source, f.target) for _, fills in mv.fills_of(graph) for f in fills)


@pytest.mark.parametrize("mistake", MISTAKES)
@given(pair=models().flatmap(layout_pairs), chance=st.randoms(use_true_random=False))
@settings(max_examples=10, suppress_health_check=list(HealthCheck))
def test_a_planted_mistake_is_refused_and_the_element_that_is_named_is_a_wrong_one(
    mistake: str, pair: Pair, chance: Any
) -> None:
    case = Case(pair)
    graph = case.graph
    assume(mv.moves(graph))
    assume(
        mistake != "two strides swapped" or _square(graph)
    )  # most graphs have none: it is asked before all that takes long
    before = effect(graph)
    MISTAKES[mistake](graph, chance)
    after = effect(graph)
    assume(after != before)
    if mistake in ("another kind", "a hole", "a hole beside an overlap of its size", "an element too few"):
        assume(not only_checks_of_any(case, before, after))
    with pytest.raises(UcplError) as caught:
        prove(graph)
    (found,) = caught.value.diagnostics
    assert found.code in ("E340", "E341", "E342", "E343", "E344", "E346"), found.message
    assert named(found.code, found.message) & wrong(case, found.code), found.message


def only_checks_of_any(case: Case, before: list[Any], after: list[Any]) -> bool:
    """Return True if only redundant checks are lost.

    Other checks or copies read the same elements.
    """
    still, kept = {f[2] for f in after}, set(after)
    return all(f[0] == "check" and f[2] in still for f in before if f not in kept)


ELEMENT = r"[^ \[]+ of [^\[]+\[[^\]]*\]"


def named(code: str, message: str) -> set[str]:
    found = re.match(ELEMENT, message)
    assert found, message
    return {found[0]}


def wrong(case: Case, code: str) -> set[str]:
    """Elements that a mistaken graph gets wrong by `code`, one by one."""
    fills = [f for _, some in mv.fills_of(case.graph) for f in some]
    goals = {(place, i): c for place, cells in case.target.items() for i, c in enumerate(cells) if c is not None}
    came = case.result(fills)
    out: set[mv.Cell] = set()
    if code == "E340":  # brought to another's place, or from another's: the message begins with the moved element
        for f in fills:
            cell = at(case.source, f.source)
            if cell is not None and (cell != at(case.target, f.target) or f.state != cell[0]):
                out.add(cell)
    elif code == "E341":
        for goal, element in goals.items():
            kinds = [kind for kind, _ in came.get(goal, [])]
            if kinds.count("copy") > 1 or ("copy" in kinds and set(kinds) & set(TOGETHER)):
                out.add(element)
    elif code == "E342":
        for goal, element in goals.items():
            if not any(kind != "check" for kind, _ in came.get(goal, [])):
                out.add(element)
    elif code == "E343":
        used = {f.source for f in fills}
        for place, cells in case.source.items():
            out |= {c for i, c in enumerate(cells) if c is not None and (place, i) not in used}
    elif code == "E344":  # from or to a place without an element: the named element is at the other end
        for f in fills:
            cell, goal_cell = at(case.source, f.source), at(case.target, f.target)
            if cell is None and goal_cell is not None:
                out.add(goal_cell)
            if goal_cell is None and cell is not None:
                out.add(cell)
    elif code == "E346":  # put together of other parts than those that there are
        sources: dict[tuple[mv.Place, int], list[tuple[mv.Place, int]]] = {}
        for f in fills:
            if f.kind in TOGETHER:
                sources.setdefault(f.target, []).append(f.source)
        out |= {goals[goal] for goal, ends in sources.items() if sorted(ends) != case.parts.get(goals[goal], [])}
    return {case.name(c) for c in out}


def at(cells: mv.Cells, end: tuple[mv.Place, int]) -> mv.Cell | None:
    held = cells.get(end[0], [])
    return held[end[1]] if 0 <= end[1] < len(held) else None


def test_a_right_graph_has_no_wrong_element() -> None:
    """The oracle of mistakes finds none where none is."""
    text = (
        "ucpl 1\nmodel m {\n  dim a = 4\n  dtype f32\n  v : a\n}\n"
        'layout x(tp) of m {\n  mesh tp\n  file weights = torch "{tp}.pt"\n  v = a@tp as "v"\n}\n'
    )
    case = Case((Example(text, "x(tp = 2)"), Example(text, "x(tp = 4)")))
    assert [wrong(case, code) for code in ("E340", "E341", "E342", "E343", "E344")] == [set()] * 5
    mv.rename(case.graph, 0, kind="check")
    assert wrong(case, "E342") == {f"weight of v[a={i}]" for i in range(4)}
