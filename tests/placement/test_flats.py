"""Flat buffers are computed in two ways with the same result.

Chains of wrappers use arrays; everything else uses the tree of cells.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from ucpl.layout import axes as ax
from ucpl.layout.axes import UnevenCut
from ucpl.placement.flats import BufferWindows, Members, chain_of, windows_of_chain, windows_of_tree

DEGREES = {"dp": 3, "tp": 2}
LAYOUT: Any = SimpleNamespace(sizes={})
splits = st.one_of(
    st.builds(ax.Split, st.sampled_from(sorted(DEGREES))),
    st.builds(
        ax.Split, st.sampled_from(sorted(DEGREES)), st.sampled_from(["chunk", "spread"]), st.just(()), st.integers(1, 3)
    ),
)


@st.composite
def wrapped(draw: Any, core: ax.Axis) -> ax.Axis:
    axis = core
    for _ in range(draw(st.integers(0, 4))):
        kind = draw(st.integers(0, 2))
        if kind == 0:
            axis = ax.Pad(axis, draw(st.integers(1, 5)))
        elif kind == 1:
            axis = ax.Cut(axis, tuple(draw(st.lists(splits, min_size=1, max_size=2))))
        elif not isinstance(axis, ax.Cut):
            axis = ax.Trim(axis)
    return axis


chains = wrapped(ax.Each()).flatmap(lambda inner: wrapped(ax.Flat(inner)))


def elements(cut: BufferWindows, window: int) -> list[tuple[int, int, int]]:
    """(position, member, element of it)"""
    rows = cut.rows.take(cut.rows.window == window)
    return sorted(
        (p + i, m, a + i)
        for m, a, b, p in zip(
            rows.member.tolist(), rows.start.tolist(), rows.stop.tolist(), rows.position.tolist(), strict=True
        )
        for i in range(b - a)
    )


TP = ax.Split("tp")


@settings(max_examples=200)
@example(ax.Trim(ax.Pad(ax.Cut(ax.Flat(ax.Each()), (TP,)), 4)), [4, 6])
@example(ax.Cut(ax.Pad(ax.Cut(ax.Flat(ax.Each()), (TP,)), 6), (ax.Split("dp"),)), [4, 6])
@example(ax.Trim(ax.Cut(ax.Flat(ax.Pad(ax.Each(), 4)), (TP,))), [5, 1, 2])
@given(chains, st.lists(st.integers(1, 9), min_size=1, max_size=4))
def test_a_chain_gives_what_the_tree_of_cells_gives(axis: ax.Axis, lengths: list[int]) -> None:
    places = [({"dp": d, "tp": t}, d * 2 + t) for d in range(3) for t in range(2)]
    chain = chain_of(axis)
    assert chain is not None
    size = np.array(lengths, dtype=np.int64)
    members = Members(np.zeros_like(size), np.zeros_like(size), size, size)
    try:
        tree = windows_of_tree(axis, members, LAYOUT, DEGREES, places)
    except UnevenCut:
        with pytest.raises(UnevenCut):
            windows_of_chain(chain, size, DEGREES, places)
        assume(False)
    fast = windows_of_chain(chain, size, DEGREES, places)
    assert fast.places == tree.places == places
    assert fast.length.tolist() == tree.length.tolist()
    assert fast.padding.tolist() == tree.padding.tolist()
    for window in range(len(places)):
        assert elements(fast, window) == elements(tree, window)
