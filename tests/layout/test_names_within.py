"""Names inside a used model that are words elsewhere.

A dim may be called x, and `value x * scale` keeps its usual meaning.
"""

from __future__ import annotations

import pytest

from tests.laws.agreement import check
from ucpl.errors import UcplError
from ucpl.language import parse_call
from ucpl.layout import Layout, load, resolve
from ucpl.placement import locate

TEXT = """ucpl 1
model patch(side = 2) {
  dim x = side, scale = 3
  w : scale x
  q : 4 dtype f8_e4m3fn
  s : 2 dtype f32 is scale of q by 2
}
model two {
  use patch(side = 4) as left
  use patch() as right
}
layout inner() of patch() {
  file weights = torch "a.pt"
  w = scale x  as "w.{x.size}" value x - 1
  q = _        as "q" dtype bf16 value x * scale
  s = none
}
layout both() of two {
  use inner() as left  key "left.{key}"
  use inner() as right key "right.{key}"
}
"""


def both() -> Layout:
    return resolve(load(("names.ucpl", TEXT)), parse_call("both()"))


def test_a_dim_called_x_is_the_models_own() -> None:
    """Two models have one x each.

    Earlier, the second model's x applied to both.
    """
    found = both()
    assert {path: t.counts for path, t in found.tensors.items() if path.endswith("w")} == {
        "left.w": (3, 4), "right.w": (3, 2),
    }  # fmt: skip
    assert {(h.key, h.shape) for p in locate(found).parts for h in p.homes if p.label.endswith("w")} == {
        (("left.w.4",), (3, 4)), (("right.w.2",), (3, 2)),
    }  # fmt: skip


def test_a_value_is_of_the_element_and_its_scale() -> None:
    storings = {e.path: e.storing for e in both().entries}
    assert {path: s.value for path, s in storings.items() if path.endswith("w")} == dict.fromkeys(
        ("left.w", "right.w"), (1.0, -1.0)
    )
    assert [s.scaled for path, s in sorted(storings.items()) if path.endswith("q")] == [True, True]


LABELS = """ucpl 1
model tower {
  dim n = 2, h = 3
  q.bias : n
  k.bias : n
}
model two {
  use tower() as left
  use tower() as right
  q.bias : 9
}
layout inner() of tower {
  file weights = torch "a.pt"
  qk.bias = (q.bias: n + k.bias: n)  as "qk"
}
layout both() of two {
  file weights = torch "a.pt"
  use inner() as left  key "left.{key}"
  use inner() as right key "right.{key}"
  q.bias = _ as "q"
}
"""


def test_a_label_is_of_the_model_that_is_used() -> None:
    """A label belongs to the used model.

    The model around it has a tensor of the same name.
    """
    found = resolve(load(("labels.ucpl", LABELS)), parse_call("both()"))
    assert {e.path: tuple(e.targets.values()) for e in found.entries} == {
        "left.qk.bias": ("left.q.bias", "left.k.bias"),
        "right.qk.bias": ("right.q.bias", "right.k.bias"),
        "q.bias": ("q.bias",),
    }
    assert check(LABELS, "both()")


def test_a_number_of_a_used_model_is_no_let_to_write() -> None:
    """`let left.n = 2` is no statement: the remedy names a valid one."""
    text = LABELS.replace("layout inner()", "layout inner(size = 2)").replace(
        "use inner() as left", "use inner(size = left.n) as left"
    )
    with pytest.raises(UcplError) as caught:
        resolve(load(("labels.ucpl", text)), parse_call("both()"))
    found = caught.value.diagnostics[0]
    assert found.code == "E101" and "let left.n" not in found.remedy and "-D left.n=" in found.remedy


TAKEN_BACK = """ucpl 1
model m {
  dim l = 2, n = 4
  dtype f32
  q : l n
  k : l n
}
layout a(tp) of m {
  mesh tp
  file weights = safetensors "t{tp}.safetensors"
  qk[l] = (q: n@tp + k: n@tp) as "{l}.qk"
}
layout b() of m extends a(tp = 1) {
  file weights = safetensors "model.safetensors"
  NONE = none
  q[l] = n as "{l}.q"
  k[l] = n as "{l}.k"
}
model two {
  use m() as x
}
model three {
  use two() as y
}
layout c() of two {
  file weights = safetensors "model.safetensors"
  use b() as x
}
layout d() of three {
  file weights = safetensors "model.safetensors"
  use c() as y
}
"""


@pytest.mark.parametrize("call", ["b()", "c()", "d()"])
def test_a_packed_entry_that_is_taken_back_is_so_under_use(call: str) -> None:
    found = locate(resolve(load(("taken.ucpl", TAKEN_BACK.replace("NONE", "qk"))), parse_call(call)))
    keys = {h.key[-1] for part in found.parts for h in part.homes}
    assert {key.rpartition(".")[2] for key in map(str, keys)} == {"q", "k"}
    with pytest.raises(UcplError, match="E139"):
        resolve(load(("taken.ucpl", TAKEN_BACK.replace("NONE", "kq"))), parse_call(call))
