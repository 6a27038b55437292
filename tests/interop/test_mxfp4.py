"""Experts in mxfp4 equal transformers' results, and it loads them from ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Mxfp4Config
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from tests.cli.command import good

pytestmark = pytest.mark.interop

EXAMPLES = Path(__file__).parents[2] / "examples" / "architectures"
SPEC, SOURCE = EXAMPLES / "gpt_oss.ucpl", EXAMPLES / "checkpoints" / "gpt_oss"
RANKS = f"{SPEC}:ranks(tp = 3, pp = 2, ep = 2)"


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (a.dtype, a.shape) == (b.dtype, b.shape) and torch.equal(
        a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)
    )


def test_products_are_those_of_transformers(tmp_path: Path) -> None:
    good("convert", SOURCE, tmp_path / "ranks", "--from", f"{SPEC}:hf()", "--to", RANKS)
    good("convert", tmp_path / "ranks", tmp_path / "bf16", "--from", RANKS, "--to", f"{SPEC}:bf16()")
    whole, made = load_file(SOURCE / "model.safetensors"), load_file(tmp_path / "bf16" / "model.safetensors")
    packed = [n.removesuffix("_blocks") for n in whole if n.endswith("_blocks")]
    assert len(packed) == 8
    for name in packed:
        wanted = convert_moe_packed_tensors(whole[f"{name}_blocks"], whole[f"{name}_scales"])
        assert same(made[name], wanted), name


def test_a_folder_of_products_is_one_that_transformers_loads(tmp_path: Path) -> None:
    """The config of products has no blocks."""
    good("convert", SOURCE, tmp_path / "bf16", "--from", f"{SPEC}:hf()", "--to", f"{SPEC}:bf16()")
    made = AutoModelForCausalLM.from_pretrained(tmp_path / "bf16", dtype=torch.bfloat16).state_dict()
    own = AutoModelForCausalLM.from_pretrained(
        SOURCE, dtype=torch.bfloat16, quantization_config=Mxfp4Config(dequantize=True)
    ).state_dict()
    assert set(made) == set(own) and all(same(made[n], t) for n, t in own.items())
    assert "quantization_config" not in (tmp_path / "bf16" / "config.json").read_text()
    good("convert", SOURCE, tmp_path / "again", "--from", f"{SPEC}:hf()", "--to", f"{SPEC}:hf()")
    assert (tmp_path / "again" / "config.json").read_text() == (SOURCE / "config.json").read_text()


def test_transformers_loads_what_comes_back_from_ranks(tmp_path: Path) -> None:
    """Loading blocks gives the same model as loading ucpl's products."""
    good("convert", SOURCE, tmp_path / "ranks", "--from", f"{SPEC}:hf()", "--to", RANKS)
    good("convert", tmp_path / "ranks", tmp_path / "back", "--from", RANKS, "--to", f"{SPEC}:hf()")
    for name in ("config.json", "generation_config.json"):
        (tmp_path / "back" / name).write_bytes((SOURCE / name).read_bytes())
    states = [
        AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.bfloat16, quantization_config=Mxfp4Config(dequantize=True)
        ).state_dict()
        for folder in (SOURCE, tmp_path / "back")
    ]
    assert set(states[0]) == set(states[1]) and all(same(states[0][n], t) for n, t in states[1].items())
    good("convert", tmp_path / "ranks", tmp_path / "bf16", "--from", RANKS, "--to", f"{SPEC}:bf16()")
    products = load_file(tmp_path / "bf16" / "model.safetensors")
    packed = [n for n in products if n.endswith(("gate_up_proj", "down_proj"))]
    assert packed and all(same(states[0][n], products[n]) for n in packed)
