"""Sources in a layout of any model with files of its own.

Names and shapes are those of the files.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import ucpl

SPEC = """ucpl 1
layout ranks(tp, pp = 2) of any {
  framework torch()
  mesh pp tp
  file weights = torch "m_{tp + pp * size(tp) + 1:02}.pt" key "module/{key}"
  file other   = torch "m_{tp + pp * size(tp) + 1:02}.pt"
  *            = ...                                 as "{name}"
  emb          = _@chunk(tp) _                       as "emb"
  "*.w"        = (_[..4]@tp + _[4..]@tp) ...         as "{name}"
  "*.o"        = _ _@tp                              as "{name}"
  * of buffer  = ...                        in other as "buf/{name}"
}
layout prefixed(tp) of any {
  framework torch()
  mesh tp
  file weights = safetensors "t{tp}.safetensors"
  *            = ...        as "p.{name}"
  "*.w"        = _@tp ...   as "{tp}/{name}.cut"
}
layout one() of any {
  framework torch()
  file weights = torch "one.pt"
  *            = ...        as "{name}"
}
layout padded(tp) of any {
  framework torch()
  mesh tp
  file weights = safetensors "t{tp}.safetensors"
  *            = ...            as "p.{name}"
  "*.w"        = pad(_, 8)@tp _ as "{tp}/{name}.cut"
}
"""


@pytest.fixture
def spec(tmp_path: Path) -> str:
    (tmp_path / "x.ucpl").write_text(SPEC)
    return f"{tmp_path}/x.ucpl"


@pytest.fixture
def full() -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    shapes = {"emb": (7, 4), "l.0.w": (6, 5), "l.0.o": (5, 6), "b.bias": (3,), "x": (2,), "s": ()}
    return {name: torch.randn(shape) for name, shape in shapes.items()}


def ranks(full: dict[str, torch.Tensor], folder: Path) -> Path:
    """Write two tp ranks, each twice for pp, in the layout `ranks`."""
    folder.mkdir()
    for pp in range(2):
        for tp in range(2):
            held = {
                "emb": full["emb"].chunk(2)[tp],
                "l.0.w": torch.cat([full["l.0.w"][:4].chunk(2)[tp], full["l.0.w"][4:].chunk(2)[tp]]),
                "l.0.o": full["l.0.o"].chunk(2, 1)[tp],
                "b.bias": full["b.bias"],
                "s": full["s"],
            }
            held = {name: value.clone() for name, value in held.items()}
            torch.save({"module": held, "buf": {"x": full["x"]}}, folder / f"m_{tp + 2 * pp + 1:02}.pt")
    return folder


def equal(path: Path, full: dict[str, torch.Tensor]) -> bool:
    held = torch.load(path, weights_only=True)
    return held.keys() == full.keys() and all(torch.equal(held[name], value) for name, value in full.items())


def test_files_of_ranks_are_a_source_without_a_model(spec: str, full: dict[str, torch.Tensor], tmp_path: Path) -> None:
    source = ranks(full, tmp_path / "src")
    ucpl.convert(source, tmp_path / "all", f"{spec}:one()", layout=f"{spec}:ranks(tp = 2)")
    assert equal(tmp_path / "all" / "one.pt", full)
    assert ucpl.verify(source, layout=f"{spec}:ranks(tp = 2)")


def test_one_file_and_safetensors_of_ranks_are_sources(
    spec: str, full: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    torch.save(full, tmp_path / "one.pt")
    ucpl.convert(tmp_path / "one.pt", tmp_path / "cut", f"{spec}:prefixed(tp = 3)", layout=f"{spec}:one()")
    source = tmp_path / "others"
    source.mkdir()
    for tp in range(3):
        held = {f"p.{name}": value.clone() for name, value in full.items() if name != "l.0.w"}
        save_file({**held, f"{tp}/l.0.w.cut": full["l.0.w"].chunk(3)[tp].clone()}, source / f"t{tp}.safetensors")
    for folder in (tmp_path / "cut", source):
        ucpl.convert(folder, tmp_path / "back", f"{spec}:one()", layout=f"{spec}:prefixed(tp = 3)", force=True)
        assert equal(tmp_path / "back" / "one.pt", full)


def test_what_the_files_do_not_say_is_refused(spec: str, full: dict[str, torch.Tensor], tmp_path: Path) -> None:
    source = ranks(full, tmp_path / "src")

    def refused(layout: str) -> str:
        with pytest.raises(ucpl.UcplError) as caught:
            ucpl.convert(source, tmp_path / "out", f"{spec}:one()", layout=f"{spec}:{layout}")
        return caught.value.diagnostics[0].code

    assert refused("prefixed(tp = 2)") == "E435", "no file of these names"
    assert refused("ranks(tp = 4, pp = 1)") == "E322", "the last piece is short"
    assert refused("ranks(tp = 2, pp = 3)") == "E391", "files of a third stage are missing"
    for tp in range(2):
        save_file({f"{tp}/l.0.w.cut": full["l.0.w"].clone()}, source / f"t{tp}.safetensors")
    for path in source.glob("*.pt"):
        path.unlink()
    assert refused("padded(tp = 2)") == "E101", "the begin of padding is unknown"
