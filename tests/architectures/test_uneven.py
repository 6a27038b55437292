"""Cuts so uneven that a rank has nothing of a tensor: what is written is read back, in both forms of files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import ucpl
from ucpl.errors import UcplError

SPEC = """ucpl 1
model m {
  dim n = 5, h = 3
  w : n h
  b : n
}
layout whole() of m {
  framework torch()
  file weights = FORM "whole.SUFFIX"
  w = n h  as "w"
  b = n    as "b"
}
layout cut(tp) of m {
  framework torch()
  mesh tp
  file weights = FORM "{tp}.SUFFIX"
  w = n@chunk(tp, 2) h  as "w"
  b = n@chunk(tp)       as "b"
}
"""


def spec(folder: Path, form: str) -> str:
    suffix = {"torch": "pt", "safetensors": "safetensors"}[form]
    path = folder / "uneven.ucpl"
    path.write_text(SPEC.replace("FORM", form).replace("SUFFIX", suffix))
    return str(path)


def numbers() -> dict[str, torch.Tensor]:
    return {"w": torch.arange(15.0).view(5, 3), "b": torch.arange(5.0) + 100}


@pytest.mark.parametrize("form", ["torch", "safetensors"])
def test_a_rank_with_nothing_of_a_tensor_is_read_back(form: str, tmp_path: Path) -> None:
    """5 rows in pieces of 2 on 4 ranks are 2, 2, 1 and none."""
    file, whole = spec(tmp_path, form), numbers()
    (tmp_path / "in").mkdir()
    if form == "torch":
        torch.save(whole, tmp_path / "in" / "whole.pt")
    else:
        save_file(whole, tmp_path / "in" / "whole.safetensors")
    ucpl.convert(tmp_path / "in", tmp_path / "four", f"{file}:cut(4)", layout=f"{file}:whole()")
    ucpl.convert(tmp_path / "four", tmp_path / "three", f"{file}:cut(3)", layout=f"{file}:cut(4)")
    ucpl.convert(tmp_path / "three", tmp_path / "out", f"{file}:whole()", layout=f"{file}:cut(3)")
    read = torch.load if form == "torch" else load_file
    out = read(next((tmp_path / "out").glob("whole.*")))
    last = read(next((tmp_path / "four").glob("3.*")))
    assert last["w"].shape == (0, 3) and last["b"].shape == (0,)
    assert all(torch.equal(out[name], tensor) for name, tensor in whole.items())


def test_what_is_empty_has_its_name_and_shape_all_the_same(tmp_path: Path) -> None:
    file = spec(tmp_path, "safetensors")
    for rank in range(4):
        part = {"w": numbers()["w"][2 * rank : 2 * rank + 2], "b": torch.cat([numbers()["b"][2 * rank : 2 * rank + 2]])}
        save_file({name: x.contiguous() for name, x in part.items()}, tmp_path / f"{rank}.safetensors")
    ucpl.convert(tmp_path, tmp_path.parent / f"{tmp_path.name}.whole", f"{file}:whole()", layout=f"{file}:cut(4)")
    save_file({"b": torch.zeros(0), "w": torch.zeros(0, 4)}, tmp_path / "3.safetensors")
    with pytest.raises(UcplError) as caught:
        ucpl.convert(tmp_path, tmp_path / "x", f"{file}:whole()", layout=f"{file}:cut(4)")
    assert caught.value.diagnostics[0].code == "E322"
    save_file({"b": torch.zeros(0)}, tmp_path / "3.safetensors")
    with pytest.raises(UcplError) as caught:
        ucpl.convert(tmp_path, tmp_path / "x", f"{file}:whole()", layout=f"{file}:cut(4)")
    assert caught.value.diagnostics[0].code == "E321"
