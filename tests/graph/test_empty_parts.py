"""Stored tensors without elements have the dtype of their tensor."""

from __future__ import annotations

from ucpl.graph import build
from ucpl.language import parse_call
from ucpl.layout import load, resolve
from ucpl.placement import locate
from ucpl.planning import order

TEXT = """ucpl 1
model m {
  dim v = 2
  dtype f32
  a : v[where([0], 1)]
  b : ()
}
layout source() of m {
  file weights = torch "w.pt"
  a[v[1..]] = () as "a.{v}"
  a[v[not 1..]] = () as "a.{v}"
  b = () as "b"
}
layout target() of m {
  file weights = torch "w.pt"
  a = ((v[..1] + v[1..])) as "a"
  b = () as "b"
}
"""


def test_a_tensor_without_elements_has_its_dtype() -> None:
    source, target = (locate(resolve(load(("m.ucpl", TEXT)), parse_call(call))) for call in ("source()", "target()"))
    stored = {t.key: (t.dtype, t.shape) for t in order(build(source, target)).targets}
    assert stored == {("a",): ("f32", (0,)), ("b",): ("f32", ())}
