"""Open sizes of a spec come from shapes, with their origins."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import ucpl
from ucpl.errors import UcplError

SPEC = """ucpl 1

model open {
  dim n = 4
  embed : v h
  up    : l f h
  q     : l n d h
  norm  : h
  dtype f32
}

layout stored() of open {
  framework huggingface()
  file weights = safetensors "model.safetensors"
  embed = v h      as "embed.weight"
  up[l] = f h      as "layers.{l}.up.weight"
  q[l]  = (n d) h  as "layers.{l}.q.weight"
  norm  = h        as "norm.weight"
}

layout cut(tp) of open {
  framework torch()
  mesh tp
  file weights = torch "{tp}.pt"
  embed = v@spread(tp) h  as "e"
  up[l] = f@tp h          as "{l}.u"
  q[l]  = (n@tp d) h      as "{l}.q"
  norm  = h               as "n"
}
"""


def written(tmp_path: Path, layers: int, norm: int = 5) -> Path:
    tensors = {"embed.weight": torch.arange(35.0).view(7, 5), "norm.weight": torch.ones(norm)}
    for i in range(layers):
        tensors[f"layers.{i}.up.weight"] = torch.arange(30.0).view(6, 5) + i
        tensors[f"layers.{i}.q.weight"] = torch.arange(60.0).view(12, 5) - i
    (tmp_path / "source").mkdir()
    save_file(tensors, tmp_path / "source" / "model.safetensors")
    (tmp_path / "source" / "config.json").write_text(json.dumps({"model_type": "open"}))
    (tmp_path / "open.ucpl").write_text(SPEC)
    return tmp_path / "source"


def test_dims_and_indices_are_read_from_names_and_shapes(tmp_path: Path) -> None:
    source = written(tmp_path, layers=12)  # more than nine: numbers, not texts, are compared
    spec = tmp_path / "open.ucpl"
    made = ucpl.convert(source, tmp_path / "cut", to=f"{spec}:cut(tp = 2)", layout=f"{spec}:stored()").plan
    said = {o.name: (o.value, o.origin) for o in made.origins}
    assert said["v"] == (7, "shape of embed.weight")
    assert said["d"] == (3, "shape of layers.0.q.weight")
    assert said["l"][0] == 12 and said["f"][0] == 6 and said["h"][0] == 5
    parts = [torch.load(tmp_path / "cut" / f"{r}.pt", weights_only=True) for r in range(2)]
    assert torch.equal(torch.cat([p["11.u"] for p in parts]), torch.arange(30.0).view(6, 5) + 11)
    assert torch.equal(torch.cat([p["11.q"] for p in parts]), torch.arange(60.0).view(12, 5) - 11)
    ucpl.convert(tmp_path / "cut", tmp_path / "again", to=f"{tmp_path}/cut/ucpl/layout.ucpl:stored(tp = 1)")
    assert ucpl.compare(tmp_path / "cut", tmp_path / "again")


def test_shapes_that_disagree_are_named(tmp_path: Path) -> None:
    source = written(tmp_path, layers=2, norm=6)
    with pytest.raises(UcplError, match=r"E163: dim `h` is 5 .* and 6 by the shape of norm.weight") as caught:
        ucpl.convert(source, tmp_path / "cut", to="plain()", layout=f"{tmp_path}/open.ucpl:stored()")
    assert caught.value.diagnostics[0].labels[0].line == 18


def test_a_size_that_is_given_is_not_read(tmp_path: Path) -> None:
    source = written(tmp_path, layers=2)
    spec = tmp_path / "open.ucpl"
    spec.write_text(SPEC.replace("dim n = 4", "dim n = 4, h = 6"))
    with pytest.raises(UcplError, match="E322"):
        ucpl.convert(source, tmp_path / "cut", to="plain()", layout=f"{spec}:stored()")


def test_without_a_checkpoint_an_open_size_is_asked_for(tmp_path: Path) -> None:
    written(tmp_path, layers=1)
    spec = tmp_path / "open.ucpl"
    with pytest.raises(UcplError, match="E101: `embed` has a dim `v` that has no size"):
        ucpl.plan(f"{spec}:stored()", f"{spec}:cut(tp = 2)")


def test_sizes_of_files_that_only_the_spec_describes(tmp_path: Path) -> None:
    """Uneven pieces of two ranks: sizes are those of all pieces together."""
    source = written(tmp_path, layers=12)
    spec = tmp_path / "open.ucpl"
    ucpl.convert(source, tmp_path / "cut", to=f"{spec}:cut(tp = 2)", layout=f"{spec}:stored()")
    (tmp_path / "cut" / "note.txt").write_text("no file of the spec")
    (tmp_path / "cut" / "ucpl" / "layout.ucpl").unlink()
    made = ucpl.convert(tmp_path / "cut", tmp_path / "back", to=f"{spec}:stored()", layout=f"{spec}:cut(tp = 2)").plan
    said = {o.name: (o.value, o.origin) for o in made.origins}
    assert said["v"] == (7, "shapes of e on all ranks") and said["d"] == (3, "shape of 0.q")
    assert ucpl.compare(source, tmp_path / "back")
