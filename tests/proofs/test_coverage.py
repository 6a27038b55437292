"""The independent proof finds every mistake that is planted, and names the element. Counts stay the same on purpose."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.laws.test_round_trip import TWO, shipped
from ucpl.errors import UcplError
from ucpl.graph import Graph, build
from ucpl.proofs.coverage import prove
from ucpl.regions import Placement, locate
from ucpl.testing import Example, layout_pairs, models


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


def change(graph: Graph, batch: int, **columns: Any) -> None:
    """Replace columns of one batch's fragments."""
    b = graph.batches[batch]
    graph.batches[batch] = evolve(b, fragments=evolve(b.fragments, **columns))


def copies(graph: Graph, tensor: str) -> tuple[int, Any]:
    """The batch of copies that moves a tensor, and which of its rows do."""
    number = graph.target.tensors.index(tensor)
    for i, b in enumerate(graph.batches):
        rows = np.flatnonzero(b.fragments.tensor == number)
        if b.kind == "copy" and len(rows):
            return i, rows
    raise AssertionError(tensor)


@given(models().flatmap(layout_pairs))
@settings(max_examples=60)
def test_a_right_graph_is_proved(pair: tuple[Example, Example]) -> None:
    graph = build(*(locate(e.layout()) for e in pair))
    prove(graph)


@given(models().flatmap(layout_pairs), st.randoms(use_true_random=False))
@settings(max_examples=120)
def test_any_shift_of_any_end_of_any_move_is_found(pair: tuple[Example, Example], chance: Any) -> None:
    graph = build(*(locate(e.layout()) for e in pair))
    batches = [i for i, b in enumerate(graph.batches) if b.kind == "copy" and len(b.fragments)]
    if not batches:
        return
    i = chance.choice(batches)
    fragments = graph.batches[i].fragments
    row = chance.randrange(len(fragments))
    name = chance.choice(["source_offset", "target_offset"])
    column = getattr(fragments, name).copy()
    column[row] += chance.choice([-1, 1, 2])
    change(graph, i, **{name: column})
    assert refused(graph)[0] in ("E340", "E344")


def test_two_moves_of_one_size_whose_targets_are_swapped() -> None:
    graph = joined()
    i, rows = copies(graph, "w")
    offset = graph.batches[i].fragments.target_offset.copy()
    home = graph.batches[i].fragments.target.copy()
    a, b = rows[0], next(r for r in rows if home[r] != home[rows[0]])
    offset[[a, b]], home[[a, b]] = offset[[b, a]], home[[b, a]]
    change(graph, i, target_offset=offset, target=home)
    assert refused(graph) == ("E340", "weight of w[a=0, b=0] is brought to the place of weight of w[a=0, b=1]")


def test_two_moves_of_one_size_whose_sources_are_swapped() -> None:
    graph = joined()
    i, rows = copies(graph, "w")
    offset, home = graph.batches[i].fragments.source_offset.copy(), graph.batches[i].fragments.source.copy()
    a, b = rows[0], next(r for r in rows if home[r] != home[rows[0]])
    offset[[a, b]], home[[a, b]] = offset[[b, a]], home[[b, a]]
    change(graph, i, source_offset=offset, source=home)
    assert refused(graph) == ("E340", "weight of w[a=2, b=0] is brought to the place of weight of w[a=0, b=0]")


def test_two_strides_swapped() -> None:
    text = TWO.replace("a = 4, b = 3", "a = 4, b = 4")
    graph = joined("rows(tp = 1)", "columns(tp = 2)", text)
    i, rows = copies(graph, "w")
    stride = graph.batches[i].fragments.source_stride.copy()
    stride[rows[0]] = stride[rows[0]][::-1]
    change(graph, i, source_stride=stride)
    assert refused(graph)[0] == "E340"


def test_two_parts_that_lie_in_turn_and_change_places() -> None:
    """w u w u ... moved as one run to where u w u w ... belongs: the same elements, each one step off."""
    text = (
        "ucpl 1\nmodel m {\n  dim a = 3, one = 1\n  dtype f32\n  w : a one\n  u : a one\n}\n"
        'layout x() of m {\n  file weights = torch "f"\n  p = a (w: one + u: one) as "p"\n}\n'
        'layout y() of m {\n  file weights = torch "f"\n  p = a (u: one + w: one) as "p"\n}\n'
    )
    graph = joined("x()", "y()", text)
    fragments = graph.batches[0].fragments.take(np.zeros(1, dtype=np.int64))
    change(
        graph,
        0,
        **{n: getattr(fragments, n) for n in ("tensor", "source", "target", "row", "source_part")},
        shape=np.array([[6]]),
        source_offset=np.array([0]),
        target_offset=np.array([0]),
        source_stride=np.array([[1]]),
        target_stride=np.array([[1]]),
    )
    assert refused(graph) == ("E340", "weight of w[a=0, one=0] is brought to the place of weight of u[a=0, one=0]")


def test_a_hole() -> None:
    graph = joined()
    i, rows = copies(graph, "w")
    f = graph.batches[i].fragments
    graph.batches[i] = evolve(graph.batches[i], fragments=f.take(np.setdiff1d(np.arange(len(f)), rows[3:4])))
    code, message = refused(graph)
    assert (code, message) == ("E342", "weight of w[a=2, b=1] is filled by nothing")


