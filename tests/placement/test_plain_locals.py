"""Many coordinates together give the same boxes as one by one.

One by one, the boxes come from the tree of cells.
"""

from __future__ import annotations

import numpy as np
import pytest

from ucpl.language import parse_call
from ucpl.layout import load, resolve
from ucpl.placement import entries
from ucpl.placement.entries import EntryPlacer
from ucpl.placement.plain_locals import boxes_at
from ucpl.placement.site import Site

TEXT = """ucpl 1
model m {{
  dim l = 3, a = 12, b = 5, c = 7
  dtype f32
  w : l a b c
}}
layout x(dp, tp) of m {{
  mesh dp tp
  file weights = torch "{{dp}}.{{tp}}"
  w[l] = {shape}  as "{{l}}"
}}
"""
SHAPES = (
    "a@dp b c",
    "a@spread(dp) c b@chunk(tp)",
    "c@chunk(dp) a@tp b",
    "b@chunk(tp) c@spread(dp) a",
    "a@chunk(dp, 3) b c",
    "a@tp[3, 9] b c",
)


def placer_of(shape: str, call: str) -> EntryPlacer:
    layout = resolve(load(("x.ucpl", TEXT.format(shape=shape))), parse_call(call))
    return Site.of(layout, None).placers[0]


@pytest.mark.parametrize("shape", SHAPES)
def test_many_coordinates_at_once_are_as_each_alone(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    placer = placer_of(shape, "x(dp = 6, tp = 2)")
    degrees = [placer.degrees[a] for a in placer.shape_axes]
    every = [tuple(int(i) for i in at) for at in np.ndindex(*degrees)]
    other = placer_of(shape, "x(dp = 6, tp = 2)")
    places = [dict(zip(placer.shape_axes, at, strict=True)) for at in every]
    monkeypatch.setattr(entries, "FORESEEN_MIN", 0)
    other.foresee(places)
    assert list(other.locals) == every
    for at, here in zip(every, places, strict=True):
        local, one = other.locals[at], placer.local(here)
        assert (local.shape, local.label_of, local.padding, local.undefined, local.live) == (
            one.shape, one.label_of, one.padding, one.undefined, one.live,
        )  # fmt: skip
        for name in ("low", "high", "stride", "offset"):
            np.testing.assert_array_equal(getattr(local, name), getattr(one, name), err_msg=f"{name} at {at}")


@pytest.mark.parametrize("shape", ["(a b)@dp c", "pad(a, 8)@dp b c", "a@dp@tp b c", "b@dp a c"])
def test_other_patterns_go_through_the_tree(shape: str) -> None:
    placer = placer_of(shape, "x(dp = 3, tp = 2)")
    assert boxes_at(placer, np.zeros((1, len(placer.shape_axes)), dtype=np.int64)) is None


def test_many_coordinates_are_foreseen(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[object] = []
    monkeypatch.setattr(entries, "build", lambda *given: built.append(given))
    placer = placer_of("a@chunk(dp) b c", "x(dp = 4096, tp = 1)")
    places = [{"dp": n, "tp": 0} for n in range(4096)]
    placer.foresee(places)
    assert [placer.local(here).shape for here in (places[0], places[12])] == [(1, 5, 7), (0, 5, 7)] and not built
