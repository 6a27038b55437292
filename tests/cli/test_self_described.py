"""A folder of a layout of one's own carries that layout, closed.

Reading it back needs no spec.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import ucpl
from ucpl.language import parse

SPEC = """ucpl 1

let wide = 4
model own {
  dim l = 3, h = wide, f = config.width, g = default(config.groups, 2)
  up   : l f h
  down : l h f
  norm : h when config.has_norm
  bias : h when not config.has_norm
  dtype f32
}

layout whole() of own {
  framework torch()
  file weights = torch "whole.pt"
  up   = l f h  as "up"
  down = l h f  as "down"
  norm = h      as "norm" when config.has_norm
}

layout cut(tp, pp = 1) of own {
  framework torch()
  mesh pp tp
  index l = l@spread(pp)
  file weights = torch "stage_{pp}_{tp:02}.pt" key "model/{key}"
  up[l]   = f@spread(tp) h  as "{l}.up"
  down[l] = h f@spread(tp)  as "{l}.down"
  norm    = h  at pp[-1]    as "norm" when config.has_norm
}

layout cut_again(tp) of own extends cut(tp = tp, pp = 2) {
  norm = h  at pp[0]  as "norm.first"
}
"""
CONFIG = {"width": 7, "has_norm": True}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    (tmp_path / "own.ucpl").write_text(SPEC)
    (tmp_path / "source").mkdir()
    torch.save(
        {
            "up": torch.arange(84.0).view(3, 7, 4),
            "down": torch.arange(84.0).view(3, 4, 7) + 1000,
            "norm": torch.ones(4),
        },
        tmp_path / "source" / "whole.pt",
    )
    return tmp_path / "source"


@pytest.mark.parametrize("call", ["cut(tp = 3, pp = 2)", "cut(tp = 2)", "cut_again(tp = 2)"])
def test_back_without_a_spec(source: Path, tmp_path: Path, call: str) -> None:
    spec = tmp_path / "own.ucpl"
    ucpl.convert(source, tmp_path / "cut", to=f"{spec}:{call}", layout=f"{spec}:whole()", config=CONFIG)
    text = (tmp_path / "cut" / "ucpl" / "layout.ucpl").read_text()
    parse(text)
    assert "config." not in text and "when" not in text
    # No layout and no config here: the folder describes itself.
    ucpl.convert(tmp_path / "cut", tmp_path / "back", to=f"{spec}:whole()", config=CONFIG)
    was = torch.load(source / "whole.pt", weights_only=True)
    back = torch.load(tmp_path / "back" / "whole.pt", weights_only=True)
    assert set(back) == set(was) and all(torch.equal(back[name], was[name]) for name in was)
    assert ucpl.verify(tmp_path / "cut")
    assert ucpl.compare(tmp_path / "cut", tmp_path / "back")


USED_TWICE = """ucpl 1
model tower(rows = 4) {
  dim a = rows
  dtype bf16
  w : a
  state m : f32
}
model towers {
  use tower() as x
  use tower(rows = 6) as y
  z : 3 dtype f32
}
layout one(tp, rows = 4) of tower(rows = rows) {
  framework torch()
  mesh tp
  mesh other: tp
  file weights = torch "low.{tp}"
  w = a@tp  on other as "w"
  group own = w
  state m of own = like  on other as "m.w"
}
layout all(tp) of towers {
  framework torch()
  mesh tp
  file weights = torch "high"
  use one(tp = tp) as x key "x.{key}"
  use one(tp = tp, rows = 6) as y key "y.{key}"
  z = _  as "z"
  group own = z
  state m of own = like  as "z.m"
}
"""


def test_a_layout_that_uses_another_twice_reads_back(tmp_path: Path) -> None:
    """Statements of both are made once, by the folder's own text.

    They are the framework, a mesh with a name, a dtype, a state.
    """
    spec = tmp_path / "towers.ucpl"
    spec.write_text(USED_TWICE)
    (tmp_path / "source").mkdir()
    x, y = torch.arange(4.0), torch.arange(6.0) + 10
    low = {"x.w": x.bfloat16(), "x.m.w": x + 20, "y.w": y.bfloat16(), "y.m.w": y + 20}
    torch.save(low, tmp_path / "source" / "low.0")
    torch.save({"z": torch.ones(3), "z.m": torch.zeros(3)}, tmp_path / "source" / "high")
    ucpl.convert(tmp_path / "source", tmp_path / "two", to=f"{spec}:all(tp = 2)", layout=f"{spec}:all(tp = 1)")
    assert ucpl.verify(tmp_path / "two")
    ucpl.convert(tmp_path / "two", tmp_path / "plain.pt", to="plain()")  # by its own text alone
    params = torch.load(tmp_path / "plain.pt")["params"]
    assert torch.equal(params["y.w"]["weight"], y.bfloat16()) and torch.equal(params["y.w"]["m"], y + 20)
    assert torch.equal(params["x.w"]["weight"], x.bfloat16()) and params["z"]["weight"].dtype == torch.float32
