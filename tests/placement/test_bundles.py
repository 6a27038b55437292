"""Boxes of tensors of different sizes that are cut by one pattern."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ucpl.language import parse_call
from ucpl.layout import axes as ax
from ucpl.layout import load, resolve
from ucpl.placement.bundles import rows_of

TEXT = """ucpl 2
model m {
  dim a = 3, b = 7, c = 5, d = 2
  first  : a b
  second : c d
}
layout x() of m {
  file weights = torch "all.pt"
  first  = a b  as "first"
  second = c d  as "second"
}
"""
CHUNK = (ax.Split("tp", "chunk"),)


@pytest.mark.parametrize("dim", [0, 1])
def test_each_row_is_a_piece_of_its_tensor_as_torch_cuts_it(dim: int) -> None:
    layout = resolve(load(("x.ucpl", TEXT)), parse_call("x()"))
    shape: list[ax.Axis] = [ax.Dim("a"), ax.Dim("b")]
    shape[dim] = ax.Cut(shape[dim], CHUNK)
    rows = rows_of(layout, ("first", "second"), tuple(shape), {"tp": 3}, {"tp": np.arange(3)}, 2)
    numbers = {"first": torch.arange(21).reshape(3, 7), "second": torch.arange(10).reshape(5, 2)}
    pieces = {name: torch.chunk(whole, 3, dim=dim) for name, whole in numbers.items()}
    assert len(rows.tensor) == 6
    for n in range(6):
        name, rank = rows.owned[n], int(rows.coordinate[n])
        if rank >= len(pieces[name]):
            assert 0 in rows.shape[n]
            continue
        piece = pieces[name][rank]
        (low, high, stride), whole = (
            (column[n].tolist() for column in (rows.low, rows.high, rows.stride)),
            numbers[name],
        )
        assert rows.shape[n].tolist() == list(piece.shape) and rows.begins[n].tolist() == low
        assert torch.equal(whole[low[0] : high[0], low[1] : high[1]], piece)
        assert stride == list(piece.contiguous().stride())
