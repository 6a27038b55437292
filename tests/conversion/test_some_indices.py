"""Tensors with some indices of a dim, in any-model forms.

Rows are stored end to end there.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import ucpl

SPEC = """
ucpl 1
model m {
  dim l = 4, h = 3
  every : l h
  later : l[1..] h
  odd   : h l[1.. by 2]
  mtp   : l[4..] h
  alias head = every
  alias ahead = mtp
  group "0" = every, mtp
  group "1" = later, odd
  state exp_avg : f32
}

layout one() of m {
  framework torch()
  file weights = torch "one.pt"
  every[l] = h as "every.{l}"
  later[l] = h as "later.{l}"
  odd[l]   = h as "odd.{l}"
  mtp[l]   = h as "mtp.{l}"
  state * of * = like as "exp_avg/{path}"
}
"""
ROWS = {"every": (0, 1, 2, 3), "later": (1, 2, 3), "odd": (1, 3)}


def row(name: str, layer: int) -> torch.Tensor:
    return torch.arange(3.0) + 10 * layer + 100 * len(name)


@pytest.fixture
def made(tmp_path: Path) -> Path:
    file = {f"{name}.{l}": row(name, l) for name, layers in ROWS.items() for l in layers}
    torch.save({**file, "exp_avg": {key: -value for key, value in file.items()}}, tmp_path / "one.pt")
    (tmp_path / "one.ucpl").write_text(SPEC.replace("exp_avg/{path}", "exp_avg/{key}"))
    return tmp_path


def whole(name: str) -> torch.Tensor:
    rows = torch.stack([row(name, l) for l in ROWS[name]])
    return rows.T if name == "odd" else rows


@pytest.mark.parametrize("fsdp", [1, 2, 3, 5])
def test_chunks_begin_where_the_rows_that_there_are_lie(made: Path, fsdp: int) -> None:
    """Layers are dealt, those that a tensor lacks, too.

    Torch reads each rank's part of it as one tensor without gaps.
    """
    ucpl.convert(made / "one.pt", made / "dcp", to=f"dcp(fsdp={fsdp})", layout=f"{made}/one.ucpl:one()")
    dcp_to_torch_save(made / "dcp", made / "torch.pt")
    held = torch.load(made / "torch.pt", weights_only=False)
    assert held["model"].keys() == {*ROWS, "head"}
    for name in ROWS:
        assert torch.equal(held["model"][name], whole(name)), name
        assert torch.equal(held["optim"]["state"][name]["exp_avg"], -whole(name)), name
    assert ucpl.verify(made / "dcp")


@pytest.mark.parametrize("form", ["plain()", "safetensors()", "zero0(dp=1)", "dcp(fsdp=2)"])
def test_a_tensor_of_no_index_is_none(made: Path, form: str) -> None:
    """As layers of multi-token prediction that a config does not ask for.

    Nothing says their dtype.
    """
    ucpl.convert(made / "one.pt", made / "there", to=form, layout=f"{made}/one.ucpl:one()")
    assert ucpl.verify(made / "there")
    ucpl.convert(made / "there", made / "plain.pt", to="plain()")
    held = torch.load(made / "plain.pt", weights_only=True)
    assert held["params"].keys() == ROWS.keys() and "ahead" not in held["aliases"]
    assert sorted(name for group in held["groups"] for name in group["params"]) == sorted(ROWS)
    for name in ROWS:
        assert torch.equal(held["params"][name]["weight"], whole(name)), name
