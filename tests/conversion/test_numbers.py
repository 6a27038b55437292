"""Per-parameter numbers of an optimizer are carried, or the plan names them."""

from __future__ import annotations

from pathlib import Path

import torch

import ucpl

SPEC = """ucpl 1
model m {
  dim r = 4
  b : r
  state exp_avg : f32
  state step    : f32 scalar
  group "0" = b
}
layout renamed() of m {
  framework plain(file = "plain.pt", has_masters = 0)
  file weights = torch "plain.pt"
  b = r  as "params/a/weight"
  state exp_avg of "0" = like  as "params/a/exp_avg"
  derive fp32 from weight
}
"""


def saved(folder: Path) -> Path:
    folder.mkdir()
    held = {"weight": torch.arange(4.0), "exp_avg": torch.ones(4), "step": torch.tensor(3.0)}
    whole = {
        "params": {"a": held},
        "buffers": {},
        "aliases": {},
        "groups": [{"params": ["a"], "lr": 0.5}],
        "scalars": {},
    }
    torch.save(whole, folder / "plain.pt")
    return folder


def test_the_number_of_a_tensor_with_another_name_is_reported_as_left_out(tmp_path: Path) -> None:
    (tmp_path / "own.ucpl").write_text(SPEC, encoding="utf-8")
    made = ucpl.convert(saved(tmp_path / "a"), tmp_path / "b", to="plain()", layout=f"{tmp_path}/own.ucpl:renamed()")
    kept = torch.load(tmp_path / "b" / "plain.pt", weights_only=True)["params"]["b"]
    assert "step" not in kept
    assert "step of a: no tensor of the target has this name, which the files give it" in made.plan.dropped


def test_the_number_of_a_tensor_goes_along_or_is_reported_as_left_out(tmp_path: Path) -> None:
    made = ucpl.convert(saved(tmp_path / "a"), tmp_path / "b", to="plain()")
    assert not [text for text in made.plan.dropped if text.startswith("step")]
    kept = torch.load(tmp_path / "b" / "plain.pt", weights_only=True)["params"]["a"]
    assert kept["step"] == 3
    alone = ucpl.convert(tmp_path / "a", tmp_path / "c", to="safetensors()")
    assert "step of a: the target stores no step" in alone.plan.dropped
