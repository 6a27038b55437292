"""Weights in fp8 blocks equal transformers' own dequantised ones, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from tests.cli.command import good

pytestmark = pytest.mark.interop

SPEC = """ucpl 1

model m {
  dim r = 384, c = 256, rb = ceil(r, 128), cb = ceil(c, 128)
  w       : r c    dtype f8_e4m3fn
  w.scale : rb cb  dtype f32 is scale of w by 128, 128
}

layout stored(tp) of m {
  mesh tp
  file weights = torch "rank_{tp}.pt"
  framework torch()
  w       = r@spread(tp, 128) c   as "w"
  w.scale = rb@spread(tp) cb      as "s"
}

layout hf() of m {
  file weights = safetensors "model.safetensors"
  framework huggingface()
  w       = r c    as "model.layers.0.mlp.up_proj.weight"
  w.scale = rb cb  as "model.layers.0.mlp.up_proj.weight_scale_inv"
}

layout whole() of m extends hf() {
  w       = r c dtype bf16 value x * scale   as "model.layers.0.mlp.up_proj.weight"
  w.scale = none
}
"""


def test_products_are_those_of_transformers(tmp_path: Path) -> None:
    (tmp_path / "spec.ucpl").write_text(SPEC)
    (tmp_path / "source").mkdir()
    name = "model.layers.0.mlp.up_proj.weight"
    generator = torch.Generator().manual_seed(7)
    weight = (torch.randn(384, 256, generator=generator) * 90).to(torch.float8_e4m3fn)
    scale = torch.rand(3, 2, generator=generator) * 3e-3
    save_file(
        {name: weight, f"{name}_scale_inv": scale}, tmp_path / "source" / "model.safetensors", metadata={"format": "pt"}
    )
    spec = f"{tmp_path / 'spec.ucpl'}:"
    for source, target, here, there in (
        ("source", "two", "hf()", "stored(tp = 2)"),
        ("two", "three", "stored(tp = 2)", "stored(tp = 3)"),
        ("three", "whole", "stored(tp = 3)", "whole()"),
    ):
        good("convert", tmp_path / source, tmp_path / target, "--from", spec + here, "--to", spec + there)
    made = load_file(tmp_path / "whole" / "model.safetensors")
    assert set(made) == {name}
    wanted = Fp8Dequantize(None)._dequantize_one(weight, scale, torch.bfloat16)
    assert torch.equal(made[name].view(torch.int16), wanted.view(torch.int16))
