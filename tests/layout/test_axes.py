"""Cuts of an axis, compared with torch and NumPy.

Also the results of the walks over a pattern.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ucpl.layout import axes as ax

LENGTHS = st.integers(0, 40)
WAYS = st.integers(1, 7)
GRAINS = st.integers(1, 5)


def pieces(split: ax.Split, length: int, ways: int) -> list[tuple[int, int]]:
    return [ax.piece_of(split, length, ways, here) for here in range(ways)]


@given(LENGTHS, WAYS)
def test_equal_pieces(length: int, ways: int) -> None:
    split = ax.Split("tp")
    if length % ways:
        with pytest.raises(ValueError, match=f"{length} does not divide by tp = {ways}"):
            ax.piece_of(split, length, ways, 0)
        return
    assert pieces(split, length, ways) == [(i * length // ways, (i + 1) * length // ways) for i in range(ways)]


@given(LENGTHS, WAYS)
def test_chunk_is_torch_chunk(length: int, ways: int) -> None:
    expected = [t.tolist() for t in torch.chunk(torch.arange(length), ways)] if length else []
    found = [list(range(a, b)) for a, b in pieces(ax.Split("tp", "chunk"), length, ways)]
    assert [f for f in found if f] == [e for e in expected if e]
    assert len(found) == ways


@given(LENGTHS, WAYS, GRAINS)
def test_a_chunk_of_a_grain_is_the_next_multiple(length: int, ways: int, grain: int) -> None:
    found = pieces(ax.Split("tp", "chunk", (), grain), length, ways)
    step = next(n for n in range(0, 1000, grain) if n * ways >= length)
    assert found == [(min(i * step, length), min((i + 1) * step, length)) for i in range(ways)]
    assert found[-1][1] == length


@given(LENGTHS, WAYS)
def test_spread_is_array_split(length: int, ways: int) -> None:
    found = [list(range(a, b)) for a, b in pieces(ax.Split("tp", "spread"), length, ways)]
    assert found == [a.tolist() for a in np.array_split(np.arange(length), ways)]


@given(LENGTHS, WAYS, GRAINS)
def test_a_spread_of_units_does_not_split_units(length: int, ways: int, grain: int) -> None:
    split = ax.Split("tp", "spread", (), grain)
    if length % grain:
        with pytest.raises(ValueError, match=f"{length} is not a whole number of units of {grain}"):
            ax.piece_of(split, length, ways, 0)
        return
    units = [a.tolist() for a in np.array_split(np.arange(length).reshape(-1, grain), ways)]
    assert [list(range(a, b)) for a, b in pieces(split, length, ways)] == [[x for u in one for x in u] for one in units]


@given(st.lists(st.integers(0, 9), min_size=1, max_size=6))
def test_sizes_are_taken_as_they_are(sizes: list[int]) -> None:
    split = ax.Split("tp", "sizes", tuple(sizes))
    length = sum(sizes)
    assert [b - a for a, b in pieces(split, length, len(sizes))] == sizes
    assert [a for a, _ in pieces(split, length, len(sizes))] == [sum(sizes[:i]) for i in range(len(sizes))]
    for wrong in ((length + 1, len(sizes)), (length, len(sizes) + 1)):
        with pytest.raises(ValueError, match=f"{len(sizes)} sizes that add up to {length} do not cut {wrong[0]}"):
            ax.piece_of(split, *wrong, 0)


# ---- walks -----------------------------------------------------------------------------------------------------------

A, B, C = ax.Dim("a"), ax.Dim("b"), ax.Dim("c")
TP, DP = ax.Split("tp"), ax.Split("dp")
NESTED = ax.Cut(ax.Pad(ax.Stack((ax.Term("q", (ax.Cut(A, (TP,)), B)), ax.Term(None, (C,)))), 4), (DP,))


def test_a_walk_meets_every_axis_once_in_order() -> None:
    kinds = [type(node).__name__ for node in ax.walk(NESTED)]
    assert kinds == ["Cut", "Pad", "Stack", "Cut", "Dim", "Dim", "Dim"]
    assert ax.children(ax.Each()) == () and ax.children(A) == ()
    assert ax.children(ax.Trim(A)) == ax.children(ax.Flat(A)) == (A,)
    assert ax.dims_of(NESTED, A) == ("a", "b", "c", "a")


def test_a_pattern_is_rewritten_in_every_place() -> None:
    other = ax.rewritten(NESTED, lambda a: ax.Flat(a) if a in (B, C) else None)
    inner = ax.Stack((ax.Term("q", (ax.Cut(A, (TP,)), ax.Flat(B))), ax.Term(None, (ax.Flat(C),))))
    assert other == ax.Cut(ax.Pad(inner, 4), (DP,))
    assert ax.rewritten(NESTED, lambda _: None) == NESTED
    assert ax.rewritten(ax.Trim(ax.Flat(ax.Each())), lambda a: A if isinstance(a, ax.Each) else None) == ax.Trim(
        ax.Flat(A)
    )
    assert ax.rewritten(A, lambda a: ax.Pad(a, 2)) == ax.Pad(A, 2)  # the replacement is not walked again


def test_dims_have_other_names_and_keep_their_ranges() -> None:
    pattern = ax.Stack((ax.Term("q", (ax.Dim("a", 2, 6), ax.Pad(ax.Dim("a", 6), 8, "live"))),))
    named = ax.Stack((ax.Term("q", (ax.Dim("x.a", 2, 6), ax.Pad(ax.Dim("x.a", 6), 8, "live"))),))
    assert ax.renamed(pattern, {"a": "x.a", "b": "y"}) == named
    assert ax.renamed(ax.Each(), {"a": "b"}) == ax.Each()


def test_without_its_cuts_an_axis_is_that_of_the_full_tensor() -> None:
    assert ax.uncut(NESTED) == ax.Pad(ax.Stack((ax.Term("q", (A, B)), ax.Term(None, (C,)))), 4)
    assert ax.uncut(ax.Cut(ax.Trim(ax.Cut(A, (DP,))), (TP,))) == ax.Trim(A)
    assert ax.mesh_axes_of(ax.uncut(NESTED)) == ()


def test_mesh_axes_come_with_the_inner_cuts_first() -> None:
    assert ax.mesh_axes_of(NESTED) == ("tp", "dp")
    assert ax.mesh_axes_of(ax.Cut(A, (DP, TP)), NESTED) == ("dp", "tp")
    assert ax.mesh_axes_of(A) == ()


def test_labels_are_those_of_the_outermost_terms() -> None:
    inner = ax.Stack((ax.Term("in", (A,)),))
    assert ax.labels_of((NESTED,)) == ("q",)
    assert ax.labels_of((ax.Stack((ax.Term("out", (inner,)), ax.Term(None, (inner, B)))),)) == ("out", "in")
    assert ax.labels_of((A, B)) == (None,)


def test_axes_that_cut_some_terms_alone_make_copies_of_the_others() -> None:
    assert ax.partly_cut((NESTED,)) == {"tp"}
    both = ax.Stack((ax.Term(None, (ax.Cut(A, (TP, DP)),)), ax.Term(None, (ax.Cut(B, (DP,)),))))
    assert ax.partly_cut((both,)) == {"tp"}
    assert ax.partly_cut((ax.Pad(both, 2), A)) == {"tp"}
    assert ax.partly_cut((ax.Cut(A, (TP,)),)) == frozenset()


def test_the_longest_an_axis_can_be() -> None:
    sizes = {"a": 5, "b": 3, "c": 7}
    assert ax.longest(NESTED, sizes.__getitem__) == 24  # 5 * 3 + 7, to the next multiple of 4
    assert ax.longest(ax.Trim(ax.Dim("c", 2, 6)), sizes.__getitem__) == 4
    assert ax.longest(ax.Dim("c", 2), sizes.__getitem__) == 5


def test_digits_and_leaves() -> None:
    rules: dict[str, ax.Axis] = {
        "l": ax.Stack((ax.Term(None, (ax.Dim("lap"), ax.Cut(ax.Dim("stage"), (TP,)))),)),
        "stage": ax.Stack((ax.Term(None, (ax.Dim("hi"), ax.Dim("lo"))),)),
        "e": ax.Cut(ax.Dim("e"), (TP,)),
    }
    assert ax.digits_of(rules["l"]) == ("lap", "stage")
    assert ax.leaves_of("l", rules) == ("lap", "hi", "lo")
    assert ax.leaves_of("e", rules) == ("e",) and ax.leaves_of("x", rules) == ("x",)
    assert ax.digits_of(ax.Stack((ax.Term(None, (A,)), ax.Term(None, (B,))))) == ()
    assert ax.digits_of(ax.Flat(A)) == ()
