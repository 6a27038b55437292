"""Indices dealt under a condition, and layouts used on some ranks."""

from __future__ import annotations

import pytest

from tests.docs.blocks import cells, located
from tests.laws.agreement import check
from ucpl.errors import UcplError
from ucpl.language import parse_call, print_file
from ucpl.layout import close, load

DEALT = """ucpl 1
model m {
  dim l = 4
  w : l
}
layout x(pp, dp) of m {
  mesh pp dp
  index l = l@pp          when pp > 1
  index l = l@dp[3, 1]    when pp == 1 and dp > 1
  file weights = torch "{pp}.{dp}"
  w[l] = ()  as "{l.local}"
}
"""

USED = """ucpl 1
model eye {
  dim r = 4
  w : r
}
model both {
  use eye() as left
  dim c = 2
  v : c
}
layout whole(tp) of eye {
  mesh pp tp
  file weights = torch "eye_{pp}{tp}"
  w = r@tp  as "w"
}
layout x(pp, tp) of both {
  mesh pp tp
  file weights = torch "{pp}{tp}"
  v = c  as "v"
  use whole(tp = tp) as left key "left.{key}" at pp[last]
  let last = -1
}
"""


@pytest.mark.parametrize(
    ("call", "held"), [("x(2, 1)", [2, 2]), ("x(1, 2)", [3, 1]), ("x(1, 1)", [4]), ("x(4, 2)", [1] * 8)]
)
def test_the_rule_that_holds_deals(call: str, held: list[int]) -> None:
    lines = [line.split()[0] for line in cells(located(DEALT, call)).splitlines()]
    assert [lines.count(file) for file in dict.fromkeys(lines)] == held
    assert check(DEALT, call)


def test_two_rules_that_hold_are_refused() -> None:
    with pytest.raises(UcplError) as caught:
        located(DEALT.replace("pp == 1 and dp > 1", "dp > 1"), "x(2, 2)")
    found = caught.value.diagnostics[0]
    assert found.code == "E150" and [label.line for label in found.labels] == [9, 8]


def test_a_rule_written_out_is_the_one_that_holds() -> None:
    text = print_file(close(load(("d.ucpl", DEALT)), parse_call("x(1, 2)")))
    assert "index l = l@dp[3, 1]\n" in text and "l@pp" not in text


def test_a_layout_is_used_on_some_ranks() -> None:
    shown = cells(located(USED, "x(2, 2)")).splitlines()
    assert [line.split()[0] for line in shown if "left." in line] == ["eye_10", "eye_11"]
    assert len([line for line in shown if " v " in line]) == 4
    assert check(USED, "x(2, 2)") and check(USED, "x(3, 1)")


def test_a_model_is_used_on_no_ranks() -> None:
    with pytest.raises(UcplError) as caught:
        located(USED.replace("use eye() as left", "use eye() as left at pp[0]"), "x(2, 2)")
    assert caught.value.diagnostics[0].code == "E123"
