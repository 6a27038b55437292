"""Casts of a cut vector to another dtype and three ranks."""

from __future__ import annotations

from pathlib import Path

import torch

import ucpl

__all__ = ["MASTERS", "MEAN", "PLAIN", "SUM", "cast"]

SPEC = """ucpl 1

model m {{
  dim a = 6
  dtype {dtype}
  w : a
  state fp32 : {dtype}
}}

layout x(tp) of m {{
  mesh tp
  framework torch()
  file weights = torch "{{tp}}.pt"
  {source}
}}

layout y(tp) of m {{
  mesh tp
  framework torch()
  file weights = torch "{{tp}}.pt"
  w = a@tp dtype {to} as "w"
  state fp32 = none
}}
"""
PLAIN = 'w = a@tp as "w"\n  derive fp32 from weight'
MEAN = 'w = a mean @tp as "w"\n  derive fp32 from weight'
SUM = 'w = a sum @tp as "w"\n  derive fp32 from weight'
MASTERS = 'w = a@tp\n  state fp32 = like as "w"\n  derive weight from fp32'


def cast(folder: Path, source: str, to: str, values: list[list[float]], dtype: str = "f32") -> torch.Tensor:
    """The values of each rank converted to `to`.

    `to` is a dtype, optionally with a word after it ("bf16 exact"). `dtype` is f32 or f64.
    """
    (folder / "in").mkdir(parents=True)
    kept = {"f32": torch.float32, "f64": torch.float64}[dtype]
    for rank, held in enumerate(values):
        torch.save({"w": torch.tensor(held, dtype=kept)}, folder / "in" / f"{rank}.pt")
    spec = folder / "spec.ucpl"
    spec.write_text(SPEC.format(source=source, to=to, dtype=dtype))
    ucpl.convert(folder / "in", folder / "out", layout=f"{spec}:x(tp={len(values)})", to=f"{spec}:y(tp=3)")
    return torch.cat([torch.load(folder / "out" / f"{rank}.pt")["w"] for rank in range(3)])
