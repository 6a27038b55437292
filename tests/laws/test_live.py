"""Laws of live rows.

As many as both sides have are carried to their own places; NumPy alone computes them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from attrs import evolve, frozen
from hypothesis import given, settings
from hypothesis import strategies as st

import ucpl.graph.live as live
from tests.laws import moves as mv
from ucpl.errors import UcplError
from ucpl.graph import Graph, build
from ucpl.placement import Placement, locate
from ucpl.planning import order
from ucpl.testing import Example, assert_round_trip
from ucpl.testing.numbers import run
from ucpl.verification.proof.coverage import prove

TEXT = """ucpl 1

model m {{
  dim v = {v}, h = {h}
  dtype f32
  b : h
  w : v h
  state m, n : f32
}}

layout x(dp, tp) of m {{
  mesh dp tp
  file weights = torch "{{tp}}"
  file optim = torch "{{dp}}.{{tp}}"
  b = h as "b"
  w = {w} as "w"
  state m = like as "{{key}}.m"
  state n = {flat} as "flat"
}}
"""
SHAPES = ("pad(v, {n} * tp{kind})@tp h", "h pad(v, {n} * tp{kind})@tp", "(pad(v, {n} * tp{kind})@tp h)")
FLATS = ("pad(flat(each), 2 * dp)@dp", "trim(flat(pad(each, 3)))@chunk(dp)", "flat(pad(each, dp)@dp)")


@frozen
class Vocabulary:
    """A padded vocabulary of v rows, alone and in flat buffers.

    The padding goes to a multiple of n * tp.
    """

    v: int
    h: int
    n: int
    tp: int
    dp: int
    kind: str
    shape: int
    flat: int

    @property
    def rows(self) -> int:
        return -(-self.v // (self.n * self.tp)) * self.n * self.tp

    @property
    def live(self) -> int:
        return self.rows - self.v if self.kind == "live" else 0

    @property
    def placement(self) -> Placement:
        return locate(self.example.layout())

    @property
    def example(self) -> Example:
        w = SHAPES[self.shape].format(n=self.n, kind=f", {self.kind}")
        text = TEXT.format(v=self.v, h=self.h, w=w, flat=FLATS[self.flat])
        return Example(text, f"x(dp = {self.dp}, tp = {self.tp})")

    def stored(self, kept: int) -> dict[Any, Any]:
        """The content of each place, with so many live rows.

        The first of all numbers is 1, and empty places have 0.
        """
        out: dict[Any, Any] = {}
        for tp in range(self.tp):
            held = {s: self.on_rank(s, tp, kept) for s in ("weight", "m", "n")}
            for key, state in (("w", "weight"), ("b", "weight")):
                out[f"{tp}", (key,)] = held[state][key].ravel()
            for dp in range(self.dp):
                for key in ("w", "b"):
                    out[f"{dp}.{tp}", (f"{key}.m",)] = held["m"][key].ravel()
                out[f"{dp}.{tp}", ("flat",)] = self.window(held["n"], dp)
        return out

    def on_rank(self, state: str, tp: int, kept: int) -> dict[str, Any]:
        first = 1 + 10_000 * ("weight", "m", "n").index(state)
        w = np.zeros((self.rows, self.h))
        w[: self.v + kept] = (first + np.arange(self.rows * self.h)).reshape(self.rows, self.h)[: self.v + kept]
        mine = np.split(w, self.tp)[tp]
        return {"w": mine.T if self.shape == 1 else mine, "b": first + 5000.0 + np.arange(self.h)}

    def window(self, held: dict[str, Any], dp: int) -> Any:
        members = [held["b"].ravel(), held["w"].ravel()]
        if self.flat == 0:
            whole = grown(np.concatenate(members), 2 * self.dp)
            return np.split(whole, self.dp)[dp]
        if self.flat == 2:
            return np.concatenate([np.split(grown(one, self.dp), self.dp)[dp] for one in members])
        whole = np.concatenate([grown(one, 3) for one in members])
        if self.kind == "live":  # live rows are not trimmed, but their padding is
            whole = whole[: -(-self.h // 3) * 3 + self.rows // self.tp * self.h]
        else:
            whole = whole[: np.flatnonzero(whole)[-1] + 1]
        step = -(-len(whole) // self.dp)
        return whole[dp * step : (dp + 1) * step]


def grown(flat: Any, n: int) -> Any:
    return np.concatenate([flat, np.zeros(-len(flat) % n)])


def vocabularies(v: int, h: int, kinds: tuple[str, ...]) -> st.SearchStrategy[Vocabulary]:
    return st.builds(
        Vocabulary, st.just(v), st.just(h), st.integers(1, 4), st.integers(1, 3), st.integers(1, 3), st.sampled_from(kinds),
        st.integers(0, 2), st.integers(0, 2),
    )  # fmt: skip


@st.composite
def pairs(draw: Any) -> tuple[Vocabulary, Vocabulary]:
    v, h = draw(st.integers(1, 7)), draw(st.integers(1, 3))
    source = draw(vocabularies(v, h, ("live", "live", "zero")))
    target = draw(vocabularies(v, h, ("live", "live", "live", "zero", "undefined")).filter(lambda t: t.tp != source.tp))
    return source, target


@given(pairs())
@settings(max_examples=25)
def test_live_rows_go_over_while_the_target_has_room(pair: tuple[Vocabulary, Vocabulary]) -> None:
    source, target = pair
    plan = order(build(source.placement, target.placement))
    moved = run(plan, source.stored(source.live))
    kept = min(source.live, target.live)
    wanted = target.stored(kept)
    assert set(moved) == set(wanted)
    for place, array in wanted.items():
        np.testing.assert_array_equal(np.nan_to_num(moved[place]), array, err_msg=str(place))
    lost = source.live - kept
    why = f"the target has room for {kept}" if target.live else "the target has no live rows"
    assert plan.dropped == ((f"live rows of v in w: {lost} of {source.live} are not kept, {why}",) if lost else ())
    assert_round_trip(source.example, target.example)


SOURCE = Vocabulary(v=5, h=2, n=2, tp=2, dp=1, kind="live", shape=0, flat=0)
TARGET = evolve(SOURCE, n=2, tp=1, shape=1)


def code_of(graph: Graph) -> tuple[str, str]:
    with pytest.raises(UcplError) as caught:
        prove(graph)
    (found,) = caught.value.diagnostics
    return found.code, found.message


@pytest.mark.parametrize(("change", "element"), [(-1, "w[v=5, h=0]"), (1, "w[v=6, h=0]")])
def test_a_row_too_few_or_too_many_is_found(change: int, element: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One live row is on both sides; the proof counts for itself."""
    prove(build(SOURCE.placement, TARGET.placement))
    right = live._widened
    monkeypatch.setattr(live, "_widened", lambda p, kept: right(p, {d: n + change for d, n in kept.items()}))
    if change < 0:
        text = f"{element}, a live row, is kept on one side and not on the other"
        assert code_of(build(SOURCE.placement, TARGET.placement)) == ("E348", text)
        return
    with pytest.raises(UcplError, match="E309"):  # it is nowhere in the target
        build(SOURCE.placement, TARGET.placement)


