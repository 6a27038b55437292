"""State lines and lines that take back, in a used layout."""

from __future__ import annotations

import pytest

from ucpl.errors import UcplError
from ucpl.language import parse_call
from ucpl.layout import load, resolve
from ucpl.placement import locate

TEXT = """ucpl 1
model tower(rows = 2) {
  dim r = rows
  w : r
  b : r
  state m, n : f32
}
model towers {
  use tower(rows = 4) as left
  use tower() as right
  x : 3
}
layout base(tp) of tower() {
  mesh tp
  file weights = torch "w_{tp}.pt"
  file optim   = torch "o_{tp}.pt"
  w = r@tp as "w"
  b = r    as "b"
}
layout one(tp) of tower() extends base(tp) {
  b = none
  group own = w
  LINE
}
layout pair(tp) of towers {
  mesh pp tp
  let pp = 2
  file weights = torch "a_{pp}{tp}.pt"
  file optim   = torch "m_{pp}{tp}.pt"
  use one(tp = tp) as left  key "left.{key}" at pp[0]
  use one(tp = tp) as right key "right.{key}"
  x = _ as "x"
  group here = x
  state m of here = like as "{name}.{state}"
}
"""


def places(line: str) -> set[tuple[str, str, str]]:
    found = resolve(load(("used.ucpl", TEXT.replace("LINE", line))), parse_call("pair(1)"))
    homes = ((p.state, h) for p in locate(found).parts for h in p.homes)
    return {(state, h.file, "/".join(map(str, h.key))) for state, h in homes}


WEIGHTS = {
    ("weight", "w_0.pt", "left.w"),
    ("weight", "w_0.pt", "right.w"),
    ("weight", "a_00.pt", "x"),
    ("weight", "a_10.pt", "x"),
}
HERE = {("m", "m_00.pt", "x.m"), ("m", "m_10.pt", "x.m")}


@pytest.mark.parametrize(
    ("line", "keys"),
    [
        (
            'state m of own = like as "{key}.m"',
            ("left.w.m", "right.w.m"),
        ),  # the key of the entry, which is wrapped already
        ('state m of own = like as "{state}.w"', ("left.m.w", "right.m.w")),
        ('state m of own = flat(each) as "flat"', ("left.flat", "right.flat")),
        ('state m of own = flat(each) in optim as "flat"', ("left.flat", "right.flat")),
        ("state * = none", ()),
    ],
)
def test_its_states_are_in_its_files_under_its_keys(line: str, keys: tuple[str, ...]) -> None:
    """`b = none` with `use ... at` declares no place without storage."""
    assert places(line) == WEIGHTS | HERE | {("m", "o_0.pt", key) for key in keys}


@pytest.mark.parametrize(
    "line",
    [
        'state m = like as "m"',
        'state * of * = flat(each) as "m"',
        'group rest = all - own\n  state m of rest = like as "m"',
    ],
)
def test_states_of_the_full_model_are_not_its_to_declare(line: str) -> None:
    with pytest.raises(UcplError) as caught:
        places(line)
    found = caught.value.diagnostics[0]
    assert found.code == "E194" and "use" in found.remedy and found.labels[0].line
