"""The tree of cells, compared with the list that it represents."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from ucpl.placement.cells import (
    Cells,
    Concat,
    DimRange,
    Labelled,
    Padding,
    Product,
    Same,
    cut,
    padding_of,
    pieces_of,
    trim,
)

PAD = "padding"


def listed(cells: Cells) -> list[Any]:
    """Each cell: a sorted tuple of (dim, index), or PAD."""
    match cells:
        case DimRange():
            return [((cells.dim, i),) for i in range(cells.low, cells.high)]
        case Padding():
            return [PAD] * cells.count
        case Same():  # a factor that adds no index
            return [()] * cells.count
        case Concat():
            return [c for p in cells.parts for c in listed(p)]
        case Labelled():
            return listed(cells.cells)
        case Product():
            out: list[Any] = [()]
            for f in cells.factors:
                out = [PAD if PAD in (a, b) else (*a, *b) for a in out for b in listed(f)]
            return out


def ranges(dim: str) -> st.SearchStrategy[Cells]:
    return st.builds(lambda a, n: DimRange(dim, a, a + n), st.integers(0, 3), st.integers(0, 3))


def trees(dims: str) -> st.SearchStrategy[Cells]:
    """Trees in which each path names each dim once."""
    one = ranges(dims[0])
    padded = st.builds(lambda c, n: Concat((c, Padding(n))), one, st.integers(0, 3))
    both = st.builds(lambda a, b: Concat((a, b)), one, one)
    labelled = st.builds(lambda c: Labelled("q", c), one)
    copies = st.builds(Same, st.integers(1, 3))
    repeated = st.one_of(*(st.builds(lambda *f: Product(f), *two) for two in ((one, copies), (copies, one))))
    first = st.one_of(one, padded, both, labelled, repeated)
    if len(dims) == 1:
        return first
    rest = trees(dims[1:])
    product = st.builds(lambda a, b: Product((a, b)), first, rest)
    ended = st.builds(lambda p, n: Concat((p, Padding(n))), product, st.integers(0, 4))
    return st.one_of(product, ended, st.builds(lambda a, b: Concat((a, b)), product, product))


@given(trees("abc"), st.integers(0, 40), st.integers(0, 40))
def test_a_slice_of_the_tree_is_a_slice_of_the_list(tree: Cells, low: int, high: int) -> None:
    assert tree.length == len(listed(tree))
    assert listed(cut(tree, low, high)) == listed(tree)[low:high]


@given(trees("abc"), st.integers(0, 40), st.integers(0, 40))
def test_a_cut_tree_can_be_cut_again(tree: Cells, low: int, high: int) -> None:
    once = cut(tree, low, high)
    assert listed(cut(once, 1, 5)) == listed(once)[1:5]


@given(trees("abc"))
def test_trim_takes_away_the_padding_at_the_end(tree: Cells) -> None:
    want = listed(tree)
    while want and want[-1] == PAD:
        want.pop()
    assert listed(trim(tree)) == want


@given(trees("abc"))
def test_pieces_are_the_cells_at_their_places(tree: Cells) -> None:
    want = listed(tree)
    got: list[Any] = [PAD] * len(want)
    for piece in pieces_of(tree):
        places: list[tuple[int, tuple[Any, ...]]] = [(piece.offset, ())]
        for dim, low, high, stride in piece.digits:
            places = [(p + (v - low) * stride, (*c, (dim, v))) for p, c in places for v in range(low, high)]
        for place, cell in places:
            assert got[place] == PAD
            got[place] = cell
    assert got == want
    assert sum(padding_of(tree).values()) == want.count(PAD)
