"""Ranks without elements of a tensor are read back, in both forms.

Files of ranks that the layout lacks are refused.
"""

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
    """Pieces of 2 of 5 rows on 4 ranks.

    They are 2, 2, 1 and none.
    """
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


SUMS = """ucpl 1
model m {
  dim r = config.rows
  w : r
  n : r
}
layout parts(tp, pp = 1) of m {
  framework torch()
  mesh pp tp
  file weights = torch "{pp}/rank_{tp}.pt"
  w = r  sum @tp at pp[0] as "w"
  n = r@tp       at pp[0] as "n"
}
layout whole() of m {
  framework torch()
  file weights = torch "w.pt"
  w = r as "w"
  n = r as "n"
}
"""


def test_a_degree_too_small_is_no_part_of_a_checkpoint(tmp_path: Path) -> None:
    """Neither two addends of four, nor half of a stated dim."""
    (tmp_path / "s.ucpl").write_text(SUMS)
    (tmp_path / "in" / "0").mkdir(parents=True)
    for rank in range(4):
        torch.save(
            {"w": torch.full((4,), 10.0**rank), "n": torch.tensor([float(rank)])},
            tmp_path / "in" / "0" / f"rank_{rank}.pt",
        )
    (tmp_path / "in" / "notes_2.pt").write_text("named otherwise")
    file, config = tmp_path / "s.ucpl", {"rows": 4}
    ucpl.convert(tmp_path / "in", tmp_path / "out", f"{file}:whole()", layout=f"{file}:parts(4)", config=config)
    assert torch.load(tmp_path / "out" / "w.pt")["w"].tolist() == [1111.0] * 4
    torch.save({"w": torch.ones(4), "n": torch.ones(1)}, tmp_path / "in" / "0" / "rank_4.pt")
    with pytest.raises(UcplError) as caught:
        ucpl.convert(tmp_path / "in", tmp_path / "x", f"{file}:whole()", layout=f"{file}:parts(4)", config=config)
    found = next(d for d in caught.value.diagnostics if d.code == "E398")
    assert found.message == "0/rank_4.pt would be of a rank that parts(tp = 4, pp = 1) does not have"
    assert found.labels[0].file.endswith("in/0/rank_4.pt")


def test_a_file_that_is_neither_form_is_what_its_name_says(tmp_path: Path) -> None:
    file = spec(tmp_path, "safetensors")
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "whole.safetensors").write_text("{}")
    with pytest.raises(UcplError) as caught:
        ucpl.convert(tmp_path / "in", tmp_path / "x", f"{file}:cut(4)", layout=f"{file}:whole()")
    assert caught.value.diagnostics[0].code == "E430"
