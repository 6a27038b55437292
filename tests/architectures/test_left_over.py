"""E398 depends on the names in a template's braces.

Numbers of ranks, and none that is the same on every rank.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import ucpl
from ucpl.errors import UcplError

SPEC = """ucpl 1
model m {
  dim l = 2, k = 4, h = 3
  a : l h
  w : k h
  b : k
}
layout parts(tp, pp = 1) of m {
  framework torch()
  mesh pp tp
  file layers = torch "LAYERS"
  file last = torch "LAST"
  a[l] = h       in layers as "a"
  w    = k@tp h  in last as "w"
  b    = k       in last as "b"
}
layout whole() of m {
  framework torch()
  file weights = torch "w.pt"
  a = l h as "a"
  w = k h as "w"
  b = k   as "b"
}
"""

# (files of layers, file of the rest, a file that is of no line, one of a third rank)
TEMPLATES = [
    ("layer_{l:02}-m_{tp:02}.pt", "layer_{l.size + 4:02}-m_{tp:02}.pt", "layer_03-m_00.pt", "layer_06-m_02.pt"),
    ("layer_{l:02}-m_{tp:02}.pt", "layer_{l.size + 4:02}-m_{tp:02}.pt", "layer_03-m_01.pt", "layer_01-m_02.pt"),
    ("layer_{l}_{tp}.pt", "layer_{size(pp) + 8}_{tp}.pt", "layer_8_0.pt", "layer_9_2.pt"),
    ("{l}/{tp + size(tp) * 4}.pt", "{h.size}/{tp + size(tp) * 4}.pt", "2/8.pt", "3/10.pt"),
    ("s{tp}.l{l}.pt", "s{tp}.l{tp * 0 + 7}.pt", "s0.l5.pt", "s2.l7.pt"),
    ("{l}-{rank}.pt", "{h.size * 2}-{rank}.pt", "5-1.pt", "6-2.pt"),
    ("{l}-{tp}.pt", "{tp + 2 * tp}-{tp}.pt", "6-1.txt", "6-2.pt"),
]


def _spec(folder: Path, layers: str, last: str) -> str:
    path = folder / "s.ucpl"
    path.write_text(SPEC.replace("LAYERS", layers).replace("LAST", last))
    return str(path)


@pytest.mark.parametrize(("layers", "last", "other", "further"), TEMPLATES)
def test_files_of_another_line_are_of_no_rank_too_many(
    layers: str, last: str, other: str, further: str, tmp_path: Path
) -> None:
    file = _spec(tmp_path, layers, last)
    whole = {"a": torch.arange(6.0).view(2, 3), "w": torch.arange(12.0).view(4, 3), "b": torch.arange(4.0)}
    (tmp_path / "in").mkdir()
    torch.save(whole, tmp_path / "in" / "w.pt")
    ucpl.convert(tmp_path / "in", tmp_path / "two", f"{file}:parts(2)", layout=f"{file}:whole()")
    (tmp_path / "two" / other).parent.mkdir(exist_ok=True)
    (tmp_path / "two" / other).write_text("named otherwise")
    ucpl.convert(tmp_path / "two", tmp_path / "out", f"{file}:whole()", layout=f"{file}:parts(2)")
    out = torch.load(tmp_path / "out" / "w.pt")
    assert all(torch.equal(out[name], tensor) for name, tensor in whole.items())
    torch.save({"w": torch.ones(2, 3), "b": torch.ones(4)}, tmp_path / "two" / further)
    with pytest.raises(UcplError) as caught:
        ucpl.convert(tmp_path / "two", tmp_path / "x", f"{file}:whole()", layout=f"{file}:parts(2)")
    assert "E398" in [d.code for d in caught.value.diagnostics]
    found = next(d for d in caught.value.diagnostics if d.code == "E398")
    assert found.message.startswith(f"{further} would be of a rank")
