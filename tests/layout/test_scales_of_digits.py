"""A dim in blocks that is stored as its digits.

The first digit may be cut, and the scale with it.
"""

from __future__ import annotations

import pytest

from ucpl.errors import UcplError
from ucpl.language import parse_call
from ucpl.layout import load, resolve
from ucpl.placement import locate

SPEC = """ucpl 1
model m {{
  dim r = 2, c = 256, g = 4, k = 64
  index c = (g k)
  w : r c dtype f8_e4m3fn
  s : r g dtype f32 is scale of w by 64
}}
layout x(tp) of m {{
  mesh tp
  file weights = torch "{{tp}}.pt"
  w = {w} as "w"
  s = {s} as "s"
}}
"""


def resolved(w: str, s: str) -> None:
    text = SPEC.format(w=w, s=s)
    resolve(load(("spec.ucpl", text)), parse_call("x(tp = 2)"))


@pytest.mark.parametrize(
    ("w", "s"), [("r g@tp k", "r g@tp"), ("r g@tp k", "r g"), ("r (g@tp k)", "r g@tp"), ("r c@tp", "r g@tp")]
)
def test_the_first_digit_is_cut_with_the_scale_or_without(w: str, s: str) -> None:
    resolved(w, s)


@pytest.mark.parametrize(("w", "s"), [("r g k@tp", "r g"), ("r g k", "r g@tp"), ("r (g k)@tp", "r g@tp")])
def test_what_is_cut_inside_blocks_or_otherwise_is_refused(w: str, s: str) -> None:
    with pytest.raises(UcplError) as caught:
        resolved(w, s)
    assert caught.value.diagnostics[0].code == "E216"


@pytest.mark.parametrize(("w", "s"), [("r g@tp k", "r g@tp"), ("r c@tp", "r g@tp")])
def test_a_cut_that_leaves_a_remainder_is_no_cut_inside_a_block(w: str, s: str) -> None:
    """The remainder is reported later, when pieces are made."""
    text = SPEC.format(w=w, s=s)
    layout = resolve(load(("spec.ucpl", text)), parse_call("x(tp = 3)"))
    with pytest.raises(UcplError) as caught:
        locate(layout)
    assert caught.value.diagnostics[0].code == "E204"
