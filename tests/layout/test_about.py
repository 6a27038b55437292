"""A diagnostic carries its subject as values.

Code that adds to a diagnostic does not parse its message.
"""

from __future__ import annotations

import pytest

from ucpl.errors import Diagnostic, UcplError
from ucpl.language import parse_call
from ucpl.layout import load, resolve
from ucpl.layout.models import UnknownTensor
from ucpl.layout.remedies import UnknownAxis

TEXT = """ucpl 1
model m {
  dim r = 4
  w : r
  v : r when r > 9
  alias u = w
}
layout x(tp) of m {
  mesh tp
  file weights = torch "{tp}.pt"
  LINE
}
"""


def refused(line: str) -> Diagnostic:
    with pytest.raises(UcplError) as caught:
        resolve(load(("a.ucpl", TEXT.replace("LINE", line))), parse_call("x(2)"))
    return caught.value.diagnostics[0]


def test_a_name_that_is_no_tensor_goes_with_its_refusal() -> None:
    found = refused('no.such = r  as "w"')
    assert (found.code, found.about) == ("E137", UnknownTensor("no.such"))
    second = refused("group g = u")
    assert (second.code, second.about) == ("E137", UnknownTensor("u"))
    assert "name `w`" in second.remedy
    assert "r > 9" in refused('wv = (w: r + v: r)  as "v"').message


def test_an_axis_that_there_is_not_goes_with_its_refusal() -> None:
    for line in ('w = r@pp  as "w"', 'w = r  mean @pp  as "w"', 'w = r  at pp[0]  as "w"'):
        found = refused(line)
        assert found.about == UnknownAxis("pp") and found.code in ("E148", "E149"), line