def test_a_hole_and_an_overlap_of_its_size() -> None:
    """One move is left out and another done twice: every count is as it was."""
    graph = joined()
    i, rows = copies(graph, "w")
    which = np.arange(len(graph.batches[i].fragments))
    which[rows[3]] = rows[0]
    graph.batches[i] = evolve(graph.batches[i], fragments=graph.batches[i].fragments.take(which))
    assert refused(graph) == ("E341", "weight of w[a=0, b=0] is filled twice")


def test_a_move_into_padding() -> None:
    text = TWO.replace("w = a b@tp as", "w = pad(a, 3) b@tp as")
    graph = joined("rows(tp = 1)", "columns(tp = 1)", text)
    i, rows = copies(graph, "w")
    offset = graph.batches[i].fragments.target_offset.copy()
    offset[rows[0]] += 3
    change(graph, i, target_offset=offset)
    assert refused(graph) == ("E344", "weight of w[a=3, b=0] goes to position 12 of w, where no element lies")


def test_a_copy_that_nobody_checks() -> None:
    graph = joined()
    graph.batches = [b for b in graph.batches if b.kind != "check"]
    assert refused(graph) == ("E343", "weight of v[a=0] is neither used nor checked as a copy")


def test_a_stored_tensor_that_nobody_reads() -> None:
    """Only a part of a tensor is moved, from a stored tensor too few."""
    graph = joined()
    i, rows = copies(graph, "w")
    f = graph.batches[i].fragments
    keep = np.setdiff1d(np.arange(len(f)), rows[f.source[rows] == f.source[rows].max()])
    graph.batches[i] = evolve(graph.batches[i], fragments=f.take(keep))
    assert refused(graph) == ("E342", "weight of w[a=2, b=0] is filled by nothing")


def test_a_state_moved_into_another() -> None:
    graph = build(shipped("zero1(dp = 2)"), shipped("zero1(dp = 3)"))
    exp_avg = next(i for i, b in enumerate(graph.batches) if b.state == "exp_avg")
    change(graph, exp_avg, source=next(b for b in graph.batches if b.state == "exp_avg_sq").fragments.source)
    code, message = refused(graph)
    assert code == "E340" and message.startswith(
        "exp_avg_sq of wte[0, 0] is brought to the place of exp_avg of wte[0, 0]"
    )


def test_moves_that_fit_another_placement() -> None:
    """The target's placement says another order than the one that the moves were made for: equal sizes, equal counts."""
    graph = joined("rows(tp = 1)", "columns(tp = 1)")
    other = located("columns(tp = 1)", TWO.replace("w = a b@tp as", "w = b@tp a as"))
    graph.target = other
    assert refused(graph) == ("E340", "weight of w[a=0, b=1] is brought to the place of weight of w[a=1, b=0]")


def test_a_placement_with_two_elements_on_one_position() -> None:
    graph = joined("rows(tp = 1)", "columns(tp = 1)")
    part = next(p for p in graph.target.parts if p.label == "w")
    pieces = part.pieces
    twice = pieces.take(np.zeros(2, dtype=np.int64))
    twice.low[1], twice.high[1] = [1, 0], [2, 1]
    graph.target.parts = tuple(evolve(p, pieces=twice) if p is part else p for p in graph.target.parts)
    code, message = refused(graph)
    assert code == "E345" and "lie on one position, 0 of w" in message


def test_a_placement_that_lacks_an_element() -> None:
    graph = joined("rows(tp = 1)", "columns(tp = 1)")
    part = next(p for p in graph.target.parts if p.label == "v")
    part.pieces.high[0, 0] = 3
    i, rows = copies(graph, "v")
    shape = graph.batches[i].fragments.shape.copy()
    shape[rows[0], 0] = 3
    change(graph, i, shape=shape)
    assert refused(graph) == ("E342", "weight of v[a=3] is nowhere in the target")


def test_states_left_out_by_name_are_not_missed() -> None:
    prove(build(shipped("zero1(dp = 2)"), shipped("safetensors()"), drop=("fp32", "exp_avg", "exp_avg_sq")))


def test_derived_weights_are_proved() -> None:
    prove(build(shipped("zero3(dp = 2)"), shipped("zero1(dp = 3)")))
    prove(build(shipped("zero1(dp = 3)"), shipped("zero3(dp = 2)")))


def test_two_states_that_are_written_in_each_other_s_place() -> None:
    """What is read is right, and named right; only where it goes is another state's."""
    graph = build(shipped("zero1(dp = 2)"), shipped("zero1(dp = 3)"))
    one, other = (
        next(i for i, b in enumerate(graph.batches) if b.state == state) for state in ("exp_avg", "exp_avg_sq")
    )
    targets = [graph.batches[i].fragments.target for i in (other, one)]
    change(graph, one, target=targets[0])
    change(graph, other, target=targets[1])
    code, message = refused(graph)
    assert code == "E340"
    assert message == "exp_avg of wte[0, 0] is brought to the place of exp_avg_sq of wte[0, 0]"
