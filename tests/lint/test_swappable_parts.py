"""Parts of a stored tensor: one is cut, one complete."""

from __future__ import annotations

import pytest

from ucpl.conversion.checking import check_text
from ucpl.conversion.requests import Given

TEXT = """ucpl 2  # ucpl: allow swappable-parts: sizes are equal here
model m {{
  dim g = 4, r = 2, d = 2, f = 8, h = 16
  q        : g r d h
  k, v     : g d h
  gate, up : f h
}}
layout x(tp = 1) of m {{
  mesh tp
  file weights = torch "{{tp}}.pt"
  qkv     = {qkv} h   as "qkv"
  gate_up = {gate} h  as "gate_up"
}}
"""
QKV = "(q: g@tp r d + k: g@tp d + v: g@tp d)"
GATE = "(gate: f@tp + up: f@tp)"


def remarks(qkv: str = QKV, gate: str = GATE) -> list[str]:
    found = check_text("x.ucpl", TEXT.format(qkv=qkv, gate=gate), Given(), lambda path: None)
    assert found.findings == ()
    return [one.text for one in found.noted if one.rule == "unlike-cuts"]


def test_parts_that_are_cut_alike_are_no_remark() -> None:
    assert remarks() == remarks(gate="(gate: f + up: f)") == []


def test_heads_of_keys_that_all_ranks_have_are_no_remark() -> None:
    """They have other dims than queries."""
    assert remarks(qkv="(q: g@tp r d + k: g d + v: g d)") == []


@pytest.mark.parametrize(
    ("gate", "cut", "complete"), [("(gate: f@tp + up: f)", "gate", "up"), ("(gate: f + up: f@tp)", "up", "gate")]
)
def test_a_complete_part_next_to_a_cut_one_is_named(gate: str, cut: str, complete: str) -> None:
    (remark,) = remarks(gate=gate)
    assert f"in `gate_up` (line 12), `{cut}` is cut over `tp` and `{complete}` of the same dims is not" in remark
    assert "write `@tp` in both" in remark


def test_a_line_has_one_remark() -> None:
    (remark,) = remarks(qkv="(q: g@tp r d + k: g@tp d + v: g d)")
    assert "`k` is cut over `tp` and `v`" in remark
