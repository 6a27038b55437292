"""The independent proof finds every planted mistake, and names the element.

Counts stay the same on purpose.
"""

from __future__ import annotations

from typing import Any

import networkx as nx
import numpy as np
import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.laws.test_round_trip import TWO, shipped
from ucpl.errors import UcplError
from ucpl.extents import Shelves
from ucpl.graph import Graph, build
from ucpl.placement import Placement, locate
from ucpl.planning import Runs, order
from ucpl.planning.runs import sole
from ucpl.tables.operations import Lane
from ucpl.testing import Example, layout_pairs, models
from ucpl.verification.proof.coverage import prove


def located(call: str, text: str = TWO) -> Placement:
    return locate(Example(text, call).layout())


def joined(source: str = "rows(tp = 2)", target: str = "columns(tp = 3)", text: str = TWO) -> Graph:
    return build(located(source, text), located(target, text))


def refused(graph: Graph) -> tuple[str, str]:
    with pytest.raises(UcplError) as caught:
        prove(graph)
    (found,) = caught.value.diagnostics
    assert found.labels
    return found.code, found.message


def tables(graph: Graph) -> list[Runs]:
    """The graph's moves, tensor by tensor."""
    return list(order(graph).moves)


def planted(graph: Graph, runs: list[Runs]) -> Graph:
    """The graph with other moves, tensor by tensor."""
    return evolve(graph, net=sole(runs, graph.sources, graph.targets, graph.spaces))


def changed(graph: Graph, number: int, **columns: Any) -> Graph:
    """With other values in columns of one kind's moves."""
    runs = tables(graph)
    runs[number] = runs[number].replace(**columns)
    return planted(graph, runs)


def copies(runs: list[Runs], graph: Graph, tensor: str) -> tuple[int, Any]:
    """The copies that move a tensor.

    The run, and its row.
    """
    number = graph.target.tensors.index(tensor)
    for i, r in enumerate(runs):
        rows = np.flatnonzero(r.tensor == number)
        if r.kind == "copy" and len(rows):
            return i, rows
    raise AssertionError(tensor)


@given(models().flatmap(layout_pairs), st.randoms(use_true_random=False))
@settings(max_examples=50)
def test_a_right_graph_is_proved_and_any_shift_is_found(pair: tuple[Example, Example], chance: Any) -> None:
    graph = build(*(locate(e.layout()) for e in pair))
    prove(graph)
    demand_found_of_a_move(graph, chance)
    demand_found_of_what_is_alike(graph, chance)


def demand_found_of_a_move(graph: Graph, chance: Any) -> None:
    """Any end of any move is shifted."""
    runs = tables(graph)
    some = [i for i, r in enumerate(runs) if r.kind == "copy" and len(r)]
    if not some:
        return
    i = chance.choice(some)
    row = chance.randrange(len(runs[i]))
    name = chance.choice(["source_offset", "target_offset"])
    column = getattr(runs[i], name).copy()
    column[row] += chance.choice([-1, 1, 2])
    assert refused(changed(graph, i, **{name: column}))[0] in ("E340", "E344")


def demand_found_of_what_is_alike(graph: Graph, chance: Any) -> None:
    """The same in the tables as they are saved and run.

    Over layers and states with shared rows.
    """
    some = [f for f in graph.flows if f.kind == "copy" and len(f.moves)]
    if not some:
        return
    node = getattr(chance.choice(some), chance.choice(["extract", "place"]))
    offset = node.boxes.offset.copy()
    offset[chance.randrange(len(offset))] += chance.choice([-1, 1, 2])
    other = evolve(node, boxes=node.boxes.replace(offset=offset))
    assert refused(evolve(graph, net=nx.relabel_nodes(graph.net, {node: other})))[0] in ("E340", "E344")


