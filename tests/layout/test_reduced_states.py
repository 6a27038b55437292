"""Refusals of states that lack dims of their parameters."""

from __future__ import annotations

import pytest

from ucpl.conversion.checking import Checked, check_text
from ucpl.conversion.requests import Given
from ucpl.language import parse_call
from ucpl.layout import load, resolve

TEXT = """ucpl 2
model m {
  dim l = 2, v = 6, h = 4, n = 2, d = 2
  embed : v h
  q, k  : l n d h
  bias  : h
  rope  : d  is buffer
  group rest = bias
  STATE
}
layout x(tp) of m {
  mesh tp
  file weights = torch "{tp}"
  embed = v@tp h  as "embed"
  ENTRY
  bias  = h       as "bias"
  rope  = none
  LINE
}
"""
OWN = 'q[l] = (n@tp d) h  as "q.{l}"\n  k[l] = (n@tp d) h  as "k.{l}"'
PACKED = 'qk[l] = (q: n@tp d + k: n@tp d) h  as "qk.{l}"'
PARTS = 'q[l] = (n@tp d) h[..2]  as "q.{l}"\n  q[l] = (n@tp d) h[2..]  as "r.{l}"\n  k = none'
LIKE = 'state s = like  as "{key}.s"'


def checked(state: str, entry: str = OWN, line: str = LIKE) -> Checked:
    text = TEXT.replace("STATE", f"state s : f32 {state}").replace("ENTRY", entry).replace("LINE", line)
    return check_text("a.ucpl", text, Given(), lambda _: None)


@pytest.mark.parametrize(
    ("state", "entry", "line", "code", "remedy"),
    [
        ("without v", OWN, LIKE, "E225", "without v for embed"),
        ("without v for bias", OWN, LIKE, "E225", "its dims are h"),
        ("without h for embd", OWN, LIKE, "E137", "`embed`"),
        ("without d for rope", OWN, LIKE, "E191", "take `rope` out"),
        ("without h for embed without v for embed", OWN, LIKE, "E008", "one clause"),
        ('without h for "q*" without d for "*q"', OWN, LIKE, "E008", "one clause"),
        ("without h without v", OWN, LIKE, "E008", "one clause"),
        ("for rest without h for embed", OWN, LIKE, "E225", "take `embed` out"),
        ("without l for q", OWN, LIKE, "E225", "put l into the pattern"),
        ("without h for bias", OWN, LIKE, "E225", "like(1)"),
        ("without h for q", PACKED, LIKE, "E225", "lines of their own"),
        ("without n d for q, k", PACKED, LIKE, "E225", "lines of their own"),
        ("without h for q", PARTS, LIKE, "E225", "the dim once"),
        ("without h for embed", OWN, 'state s = pad(flat(each), 2)  as "s"', "E225", "state s = like"),
        ("without h for embed", OWN, 'state * = pad(flat(each), 2)  as "s"', "E225", "state s = like"),
        ("without h for embed", OWN, f"framework deepspeed(stage = 1)\n  {LIKE}", "E225", "--drop s"),
        ("without h for embed", OWN, 'state s = like(2)  as "s"', "E001", "like(1)"),
        ("scalar without h for embed", OWN, LIKE, "E001", "`without`"),
        ("without h, v for embed", OWN, LIKE, "E001", "without h v for embed"),
    ],
)
def test_it_is_refused_with_what_to_write(state: str, entry: str, line: str, code: str, remedy: str) -> None:
    found = checked(state, entry, line).findings
    assert [one.code for one in found] == [code] and remedy in found[0].remedy, found


@pytest.mark.parametrize(
    ("state", "entry", "line"),
    [
        ("without h for embed", OWN, LIKE),
        ("without h for q, k", PACKED, LIKE),
        ('without h for "*k", "*q"', OWN, 'state s = like(1)  as "{key}.s"'),
        ('without h for "*k", q without v for "*d"', OWN, LIKE),
        ("without v for embed", OWN, 'state s = like  mean @tp  as "{key}.s"'),
        ("without h for bias", OWN, 'state s = like(1)  as "{key}.s"'),
    ],
)
def test_it_is_good(state: str, entry: str, line: str) -> None:
    found = checked(state, entry, line)
    assert found.findings == () and found.unchecked == ()
    assert [one.text for one in found.noted if one.rule == "missing-state"] == []


def test_a_used_model_names_its_dims_and_tensors_under_the_prefix() -> None:
    text = """ucpl 2
model tower {
  dim v = 4, h = 2
  embed, w : v h
  state s : f32  without h for embed without v for "w*"
}
model two {
  use tower() as a
  use tower() as b
}
layout x() of two {
  file weights = torch "w"
  a.embed = a.v a.h  as "a.embed"
  a.w     = a.v a.h  as "a.w"
  b.embed = b.v b.h  as "b.embed"
  b.w     = b.v b.h  as "b.w"
  state s = like     as "{key}.s"
}
"""
    found = resolve(load(("a.ucpl", text)), parse_call("x()")).tensors
    assert {name: dict(t.lacks) for name, t in found.items()} == {
        "a.embed": {"s": (1,)},
        "a.w": {"s": (0,)},
        "b.embed": {"s": (1,)},
        "b.w": {"s": (0,)},
    }
