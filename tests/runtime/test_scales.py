"""Weights in fp8 with a scale for each block.

A folder of safetensors goes to ranks, to other degrees, and into bf16.
The expected values come from torch, which repeats each scale over its block and multiplies.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.cli.command import good, ucpl

SPEC = """ucpl 1

model m {{
  dim l = 2, r = {r}, c = {c}, h = 5, rb = ceil(r, {b}), cb = ceil(c, {b})
  w       : l r c   dtype {dtype}
  w.scale : l rb cb dtype {scale} is scale of w by {b}, {b}
  norm    : l h     dtype bf16
}}

layout hf() of m {{
  file weights = safetensors "model.safetensors"
  framework huggingface()
  w[l]       = r c   as "layers.{{l}}.weight"
  w.scale[l] = rb cb as "layers.{{l}}.weight_scale_inv"
  norm[l]    = h     as "layers.{{l}}.norm"
}}

layout dequantised() of m extends hf() {{
  w[l]       = r c dtype bf16 value x * scale as "layers.{{l}}.weight"
  w.scale[l] = none
}}

layout ranks(tp) of m {{
  mesh tp
  file weights = torch "rank_{{tp}}.pt"
  framework torch()
  w[l]       = r@chunk(tp, {b}) c as "w.{{l}}"
  w.scale[l] = rb@chunk(tp) cb    as "s.{{l}}"
  norm       = l h                as "norm"
}}

