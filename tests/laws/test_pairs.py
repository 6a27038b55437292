"""Laws of two elements per byte.

The refusals and the value of each byte equal the oracle's.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.laws.agreement import agree, both
from tests.laws.moves import Place, _positions
from tests.oracle import Meaning, Padding, homes
from tests.oracle.names import Refused
from ucpl.errors import UcplError
from ucpl.extents import in_file, key_text
from ucpl.graph import build
from ucpl.placement import Placement, locate
from ucpl.planning import Plan, order
from ucpl.planning.binding import Bound
from ucpl.verification.proof.coverage import prove

Bytes = dict[Place, list[Any]]  # of each stored tensor: two cells a byte, or one a number


def stored(draw: st.DrawFn, size: dict[str, int], name: str, numbers: bool) -> str:
    """A layout of a tensor e r c, as bytes or numbers."""
    brackets = draw(st.sampled_from(("", "[e]")))
    along = draw(st.sampled_from(("r", "c")))
    ways = [along, f"{along}@chunk(tp)", f"{along}@spread(tp, 2)", f"{along}@chunk(tp, 2)", f"pad({along}, 4 * tp)@tp"]
    ways += ["(g k)", "g@chunk(tp) k", "g k"] if along == "c" else []
    ways = [f"{along}@chunk(tp)", f"{along}@spread(dp)@chunk(tp)", f"pad({along}, 3 * tp)@tp"] if numbers else ways
    cut = draw(st.sampled_from(ways if numbers or draw(st.booleans()) else ways[:1]))
    axes = draw(st.permutations(["r", "c"])) if draw(st.booleans()) else ["r", "c"]
    lead = "" if brackets else "e "
    key = ".{e}" if brackets else ""
    dtype = " dtype f32" if numbers else draw(st.sampled_from(("", " dtype u8")))
    shown = " ".join(cut if d == along else d for d in axes)
    line = f'w{brackets} = {lead}{shown}{dtype} as "w{key}"'
    return f'layout {name}(tp, dp) of m {{\n  mesh dp tp\n  file weights = torch "{{dp}}.{{tp}}"\n  {line}\n}}\n'


@st.composite
def cases(draw: st.DrawFn, numbers: bool = False) -> tuple[str, str, str]:
    """A text, and calls of two layouts of it at different degrees.

    Sizes are odd at times.
    """
    size = {
        "e": draw(st.integers(1, 3)),
        "r": draw(st.integers(1, 6)),
        "g": draw(st.integers(1, 4)),
        "k": draw(st.sampled_from((2, 6, 4, 1, 3))),
    }
    dims = ", ".join(f"{n} = {s}" for n, s in size.items())
    text = f"ucpl 1\nmodel m {{\n  dim {dims}, c = g * k\n  index c = (g k)\n  w : e r c dtype f4_e2m1fn\n}}\n"
    text += stored(draw, size, "a", False) + stored(draw, size, "z", numbers)
    degrees = [draw(st.tuples(st.integers(1, 3), st.integers(1, 2))) for _ in range(2)]
    assume(degrees[0] != degrees[1])
    return text, f"a(tp = {degrees[0][0]}, dp = {degrees[0][1]})", f"z(tp = {degrees[1][0]}, dp = {degrees[1][1]})"


def placed(text: str, call: str) -> tuple[Meaning, Placement] | None:
    """A layout that both understand alike; None where both refuse it."""
    meaning, layout = both(text, call)
    try:
        found = homes(meaning)
    except Refused:
        found = None
    try:
        placement = locate(layout)
    except UcplError as error:
        assert found is None and error.diagnostics[0].code in ("E231", "E204")
        return None
    assert found is not None
    agree(meaning, placement)
    return meaning, placement


def told(meaning: Meaning) -> Bytes:
    """The items of the oracle's stored tensors.

    A byte is its two cells.
    """
    out: Bytes = {}
    for home in homes(meaning):
        cells = [None if isinstance(c, Padding) else c for c in home.cells]
        paired = home.dtype != "f32"
        out[home.file, home.key] = [*zip(cells[::2], cells[1::2], strict=True)] if paired else cells
    return out


def carried_out(plan: Plan, source: Bytes) -> Bytes:
    """The result of the moves of bytes, one after the other."""
    out: Bytes = {}
    for t in plan.targets:
        out[t.file, key_text(t.key)] = [(None, None)] * int(np.prod(in_file(t.dtype, t.shape)[1]))
        if t.dtype == "f32":
            out[t.file, key_text(t.key)] = [None] * t.numel
    here, there = ([(x.file, key_text(x.key)) for x in side] for side in (plan.sources, plan.targets))
    for m in Bound.of(plan).moves:
        for row in range(len(m)):
            ends = zip(
                _positions(m.source_offset[row], m.shape[row], m.source_stride[row]),
                _positions(m.target_offset[row], m.shape[row], m.target_stride[row]),
                strict=True,
            )
            taken, put = source[here[int(m.source[row])]], out[there[int(m.target[row])]]
            for a, b in ends:
                item = taken[a] if not m.half else taken[a][m.half == "high"]
                assert m.kind == "copy" or put[b] == item
                put[b] = item
    return out


@given(cases())
@settings(max_examples=60, deadline=None)
def test_bytes_go_to_other_degrees_with_both_of_their_elements(case: tuple[str, str, str]) -> None:
    text, source, target = case
    here, there = placed(text, source), placed(text, target)
    if here is None or there is None:
        return
    a, z = told(here[0]), told(there[0])

    def partners(held: Bytes) -> set[Any]:
        return {pair for pairs in held.values() for pair in pairs if pair != (None, None)}

    if partners(a) != partners(z):
        try:
            build(here[1], there[1])
        except UcplError as error:
            assert error.diagnostics[0].code == "E325"
            return
        raise AssertionError("bytes would be taken apart")
    graph = build(here[1], there[1])
    prove(graph)
    assert carried_out(order(graph), a) == z


@given(cases(numbers=True))
@settings(max_examples=60, deadline=None)
def test_numbers_are_taken_from_the_right_half_of_the_right_byte(case: tuple[str, str, str]) -> None:
    text, source, target = case
    here, there = placed(text, source), placed(text, target)
    if here is None or there is None:
        return
    graph = build(here[1], there[1])
    prove(graph)
    assert carried_out(order(graph), told(here[0])) == told(there[0])


@pytest.mark.parametrize(
    ("c", "line"),
    [
        (3, "w = e r pad(c, 4)"),  # the last byte has one element, and padding
        (3, "w = e r c"),
        (4, "w = e r c@tp[1, 3]"),
        (6, "w = e r c@tp"),
        (4, "w = e c r"),  # r is 3
        (4, "w = e r c@dp@tp"),  # one element a row: neighbours are of two rows
    ],
)
def test_what_has_a_byte_of_one_element_is_refused(c: int, line: str) -> None:
    text = f"ucpl 1\nmodel m {{\n  dim e = 2, r = 3, c = {c}\n  w : e r c dtype f4_e2m1fn\n}}\n"
    text += 'layout a(tp, dp) of m {\n  mesh dp tp\n  file weights = torch "{dp}.{tp}"\n' + f'  {line} as "w"\n}}\n'
    assert placed(text, "a(tp = 2, dp = 2)") is None
