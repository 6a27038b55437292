"""Layers of several kinds: sets of indices in models and brackets.

The tests count their boxes and elements.
"""

from __future__ import annotations

import numpy as np
import pytest

from tests.docs.blocks import cells, located
from tests.laws.agreement import check
from ucpl.errors import UcplError
from ucpl.layout.brackets import before, compact, places_of, runs_in
from ucpl.placement import Placement

KINDS = "  let kinds = [" + ", ".join(['"a"', '"b"', '"a"'] * 20) + "]\n"


def placed(model: str, layout: str, call: str = "x(pp = 2)") -> Placement:
    head = 'ucpl 1\nmodel m {\n  dim l = 60, h = 2\n%s}\nlayout x(pp) of m {\n  mesh pp\n  file weights = torch "{pp}"\n%s}\n'
    return located(head % (KINDS + model, layout), call)


def boxes(placement: Placement) -> int:
    return sum(len(part.pieces) for part in placement.parts)


def test_layers_of_one_kind_that_are_stacked_are_one_box() -> None:
    assert boxes(placed('  w : l[where(kinds, "b")] h\n', '  w = l h at pp[0] as "w"\n')) == 1
    assert boxes(placed('  w : l[not where(kinds, "b")] h\n', '  w = l@pp h as "w"\n')) == 2


def test_layers_of_one_kind_one_by_one_are_as_many_boxes_as_neighbours() -> None:
    entry = '  w[l] = h at pp[0] as "{l}"\n'
    assert boxes(placed('  w : l[where(kinds, "b")] h\n', entry)) == boxes(placed("  w : l[..20] h\n", entry))


def test_a_cut_is_of_the_full_dim_and_each_rank_has_the_layers_that_there_are() -> None:
    shown = cells(placed("  w : l[1, 29, 30, 59]\n", '  w = l@pp as "w"\n'))
    assert shown.split() == ["0", "w", "w1", "w29", "1", "w", "w30", "w59"]


def test_a_layer_is_counted_among_all_that_its_rank_has() -> None:
    shown = cells(placed("  w : l[1, 30, 35]\n", '  index l = l@pp\n  w[l] = () as "{l}.{l.local}"\n'))
    assert shown.split() == ["0", "1.1", "w1", "1", "30.0", "w30", "1", "35.5", "w35"]
    again = cells(placed("  w : l[1, 30, 35]\n", '  index l = l@pp\n  w[l[30..]] = () as "{l}.{l.local}"\n'))
    assert again.split() == ["1", "30.0", "w30", "1", "35.5", "w35"]


def test_brackets_keep_the_dealt_indices_that_are_in_them() -> None:
    """Interleaved: a rank's part of an index is no run."""
    rule = "  dim lap = 3, stage = pp\n  index l = (lap stage@pp slot)\n"
    shown = cells(
        placed("  w : l\n", rule + '  w[l[9, 10, 20]] = () as "{l.local}"\n  w[l[not 9, 10, 20]] = () as "o{l}"\n')
    )
    few = [line.split() for line in shown.splitlines() if " o" not in line]
    assert few == [["0", "9", "w9"], ["0", "10", "w20"], ["1", "0", "w10"]]
    assert len(shown.splitlines()) == 60


@pytest.mark.parametrize("said", ["60", "-61", "[1, 60]", '"a"', "l > 3", "1, not 2 == 2"])
def test_what_is_no_index_is_refused(said: str) -> None:
    with pytest.raises(UcplError) as caught:
        placed(f"  w : l[{said}]\n", '  w = l as "w"\n')
    assert caught.value.diagnostics[0].code in ("E138", "E022")


def test_a_set_that_steps_evenly_is_a_range() -> None:
    assert compact([3, 5, 7]) == range(3, 8, 2) and compact([]) == range(0) and compact([4]) == range(4, 5)
    assert compact([1, 2, 4]) == (1, 2, 4)
    rng = np.random.default_rng(0)
    for _ in range(50):
        values = sorted(set(rng.integers(0, 12, 5).tolist()))
        kept = compact(values)
        assert list(kept) == values
        assert [i for a, b in runs_in(kept) for i in range(a, b)] == values
        places, found = places_of(kept, np.arange(13))
        assert found.tolist() == [i in values for i in range(13)]
        assert places[found].tolist() == list(range(len(values)))
        for i in range(13):
            assert before(kept, i) == sum(v < i for v in values)


def test_a_group_has_the_layers_in_its_brackets_and_no_others() -> None:
    text = (
        "ucpl 1\nmodel m {\n  dim l = 4, h = 2\n  a : l h\n  b : l\n  state m : f32\n}\nlayout x() of m {\n"
        '  file weights = torch "f"\n  a[l] = h\n  b[l] = ()\n  group block[l[1, 3]] = a, b\n'
        '  state m of block = flat(each) as "{l}"\n}\n'
    )
    assert cells(located(text)).splitlines() == ["f  1  a1,0 a1,1 b1", "f  3  a3,0 a3,1 b3"]
    assert check(text, "x()")


def test_layers_of_a_buffer_are_in_the_order_of_their_index_whatever_is_declared_first() -> None:
    """A module's parameters are ordered by layer.

    The tensor of the first line is in later layers here.
    """
    text = (
        "ucpl 1\nmodel m {\n  dim l = 4, h = 2\n  a : l[1, 3] h\n  b : l[0, 2]\n  state m : f32\n}\nlayout x() of m {\n"
        '  file weights = torch "f"\n  a[l] = h\n  b[l] = ()\n  group * = model\n  state m of * = flat(each) as "x"\n}\n'
    )
    assert cells(located(text)).splitlines() == ["f  x  b0 a1,0 a1,1 b2 a3,0 a3,1"]
    assert check(text, "x()")
