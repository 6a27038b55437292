"""Indices in brackets that no line deals over the ranks."""

from __future__ import annotations

import pytest

from ucpl.conversion.checking import check_text
from ucpl.conversion.requests import Given

TEXT = """ucpl 2
model m {
  dim l = config.layers, e = 4, h = 8
  embed, norm : h
  w           : l h
  moe         : l e h
}
layout x(pp, ep = 1) of m {
  mesh pp ep
  index l = l@pp
  index e = e@ep
  file weights = torch "{pp}_{ep}.pt"
  embed     = h  at pp[0] as "embed"
  norm      = h  at pp[-1] as "norm"
  w[l]      = h  as "{l.local}.w"
  moe[l, e] = h  as "{l.local}.{e.local}.moe"
}
"""


def remarks(*changes: tuple[str, str]) -> list[str]:
    text = TEXT
    for before, after in changes:
        assert before in text
        text = text.replace(before, after)
    found = check_text("x.ucpl", text, Given(), lambda path: None)
    assert found.findings == ()
    return [one.text for one in found.noted if one.rule == "undealt-index"]


def test_dealt_indices_are_no_remark() -> None:
    assert remarks() == []


@pytest.mark.parametrize(
    ("change", "axis", "line"),
    [
        (("  index l = l@pp\n", ""), "pp", "index l = l@pp"),
        (("  index e = e@ep\n", ""), "ep", "index e = e@ep"),
    ],
)
def test_an_index_that_no_line_deals_is_named(change: tuple[str, str], axis: str, line: str) -> None:
    local = (f"{{{line[6]}.local}}", f"{{{line[6]}}}")
    (remark,) = remarks(change, local)
    assert f"each rank of {axis} has all of" in remark and f"Write `{line}`" in remark
    copied, number = remarks(change)
    assert copied.partition(" (line")[0] == remark.partition(" (line")[0]
    assert f"is `{local[1]}`: no line deals out" in number


def test_copies_that_are_meant_are_no_remark() -> None:
    meant = ((' as "{l.local}.w', ' same @pp as "{l}.w'), (' as "{l.local}.{e.local}', ' same @pp as "{l}.{e.local}'))
    assert remarks(("  index l = l@pp\n", ""), *meant) == []


def test_a_cut_of_the_axis_is_evidence_against_it() -> None:
    assert (
        remarks(
            ("  index l = l@pp\n", ""),
            ("{l.local}", "{l}"),
            ("norm      = h ", "norm      = h@pp "),
            (" at pp[-1]", ""),
        )
        == []
    )
