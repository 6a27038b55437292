"""`any @tp` of a pattern that tp cuts in some terms.

The uncut terms are copies along tp and trusted; the cut ones are not.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import ucpl
from ucpl.errors import UcplError

ENTRY = '  w = (n[..4]@tp + n[4..]) any @tp  as "w"\n'
FLAT = """  w = (n[..4]@tp + n[4..]) any @tp
  state s = flat(each)  in optim as "s"
  derive weight from s
"""
SPEC = """ucpl 1
model m {{
  dim n = 6
  dtype f32
  w : n
  state s : f32
}}
layout x(dp, tp) of m {{
  mesh dp tp
  framework torch()
  file weights = torch "{{dp}}.{{tp}}.pt"
  file optim   = torch "{{dp}}.{{tp}}.pt"
{lines}}}
layout y() of m {{
  framework torch()
  file weights = torch "y.pt"
  {target}
}}
"""
CUT, COPIED = 0, 2  # positions on a rank: first two elements of its own along tp, then two that all of tp have
CHANGES = [
    ((0, 0), CUT, "E613"),
    ((1, 0), CUT, "E613"),
    ((0, 1), CUT, "E613"),
    ((1, 1), CUT, "E613"),  # dp ranks hold the same of it, on every tp
    ((0, 0), COPIED, "E613"),
    ((1, 0), COPIED, "E613"),  # the first tp's are equal over dp
    ((0, 1), COPIED, ""),
    ((1, 1), COPIED, ""),  # those of other tp are not looked at
]


def converted(folder: Path, kind: str, change: tuple[int, int] | None = None, position: int = 0) -> list[float]:
    (folder / "in").mkdir()
    for dp in range(2):
        for tp in range(2):
            own = torch.tensor([2.0 * tp, 2.0 * tp + 1, 4.0, 5.0])
            own[position] += 100 * ((dp, tp) == change)
            torch.save({"w" if kind == "entry" else "s": own}, folder / "in" / f"{dp}.{tp}.pt")
    target = 'w = n  as "w"' if kind == "entry" else 'w = n\n  state s = like  as "w"\n  derive weight from s'
    spec = folder / "spec.ucpl"
    spec.write_text(SPEC.format(lines=ENTRY if kind == "entry" else FLAT, target=target))
    here = f"{spec}:x(dp=2, tp=2)"
    drop = ("s",) if kind == "entry" else ()
    ucpl.convert(folder / "in", folder / "out", layout=here, to=f"{spec}:y()", drop=drop)
    found: list[float] = torch.load(folder / "out" / "y.pt")["w"].tolist()
    return found


@pytest.mark.parametrize("kind", ["entry", "flat"])
def test_what_all_ranks_have_is_read_of_the_first_and_what_is_cut_of_each(tmp_path: Path, kind: str) -> None:
    assert converted(tmp_path, kind) == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize(("change", "position", "code"), CHANGES)
@pytest.mark.parametrize("kind", ["entry", "flat"])
def test_a_copy_that_differs_is_found_where_it_is_not_trusted(
    tmp_path: Path, kind: str, change: tuple[int, int], position: int, code: str
) -> None:
    if not code:
        assert converted(tmp_path, kind, change, position) == [0, 1, 2, 3, 4, 5]
        return
    with pytest.raises(UcplError, match=code):
        converted(tmp_path, kind, change, position)