def test_a_live_row_at_another_s_place_is_named() -> None:
    graph = build(SOURCE.placement, evolve(TARGET, tp=4).placement)
    assert "w[v=5..8]" in graph.target.tensors
    number = graph.target.tensors.index("w[v=5..8]")
    b, rows = next((b, r) for b, r in enumerate(mv.told(graph)) if (r.tensor == number).any())
    row = int(np.flatnonzero(rows.tensor == number)[0])
    mv.shift(graph, (b, row), 0, 1)
    code, message = code_of(graph)
    assert code in ("E340", "E344") and "w[v=" in message


@pytest.mark.parametrize("flat", ["trim(flat(each))", "trim((flat(each)))"])
def test_trim_leaves_live_rows_and_takes_zeros(flat: str) -> None:
    text = SOURCE.example.text.replace("state n = " + FLATS[0], f"state n = {flat}")
    for word, rows in ((", live", 6), ("", 5)):
        of_kind = text.replace("pad(v, 2 * tp, live)@tp h", f"trim(pad(v, 3{word})) h")
        shapes = {
            p.state: [h.shape for h in p.homes] for p in locate(Example(of_kind, "x(dp = 1, tp = 1)").layout()).parts
        }
        assert shapes["weight"][-1] == (rows, 2) and shapes["n"] == [(2 + rows * 2,)]


def test_live_rows_of_another_dim_are_not_kept() -> None:
    other = SOURCE.example.text.replace("pad(v, 2 * tp, live)@tp h", "pad(v, 2 * tp)@tp pad(h, 3, live)")
    plan = order(build(SOURCE.placement, locate(Example(other, "x(dp = 1, tp = 2)").layout())))
    assert plan.dropped == ("live rows of v in w: 3 of 3 are not kept, the target has no live rows",)


def test_a_row_that_one_layer_lacks_stays_behind() -> None:
    """Two lines for layers of one tensor, padded unlike.

    A row goes over where all layers have it.
    """
    text = (
        "ucpl 1\nmodel m {\n  dim l = 2, v = 3\n  dtype f32\n  w : l v\n}\n"
        'layout x(n, k) of m {\n  file weights = torch "a"\n'
        '  w[l[0]] = pad(v, n, live) as "{l}"\n  w[l[1]] = pad(v, k, live) as "{l}"\n}\n'
    )
    source, target = (locate(Example(text, call).layout()) for call in ("x(n = 6, k = 4)", "x(n = 8, k = 8)"))
    graph = build(source, target)
    prove(graph)
    why = "since not all that stores the tensor has them"
    assert graph.dropped == (f"live rows of v in w: 2 of 3 are not kept, {why}",)
    stored: dict[Any, Any] = {("a", (0,)): np.arange(1.0, 7), ("a", (1,)): np.arange(11.0, 15)}
    moved = run(order(graph), stored)
    assert np.nan_to_num(moved["a", (0,)]).tolist() == [1, 2, 3, 4, 0, 0, 0, 0]
    assert np.nan_to_num(moved["a", (1,)]).tolist() == [11, 12, 13, 14, 0, 0, 0, 0]