@pytest.mark.parametrize("at_once", [1, 3])
def test_a_proof_in_parts_says_what_one_in_one_part_says(monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
    """Of many moves a part at a time is looked at.

    None is left out between two parts, and the last one counts.
    """
    graph = joined()
    runs = tables(graph)
    monkeypatch.setattr("ucpl.verification.proof.coverage.AT_ONCE", at_once)
    monkeypatch.setattr("ucpl.verification.proof.moves.AT_ONCE", at_once)
    prove(graph)
    for i, of_kind in enumerate(runs):
        for row in range(len(of_kind)):
            moved = of_kind.source_offset.copy()
            moved[row] += 1
            assert refused(changed(graph, i, source_offset=moved))[0] in ("E340", "E344")


@pytest.mark.parametrize("side", ["source", "target"])
def test_a_state_that_is_declared_with_another_and_stored_elsewhere(side: str) -> None:
    """A lane of two states is moved by one stored tensor."""
    graph = build(shipped("zero1(dp = 2)"), shipped("zero1(dp = 3)"))
    nodes = {n: n for n in graph.net}
    for node in graph.net:
        lanes: tuple[Lane, ...] = getattr(node, "lanes", ())
        if [lane.state for lane in lanes] == ["exp_avg", "exp_avg_sq"]:
            shifted = evolve(lanes[1], **{side: getattr(lanes[1], side) - 1})
            nodes[node] = evolve(node, lanes=(lanes[0], shifted))
    assert any(a is not b for a, b in nodes.items())
    assert refused(evolve(graph, net=nx.relabel_nodes(graph.net, nodes)))[0] in ("E340", "E341", "E342", "E344")


def test_two_moves_of_one_size_whose_targets_are_swapped() -> None:
    graph = joined()
    runs = tables(graph)
    i, rows = copies(runs, graph, "w")
    offset = runs[i].target_offset.copy()
    home = runs[i].target.copy()
    a, b = rows[0], next(r for r in rows if home[r] != home[rows[0]])
    offset[[a, b]], home[[a, b]] = offset[[b, a]], home[[b, a]]
    assert refused(changed(graph, i, target_offset=offset, target=home)) == (
        "E340",
        "weight of w[a=0, b=0] is brought to the place of weight of w[a=0, b=1]",
    )


def test_two_moves_of_one_size_whose_sources_are_swapped() -> None:
    graph = joined()
    runs = tables(graph)
    i, rows = copies(runs, graph, "w")
    offset, home = runs[i].source_offset.copy(), runs[i].source.copy()
    a, b = rows[0], next(r for r in rows if home[r] != home[rows[0]])
    offset[[a, b]], home[[a, b]] = offset[[b, a]], home[[b, a]]
    assert refused(changed(graph, i, source_offset=offset, source=home)) == (
        "E340",
        "weight of w[a=2, b=0] is brought to the place of weight of w[a=0, b=0]",
    )


def test_two_strides_swapped() -> None:
    text = TWO.replace("a = 4, b = 3", "a = 4, b = 4")
    graph = joined("rows(tp = 1)", "columns(tp = 2)", text)
    runs = tables(graph)
    i, rows = copies(runs, graph, "w")
    stride = runs[i].source_stride.copy()
    stride[rows[0]] = stride[rows[0]][::-1]
    assert refused(changed(graph, i, source_stride=stride))[0] == "E340"


def test_two_parts_that_are_in_turn_and_change_places() -> None:
    """w u w u ...

    Moved as one run to the place of u w u w ...: the same elements, each one step off.
    """
    text = (
        "ucpl 1\nmodel m {\n  dim a = 3, one = 1\n  dtype f32\n  w : a one\n  u : a one\n}\n"
        'layout x() of m {\n  file weights = torch "f"\n  p = a (w: one + u: one) as "p"\n}\n'
        'layout y() of m {\n  file weights = torch "f"\n  p = a (u: one + w: one) as "p"\n}\n'
    )
    graph = joined("x()", "y()", text)
    (runs,) = tables(graph)
    one = runs.take(np.zeros(1, dtype=np.int64)).replace(
        shape=np.array([[6]]),
        source_offset=np.array([0]),
        target_offset=np.array([0]),
        source_stride=np.array([[1]]),
        target_stride=np.array([[1]]),
    )
    assert refused(planted(graph, [one])) == (
        "E340",
        "weight of w[a=0, one=0] is brought to the place of weight of u[a=0, one=0]",
    )


def test_a_hole() -> None:
    graph = joined()
    runs = tables(graph)
    i, rows = copies(runs, graph, "w")
    runs[i] = runs[i].take(np.setdiff1d(np.arange(len(runs[i])), rows[3:4]))
    code, message = refused(planted(graph, runs))
    assert (code, message) == ("E342", "weight of w[a=2, b=1] is filled by nothing")


def test_a_hole_and_an_overlap_of_its_size() -> None:
    """One move is left out and another done twice.

    Every count is as it was.
    """
    graph = joined()
    runs = tables(graph)
    i, rows = copies(runs, graph, "w")
    which = np.arange(len(runs[i]))
    which[rows[3]] = rows[0]
    runs[i] = runs[i].take(which)
    assert refused(planted(graph, runs)) == ("E341", "weight of w[a=0, b=0] is filled twice")


def test_a_move_into_padding() -> None:
    text = TWO.replace("w = a b@tp as", "w = pad(a, 3) b@tp as")
    graph = joined("rows(tp = 1)", "columns(tp = 1)", text)
    runs = tables(graph)
    i, rows = copies(runs, graph, "w")
    offset = runs[i].target_offset.copy()
    offset[rows[0]] += 3
    assert refused(changed(graph, i, target_offset=offset)) == (
        "E344",
        "weight of w[a=3, b=0] goes to position 12 of w, where no element lies",
    )


def test_a_copy_that_nobody_checks() -> None:
    graph = joined()
    assert refused(planted(graph, [r for r in tables(graph) if r.kind != "check"])) == (
        "E343",
        "weight of v[a=0] is neither used nor checked as a copy",
    )


def test_a_stored_tensor_that_nobody_reads() -> None:
    """A part of a tensor is moved, from too few stored tensors."""
    graph = joined()
    runs = tables(graph)
    i, rows = copies(runs, graph, "w")
    keep = np.setdiff1d(np.arange(len(runs[i])), rows[runs[i].source[rows] == runs[i].source[rows].max()])
    runs[i] = runs[i].take(keep)
    assert refused(planted(graph, runs)) == ("E342", "weight of w[a=2, b=0] is filled by nothing")


def test_a_state_moved_into_another() -> None:
    graph = build(shipped("zero1(dp = 2)"), shipped("zero1(dp = 3)"))
    runs = tables(graph)
    exp_avg = next(i for i, r in enumerate(runs) if r.state == "exp_avg")
    other = next(r for r in runs if r.state == "exp_avg_sq")
    code, message = refused(changed(graph, exp_avg, source=other.source))
    assert code == "E340" and message.startswith(
        "exp_avg_sq of wte[0, 0] is brought to the place of exp_avg of wte[0, 0]"
    )


def moved_to(graph: Graph, target: Placement) -> Graph:
    """The moves against another target with stored tensors of equal names."""
    shelves = tuple(
        evolve(s, block=block)
        for s, block in zip(graph.targets.shelves, (b for p in target.parts for b in p.homes.blocks), strict=True)
    )
    return evolve(graph, target=target, targets=Shelves(shelves))


def test_moves_that_fit_another_placement() -> None:
    """The target's placement has another order than the moves: equal sizes, counts."""
    graph = joined("rows(tp = 1)", "columns(tp = 1)")
    other = located("columns(tp = 1)", TWO.replace("w = a b@tp as", "w = b@tp a as"))
    assert refused(moved_to(graph, other)) == (
        "E340",
        "weight of w[a=0, b=1] is brought to the place of weight of w[a=1, b=0]",
    )


def test_a_placement_with_two_elements_on_one_position() -> None:
    graph = joined("rows(tp = 1)", "columns(tp = 1)")
    part = next(p for p in graph.target.parts if p.label == "w")
    twice = part.folded.take(np.zeros(2, dtype=np.int64))
    twice.low[1], twice.high[1] = [1, 0], [2, 1]
    parts = tuple(evolve(p, folded=twice) if p is part else p for p in graph.target.parts)
    code, message = refused(evolve(graph, target=evolve(graph.target, parts=parts)))
    assert code == "E345" and "share one position, 0 of w" in message


def test_a_placement_that_lacks_an_element() -> None:
    graph = joined("rows(tp = 1)", "columns(tp = 1)")
    part = next(p for p in graph.target.parts if p.label == "v")
    part.folded.high[0, 0] = 3
    runs = tables(graph)
    i, rows = copies(runs, graph, "v")
    shape = runs[i].shape.copy()
    shape[rows[0], 0] = 3
    assert refused(changed(graph, i, shape=shape)) == ("E342", "weight of v[a=3] is nowhere in the target")


def test_states_left_out_by_name_are_not_missed() -> None:
    prove(build(shipped("zero1(dp = 2)"), shipped("safetensors()"), drop=("fp32", "exp_avg", "exp_avg_sq")))


def test_derived_weights_are_proved() -> None:
    prove(build(shipped("zero3(dp = 2)"), shipped("zero1(dp = 3)")))
    prove(build(shipped("zero1(dp = 3)"), shipped("zero3(dp = 2)")))


def test_two_states_that_are_written_in_each_other_s_place() -> None:
    """The read elements are right, and named right.

    Only their place is another state's.
    """
    graph = build(shipped("zero1(dp = 2)"), shipped("zero1(dp = 3)"))
    runs = tables(graph)
    one, other = (next(i for i, r in enumerate(runs) if r.state == state) for state in ("exp_avg", "exp_avg_sq"))
    runs[one], runs[other] = runs[one].replace(target=runs[other].target), runs[other].replace(target=runs[one].target)
    code, message = refused(planted(graph, runs))
    assert code == "E340"
    assert message == "exp_avg of wte[0, 0] is brought to the place of exp_avg_sq of wte[0, 0]"


def test_a_state_that_is_stored_otherwise_is_not_proved_by_another() -> None:
    """Two states share a node's table, and one of them lies elsewhere.

    The proof of the first does not cover it.
    """
    graph = build(shipped("zero1(dp = 2)"), shipped("zero1(dp = 3)"))
    part = next(p for p in graph.target.parts if p.state == "exp_avg_sq" and len(p.folded) > 1)
    offset = part.folded.offset.copy()
    offset[0] += 1
    moved = evolve(part, folded=part.folded.replace(offset=offset))
    parts = tuple(moved if p is part else p for p in graph.target.parts)
    code, message = refused(evolve(graph, target=evolve(graph.target, parts=parts)))
    assert code in ("E340", "E344", "E345") and "exp_avg_sq" in message


@pytest.mark.parametrize("side", ["sources", "targets"])
def test_a_state_whose_storage_is_another_s_is_not_proved_by_one_that_has_its_own(side: str) -> None:
    """Equal storage, but one tensor is a second name.

    The moves to it have no place.
    """
    graph = build(shipped("zero1(dp = 2)"), shipped("zero1(dp = 3)"))
    stored: Shelves = getattr(graph, side)
    shelves = list(stored.shelves)
    number = next(i for i, shelf in enumerate(shelves) if shelf.state == "exp_avg_sq")
    shares = np.full(len(shelves[number]), -1, dtype=np.int64)
    shares[0] = stored.starts[number] + 1
    shelves[number] = evolve(shelves[number], shares=shares)
    made = Shelves(tuple(shelves))
    code, message = refused(evolve(graph, sources=made) if side == "sources" else evolve(graph, targets=made))
    assert code == "E344" and "where no element lies" in message


LED = (
    "ucpl 1\nmodel m {\n  dim a = 4, b = 3\n  dtype f32\n  w : a b\n}\n"
    'layout led(dp, tp) of m {\n  mesh dp tp\n  file weights = torch "{dp}.{tp}"\n  w = a b  any @dp as "w"\n}\n'
    'layout held(dp, tp) of m {\n  mesh dp tp\n  file weights = torch "{dp}.{tp}"\n'
    '  w = a b  any @dp as "w"\n  w = a b  at tp[0] as "whole"\n}\n'
)


def unchecked(source: str) -> Graph:
    graph = joined(source, "led(dp = 1, tp = 1)", LED)
    prove(graph)
    return planted(graph, [r for r in tables(graph) if r.kind == "copy"])


def test_what_leads_is_held_against_its_equals() -> None:
    """Ranks of tp lead alike at the first dp.

    One is read, and the others are checked, or the proof names the element.
    """
    assert refused(unchecked("led(dp = 2, tp = 3)")) == (
        "E343",
        "weight of w[a=0, b=0] is neither used nor checked as a copy",
    )


def test_what_leads_gives_way_to_a_home_that_counts() -> None:
    """Of the tensor's other home there is one copy for each dp.

    The leading copy is not checked, and not reported.
    """
    graph = joined("held(dp = 2, tp = 3)", "led(dp = 1, tp = 1)", LED)
    read = {str(graph.sources[n].key) for r in tables(graph) for n in r.source.tolist()}
    assert read and all("whole" in key for key in read)
    prove(graph)
