"""Lines about tensors whose condition does not hold."""

from __future__ import annotations

import pytest

from tests.oracle import homes, mean
from ucpl.errors import UcplError
from ucpl.language import parse, parse_call, print_file
from ucpl.layout import Layout, load, resolve
from ucpl.layout.expand import close
from ucpl.layout.scope import Config

MODEL = """ucpl 1
model m {
  let bias = default(config.bias, 0), tied = default(config.tied, 0)
  dim l = 2, r = 4
  w    : l r
  v    : l r
  b    : l r  when bias
  c    : l r  when bias
  head : r    when not tied
  alias head = norm  when tied
  norm : r
  loss : r    when config.auxiliary
  group decay = w, b
  group rest = v, c, norm
  state m1 : f32
}
"""
LAYOUT = """layout x(tp = 1) of m {
  mesh tp
  file weights = torch "{tp}.pt"
  w[l]  = r        as "{l}.w"
  v[l]  = r        as "{l}.v"
  bc[l] = (b: r + c: r)  as "{l}.bc"
  head  = r        as "head"
  norm  = r        as "norm"
  group g = w, bc, head
  fill b = 0
  LINE
}
"""


def resolved(config: Config, line: str = "") -> Layout:
    return resolve(load(("a.ucpl", MODEL + LAYOUT.replace("LINE", line))), parse_call("x()"), config=config)


@pytest.mark.parametrize("bias", (0, 1))
def test_a_line_of_tensors_that_are_not_there_is_skipped(bias: int) -> None:
    layout = resolved({"bias": bias})
    assert [e.path for e in layout.entries] == ["w", "v", *(["bc"] if bias else []), "head", "norm"]
    assert layout.groups["g"].members == (("w", "bc", "head") if bias else ("w", "head"))
    assert dict(layout.model_groups)["decay"] == (("w", "b") if bias else ("w",))
    assert [f.names for f in layout.fillings] == ([{"b"}] if bias else [])


def test_a_name_that_is_a_tensor_or_a_second_name_is_always_there() -> None:
    assert [e.alias for e in resolved({"tied": 1}).entries if e.path == "head"] == ["head"]
    assert [e.alias for e in resolved({"tied": 0}).entries if e.path == "head"] == [None]


def test_a_line_with_another_tensor_is_refused() -> None:
    with pytest.raises(UcplError, match=r"`b` is in the model when bias, which does not hold"):
        resolved({"x": 1}, 'wb[l] = (w: r + b: r)  as "{l}.wb"')


def test_a_condition_that_needs_a_config_asks_for_it() -> None:
    with pytest.raises(UcplError, match=r"config\.auxiliary") as caught:
        resolved({}, 'loss = r  as "loss"')
    assert caught.value.diagnostics[0].code == "E105"
    assert "loss" not in [e.path for e in resolved({"x": 1}, 'loss = r  as "loss"').entries]


def test_names_in_a_line_that_is_skipped_are_looked_up() -> None:
    with pytest.raises(UcplError, match="no dim is called `q`"):
        resolved({"x": 1}, 'c[l] = q  as "{l}.c"')


@pytest.mark.parametrize("bias", (0, 1))
def test_the_same_as_the_oracle_and_as_the_closed_text(bias: int) -> None:
    text = MODEL + LAYOUT.replace("  fill b = 0\n", "").replace("LINE", "")
    config = {"bias": bias, "auxiliary": 0}
    meaning = mean(text, "x()", config=config)
    assert [e.path for e in meaning.entries] == [e.path for e in resolved(config).entries]
    assert {g: i.members for g, i in meaning.groups.items()}["g"] == resolved(config).groups["g"].members
    assert len(homes(meaning)) == (8 if bias else 6)
    closed = print_file(close(load(("a.ucpl", text)), parse_call("x()"), config=config))
    parse(closed)
    assert ("bc" in closed) == bool(bias) and "when" not in closed
