"""Law: target places get the oracle's values, or both sides refuse."""

from __future__ import annotations

from typing import Any

from attrs import frozen
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.oracle import mean
from tests.oracle.blobs import carried
from tests.oracle.names import Refused
from ucpl.errors import UcplError
from ucpl.extents import key_text
from ucpl.graph.blobs import carried_blobs
from ucpl.language import parse_call
from ucpl.layout import load, resolve
from ucpl.placement import locate

TEXT = """ucpl 1

model m {{
  dim a = 4
  w : a
}}

layout x(dp, tp) of m {{
  mesh dp tp
  framework torch()
  file weights = torch "{file}" key "in/{{key}}"
  file meta    = torch "meta_{{rank}}.pt"
  w = a as "w"
  {lines}
}}
"""
FILES = ("w.pt", "w_{dp}.pt", "w_{rank}.pt", "w_{tp}_{dp + 1}.pt")
AXES = ("", " @dp", " @tp", " @dp @tp", " @tp @dp")
KEYS = (' as "{n}"', ' as "{n}/{{dp}}"', ' as "{n}.{{rank}}"', "", ' as "{n}/{{tp}}/{{dp:02}}"')
WHERE = (" in meta", " in weights", "")
MORE = ("", "", "", " at dp[0]", " at tp[-1]", " when dp > 1")
FATES = ("keep", "keep", "first", "remap", "remap", "drop")


@frozen
class Side:
    text: str
    dp: int
    tp: int

    @property
    def call(self) -> str:
        return f"x(dp = {self.dp}, tp = {self.tp})"


@st.composite
def sides(draw: Any, keys: tuple[str, ...] = KEYS, files: tuple[str, ...] = FILES) -> Side:
    names = draw(st.lists(st.sampled_from(("rng", "data.loader", "step")), min_size=1, max_size=3, unique=True))
    lines = [
        f"blob {n}{draw(st.sampled_from(AXES))} {draw(st.sampled_from(FATES))}{draw(st.sampled_from(WHERE))}"
        f"{draw(st.sampled_from(keys)).format(n=n)}{draw(st.sampled_from(MORE))}"
        for n in names
    ]
    text = TEXT.format(file=draw(st.sampled_from(files)), lines="\n  ".join(lines))
    return Side(text, draw(st.integers(1, 4)), draw(st.integers(1, 3)))


def by_compiler(source: Side, target: Side) -> dict[Any, Any] | None:
    try:
        here, there = (locate(resolve(load(("a.ucpl", side.text)), parse_call(side.call))) for side in (source, target))
        found, _ = carried_blobs(here, there)
    except UcplError as error:
        assert error.diagnostics[0].code in ("E236", "E332", "E333"), error
        return None
    ways = [way for blob in found for way in blob.ways]
    out = {(w.file, key_text(w.key)): (w.source_file, key_text(w.source_key)) for w in ways}
    assert len(out) == len(ways)
    return out


def by_oracle(source: Side, target: Side) -> dict[Any, Any] | None:
    try:
        here, there = (mean(side.text, side.call, name="a.ucpl") for side in (source, target))
        from tests.oracle.blobs import places

        claimed = [p for m in (here, there) for p in [[x for b in m.blobs for h in places(m, b).values() for x in h]]]
        if any(len(set(p)) < len(p) for p in claimed):
            raise Refused("two blobs in one place")
        return carried(here, there)
    except Refused:
        return None


@given(sides(), sides())
@settings(max_examples=200)
def test_each_place_gets_the_value_that_the_fate_says(source: Side, target: Side) -> None:
    assert by_compiler(source, target) == by_oracle(source, target)


@given(sides(keys=KEYS[2:3], files=FILES[2:3]), st.integers(1, 4), st.integers(1, 3))
@settings(max_examples=100)
def test_another_degree_of_one_layout_is_kept_remapped_or_refused(side: Side, dp: int, tp: int) -> None:
    """Layouts whose ranks have places of their own: only fates decide."""
    other = Side(side.text, dp, tp)
    assert by_compiler(side, other) == by_oracle(side, other)