layout turned(tp) of m {{
  mesh tp
  file weights = torch "rank_{{tp}}.pt"
  framework torch()
  w          = l c@chunk(tp) r dtype {product} value scale * x as "w"
  norm       = l h             as "norm"
}}
"""
ODD = {"r": 300, "c": 257, "b": 128, "dtype": "f8_e4m3fn", "scale": "f32", "product": "f16"}
SMALL = {"r": 7, "c": 5, "b": 3, "dtype": "f8_e5m2", "scale": "bf16", "product": "f32"}
INTEGERS = {"r": 80, "c": 200, "b": 32, "dtype": "i8", "scale": "f32", "product": "bf16"}
KINDS = {"f8_e4m3fn": torch.float8_e4m3fn, "f8_e5m2": torch.float8_e5m2, "i8": torch.int8}
TORCH = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32}


def made(folder: Path, said: dict[str, object]) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """A checkpoint as a framework saves it: (tensors, products).

    The products of both layers are in fp32.
    """
    r, c, b = (int(str(said[n])) for n in "rcb")
    (folder / "spec.ucpl").write_text(SPEC.format(**said))
    (folder / "source").mkdir()
    generator = torch.Generator().manual_seed(r)
    tensors: dict[str, torch.Tensor] = {}
    products = []
    for layer in range(2):
        w = (torch.randn(r, c, generator=generator) * 60).clamp(-120, 120).to(KINDS[str(said["dtype"])])
        scale = torch.rand(-(-r // b), -(-c // b), generator=generator).to(TORCH[str(said["scale"])]) * 1e-2
        tensors |= {f"layers.{layer}.weight": w, f"layers.{layer}.weight_scale_inv": scale}
        tensors[f"layers.{layer}.norm"] = torch.randn(5, generator=generator).bfloat16()
        each = scale.float().repeat_interleave(b, 0)[:r].repeat_interleave(b, 1)[:, :c]
        products.append(w.float() * each)
    save_file(tensors, folder / "source" / "model.safetensors", metadata={"format": "pt"})
    return tensors, torch.stack(products)


def convert(folder: Path, source: str, target: str, calls: tuple[str, str], *more: str) -> None:
    spec = folder / "spec.ucpl"
    good(
        "convert", folder / source, folder / target, "--from", f"{spec}:{calls[0]}", "--to", f"{spec}:{calls[1]}", *more
    )


def ranks(folder: Path) -> list[dict[str, torch.Tensor]]:
    return [torch.load(path, weights_only=True) for path in sorted(folder.rglob("rank_*.pt"))]


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


@pytest.mark.parametrize("said", [ODD, SMALL, INTEGERS], ids=["odd", "small", "integers"])
def test_blocks_and_scales_go_to_ranks_and_become_products_bit_for_bit(tmp_path: Path, said: dict[str, object]) -> None:
    tensors, products = made(tmp_path, said)
    convert(tmp_path, "source", "two", ("hf()", "ranks(tp = 2)"))
    convert(tmp_path, "two", "three", ("ranks(tp = 2)", "ranks(tp = 3)"))
    shards = ranks(tmp_path / "three")
    for layer in range(2):
        assert same(torch.cat([s[f"w.{layer}"] for s in shards]), tensors[f"layers.{layer}.weight"])
        assert same(torch.cat([s[f"s.{layer}"] for s in shards]), tensors[f"layers.{layer}.weight_scale_inv"])
        step = int(str(said["b"]))
        for shard in shards:
            assert -(-len(shard[f"w.{layer}"]) // step) == len(shard[f"s.{layer}"])
    convert(tmp_path, "three", "back", ("ranks(tp = 3)", "hf()"))
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert set(back) == set(tensors) and all(same(back[n], t) for n, t in tensors.items())
    convert(tmp_path, "three", "bf16", ("ranks(tp = 3)", "dequantised()"))
    found = load_file(tmp_path / "bf16" / "model.safetensors")
    assert sorted(found) == sorted(n for n in tensors if "scale" not in n)
    for layer in range(2):
        assert same(found[f"layers.{layer}.weight"], products[layer].bfloat16())
        assert same(found[f"layers.{layer}.norm"], tensors[f"layers.{layer}.norm"])
    convert(tmp_path, "three", "turned", ("ranks(tp = 3)", "turned(tp = 4)"))
    whole = torch.cat([s["w"] for s in ranks(tmp_path / "turned")], 1)
    assert same(whole, products.transpose(1, 2).to(TORCH[str(said["product"])]))


def test_little_memory_and_a_saved_plan_make_the_same_bytes(tmp_path: Path) -> None:
    """Tiles of a few rows each begin and end inside blocks."""
    _, products = made(tmp_path, ODD)
    convert(tmp_path, "source", "two", ("hf()", "ranks(tp = 2)"))
    convert(tmp_path, "two", "small", ("ranks(tp = 2)", "dequantised()"), "--memory", "300K", "--workers", "2")
    spec, plan = tmp_path / "spec.ucpl", tmp_path / "some.plan"
    good(
        "plan",
        "--from",
        f"{spec}:ranks(tp = 2)",
        "--to",
        f"{spec}:dequantised()",
        "--checkpoint",
        tmp_path / "two",
        "-o",
        plan,
    )
    printed = good("why", plan, "w[1, 299, 130]").out
    assert "  is   rank_1.pt: w.1[43, 130]" in printed and "  times the scale rank_1.pt: s.1[0, 1]" in printed
    good("apply", plan, tmp_path / "two", tmp_path / "applied")
    for name in ("small", "applied"):
        found = load_file(tmp_path / name / "model.safetensors")
        assert all(same(found[f"layers.{n}.weight"], products[n].bfloat16()) for n in range(2))


def test_factors_and_their_product_are_not_the_same_checkpoint(tmp_path: Path) -> None:
    """Factors and products are stored in two types, and `compare` reports that.

    A converted checkpoint is compared with its plan's own reading.
    """
    made(tmp_path, SMALL)
    convert(tmp_path, "source", "product", ("hf()", "dequantised()"))
    spec = tmp_path / "spec.ucpl"
    sides = ("--as", f"{spec}:hf()", "--with", f"{spec}:dequantised()")
    done = ucpl("compare", tmp_path / "source", tmp_path / "product", *sides)
    assert done.status == 1 and "weight of w: f8_e5m2 in A, bf16 in B" in done.out
