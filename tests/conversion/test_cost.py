"""The work of `check` does not grow with equal layers and experts.

It is counted in calls, at any load.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.counted import calls
from ucpl.conversion.checking import check
from ucpl.conversion.requests import Given

TEXT = """ucpl 1
model m {
  dim l = %d, e = %d, h = 8, f = 16, n = 4, d = 2, dense = 3
  ln   : l h
  q    : l n d h
  mlp  : l[..dense] f h
  gate : l[dense..] e f h
  up   : l[dense..] e f h
  down : l[dense..] e h f
  state fp32, exp_avg : f32
}
layout hf() of m {
  file weights = safetensors "model.safetensors"
  ln[l] = h             as "layers.{l}.ln"
  q[l] = (n d) h        as "layers.{l}.q"
  mlp[l] = f h          as "layers.{l}.mlp"
  gate[l, e] = f h      as "layers.{l}.experts.{e}.gate"
  up[l, e] = f h        as "layers.{l}.experts.{e}.up"
  down[l, e] = h f      as "layers.{l}.experts.{e}.down"
}
layout parallel(tp, ep = 4) of m {
  mesh ep tp
  index e = e@ep
  file weights = torch "{ep}_{tp}"
  ln[l] = h                                as "{l}.ln"
  q[l] = (n@tp d) h                        as "{l}.q"
  mlp[l] = f@tp h                          as "{l}.mlp"
  fc1[l, e] = (gate: f@tp + up: f@tp) h    as "{l}.experts.{e.local}.fc1"
  down[l, e] = h f@tp                      as "{l}.experts.{e.local}.fc2"
  state * = like in weights as "{state}/{key}"
}
"""


def spent(path: Path, layers: int, experts: int) -> int:
    """Calls of `check`."""
    path.write_text(TEXT % (layers, experts))
    return calls(lambda: not check(str(path), Given()).findings or pytest.fail("findings"))


def test_check_does_not_walk_layers_and_experts_one_by_one(tmp_path: Path) -> None:
    spent(tmp_path / "m.ucpl", 5, 4)  # fill imports and caches first
    few, many = spent(tmp_path / "m.ucpl", 6, 8), spent(tmp_path / "m.ucpl", 60, 256)
    assert many < 2 * few, (few, many)
