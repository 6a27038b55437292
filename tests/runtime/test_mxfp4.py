"""Weights with two elements per byte and an exponent per block.

They are converted to ranks, to other degrees, back, and into bf16.
The expected values come from torch, which splits bytes, looks values up and multiplies by powers of two.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.cli.command import good, ucpl

SPEC = """ucpl 1

model m {
  dim l = 2, e = 2, r = 6, c = 96, g = 3, k = 32
  index c = (g k)
  w       : l e r c dtype f4_e2m1fn
  w.scale : l e r g dtype f8_e8m0fnu is scale of w by 32
  norm    : l r     dtype bf16
}

layout hf() of m {
  file weights = safetensors "model.safetensors"
  framework huggingface()
  w[l]       = e r g k dtype u8 as "layers.{l}.blocks"
  w.scale[l] = e r g   dtype u8 as "layers.{l}.scales"
  norm[l]    = r                as "layers.{l}.norm"
}

layout native() of m extends hf() {
  w[l]       = e r c as "layers.{l}.blocks"
  w.scale[l] = e r g as "layers.{l}.scales"
}

layout ranks(tp, ep = 1) of m {
  mesh ep tp
  index e = e@ep
  file weights = torch "rank_{ep}_{tp}.pt"
  framework torch()
  w[e]       = l r c@spread(tp, 32) dtype u8 as "w.{e}"
  w.scale[e] = l r g@spread(tp)     dtype u8 as "s.{e}"
  norm       = l r                           as "norm"
}

layout typed(tp) of m {
  mesh tp
  file weights = torch "rank_{tp}.pt"
  framework torch()
  w       = l e r@tp c as "w"
  w.scale = l e r@tp g as "s"
  norm    = l r        as "norm"
}

layout product(tp, n = 7) of m {
  mesh tp
  file weights = torch "rank_{tp}.pt"
  framework torch()
  w[e] = c@chunk(tp, n) l r dtype bf16 value x * scale as "w.{e}"
  norm = l r                                           as "norm"
}

layout elements() of m {
  file weights = torch "all.pt"
  framework torch()
  w       = l e c r dtype f32 as "w"
  w.scale = l e r g dtype f32 as "s"
  norm    = l r               as "norm"
}

layout inside(tp) of m {
  mesh tp
  file weights = torch "rank_{tp}.pt"
  framework torch()
  w       = l e r c@spread(tp) as "w"
  w.scale = l e r g            as "s"
  norm    = l r                as "norm"
}
"""
LUT = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def values(blocks: torch.Tensor) -> torch.Tensor:
    """Elements of two-element bytes, along a last axis of twice the size."""
    return torch.stack([LUT[(blocks & 15).long()], LUT[(blocks >> 4).long()]], -1).flatten(-2)


def made(folder: Path) -> dict[str, torch.Tensor]:
    """A checkpoint with the files of gpt-oss.

    Every byte and every exponent occurs at least once.
    """
    (folder / "spec.ucpl").write_text(SPEC)
    (folder / "source").mkdir()
    tensors = {}
    for layer in range(2):
        bytes_ = torch.arange(2 * 6 * 3 * 16) * 7 + 11 * layer
        tensors[f"layers.{layer}.blocks"] = (bytes_ % 256).to(torch.uint8).view(2, 6, 3, 16)
        exponents = torch.arange(2 * 6 * 3) * 7 + 3 * layer
        tensors[f"layers.{layer}.scales"] = (exponents % 255).to(torch.uint8).view(2, 6, 3)
        tensors[f"layers.{layer}.norm"] = torch.randn(6, generator=torch.Generator().manual_seed(layer)).bfloat16()
    save_file(tensors, folder / "source" / "model.safetensors", metadata={"format": "pt"})
    return tensors


def products(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """(l, e, r, c) in bf16: in fp32, rounded once."""
    each = []
    for layer in range(2):
        scale = torch.pow(torch.tensor(2.0), tensors[f"layers.{layer}.scales"].int() - 127)
        each.append((values(tensors[f"layers.{layer}.blocks"]) * scale[..., None]).bfloat16().flatten(-2))
    return torch.stack(each)


def convert(folder: Path, source: str, target: str, calls: tuple[str, str], *more: str) -> None:
    spec = folder / "spec.ucpl"
    good(
        "convert", folder / source, folder / target, "--from", f"{spec}:{calls[0]}", "--to", f"{spec}:{calls[1]}", *more
    )


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def ranks(folder: Path) -> dict[str, dict[str, torch.Tensor]]:
    return {path.stem: torch.load(path, weights_only=True) for path in sorted(folder.rglob("*.pt"))}


def test_bytes_and_exponents_go_to_ranks_and_back_bit_for_bit(tmp_path: Path) -> None:
    tensors = made(tmp_path)
    convert(tmp_path, "source", "two", ("hf()", "ranks(tp = 2, ep = 2)"))
    shards = ranks(tmp_path / "two")
    for name, shard in shards.items():
        ep, tp = map(int, name.split("_")[1:])
        mine = slice(0, 2) if tp == 0 else slice(2, 3)
        for layer in range(2):
            block, scale = (tensors[f"layers.{layer}.{n}"][ep][:, mine] for n in ("blocks", "scales"))
            assert torch.equal(shard[f"w.{ep}"][layer], block.flatten(1))
            assert torch.equal(shard[f"s.{ep}"][layer], scale)
    convert(tmp_path, "two", "three", ("ranks(tp = 2, ep = 2)", "ranks(tp = 3)"))
    convert(tmp_path, "three", "back", ("ranks(tp = 3)", "hf()"))
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert set(back) == set(tensors)
    assert all(back[n].shape == t.shape and torch.equal(bits(back[n]), bits(t)) for n, t in tensors.items())


def test_products_are_those_of_torch_wherever_they_are_cut(tmp_path: Path) -> None:
    """Cuts into 7 parts, at odd elements.

    The two halves of a byte go to different ranks.
    """
    tensors = made(tmp_path)
    convert(tmp_path, "source", "two", ("hf()", "ranks(tp = 2)"))
    convert(tmp_path, "two", "bf16", ("ranks(tp = 2)", "product(tp = 4)"))
    found = ranks(tmp_path / "bf16")
    assert {s["w.0"].shape[0] for s in found.values()} == {28, 12}
    for expert in range(2):
        whole = torch.cat([s[f"w.{expert}"] for s in found.values()])
        assert torch.equal(bits(whole), bits(products(tensors)[:, expert].permute(2, 0, 1)))
    convert(tmp_path, "two", "small", ("ranks(tp = 2)", "product(tp = 1)"), "--memory", "300K", "--workers", "2")
    assert torch.equal(ranks(tmp_path / "small")["rank_0"]["w.1"], whole)


def test_torch_s_own_types_are_read_and_written(tmp_path: Path) -> None:
    tensors = made(tmp_path)
    convert(tmp_path, "source", "typed", ("hf()", "typed(tp = 3)"))
    shards = ranks(tmp_path / "typed")
    for layer in range(2):
        whole = torch.cat([bits(s["w"][layer]) for s in shards.values()], 1)
        assert torch.equal(whole, tensors[f"layers.{layer}.blocks"].flatten(2))
    assert shards["rank_0"]["w"].dtype == torch.float4_e2m1fn_x2 and shards["rank_0"]["w"].shape == (2, 2, 2, 48)
    assert shards["rank_0"]["s"].dtype == torch.float8_e8m0fnu
    convert(tmp_path, "typed", "native", ("typed(tp = 3)", "native()"))
    path = tmp_path / "native" / "model.safetensors"
    raw = path.read_bytes()
    header = json.loads(raw[8 : 8 + struct.unpack("<Q", raw[:8])[0]])
    assert (header["layers.0.blocks"]["dtype"], header["layers.0.blocks"]["shape"]) == ("F4", [2, 6, 96])
    assert (header["layers.0.scales"]["dtype"], header["layers.0.scales"]["shape"]) == ("F8_E8M0", [2, 6, 3])
    begin, end = header["layers.0.blocks"]["data_offsets"]
    start = 8 + struct.unpack("<Q", raw[:8])[0]
    assert raw[start + begin : start + end] == tensors["layers.0.blocks"].numpy().tobytes()
    convert(tmp_path, "native", "back", ("native()", "hf()"))
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert all(torch.equal(bits(back[n]), bits(t)) for n, t in tensors.items())


def test_the_library_s_own_file_of_such_types_is_read(tmp_path: Path) -> None:
    tensors = made(tmp_path)
    own = {}
    for layer in range(2):
        own[f"layers.{layer}.blocks"] = tensors[f"layers.{layer}.blocks"].flatten(2).view(torch.float4_e2m1fn_x2)
        own[f"layers.{layer}.scales"] = tensors[f"layers.{layer}.scales"].view(torch.float8_e8m0fnu)
        own[f"layers.{layer}.norm"] = tensors[f"layers.{layer}.norm"]
    (tmp_path / "own").mkdir()
    save_file(own, tmp_path / "own" / "model.safetensors", metadata={"format": "pt"})
    convert(tmp_path, "own", "again", ("native()", "native()"))
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == (
        tmp_path / "own" / "model.safetensors"
    ).read_bytes()
    convert(tmp_path, "own", "back", ("native()", "hf()"))
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert all(torch.equal(bits(back[n]), bits(t)) for n, t in tensors.items())
    convert_any = good("convert", tmp_path / "own", tmp_path / "any", "--to", "safetensors()").out
    assert convert_any is not None
    assert (tmp_path / "any" / "model.safetensors").read_bytes() == (
        tmp_path / "own" / "model.safetensors"
    ).read_bytes()


def test_without_scales_they_are_numbers_like_others(tmp_path: Path) -> None:
    tensors = made(tmp_path)
    convert(tmp_path, "source", "numbers", ("hf()", "elements()"))
    found = torch.load(tmp_path / "numbers" / "all.pt", weights_only=True)
    wanted = torch.stack([values(tensors[f"layers.{n}.blocks"]).flatten(-2) for n in range(2)])
    assert torch.equal(bits(found["w"]), bits(wanted.transpose(2, 3)))
    exponents = torch.stack([tensors[f"layers.{n}.scales"] for n in range(2)])
    assert torch.equal(found["s"], torch.pow(torch.tensor(2.0), exponents.int() - 127))


@pytest.mark.parametrize("which", ["source", "target"])
def test_a_cut_inside_a_byte_is_refused_on_either_side(tmp_path: Path, which: str) -> None:
    made(tmp_path)
    spec = tmp_path / "spec.ucpl"
    text = spec.read_text().replace("is scale of w by 32", "")
    spec.write_text(text.replace(' dtype bf16 value x * scale as "w.{e}"', ' as "w.{e}"'))
    calls = [f"{spec}:hf()", f"{spec}:inside(tp = 64)"]
    printed = ucpl("plan", "--from", calls[which == "source"], "--to", calls[which == "target"]).err
    assert "E231" in printed and "c from 64 to 65" in printed and "c@spread(tp, 2)" in printed
    assert "2, 3, 4, 6, 8, 12, 16, 24 pieces" in printed


def damaged(folder: Path, mask: int) -> None:
    """XOR byte `[1, 2, 1, 5]` of layer 1 with `mask`."""
    path = folder / "model.safetensors"
    raw = bytearray(path.read_bytes())
    (length,) = struct.unpack("<Q", raw[:8])
    begin = json.loads(raw[8 : 8 + length])["layers.1.blocks"]["data_offsets"][0]
    raw[8 + length + begin + ((1 * 6 + 2) * 3 + 1) * 16 + 5] ^= mask
    path.write_bytes(raw)


@pytest.mark.parametrize(("mask", "index"), [(0x03, 32 + 10), (0x30, 32 + 11), (0x11, 32 + 10)])
def test_what_differs_is_named_to_the_element_in_either_half(tmp_path: Path, mask: int, index: int) -> None:
    tensors = made(tmp_path)
    spec = f"{tmp_path / 'spec.ucpl'}:"
    convert(tmp_path, "source", "two", ("hf()", "ranks(tp = 3)"))
    convert(tmp_path, "two", "mine", ("ranks(tp = 3)", "hf()"))
    damaged(tmp_path / "mine", mask)
    byte = int(tensors["layers.1.blocks"][1, 2, 1, 5])
    here, there = ((b & 15 if index % 2 == 0 else b >> 4) for b in (byte ^ mask, byte))
    said = ucpl("verify", tmp_path / "mine", "--against", tmp_path / "source", "--from", spec + "hf()")
    text = f"weight of w[l=1, e=1, r=2, c={index}] is {LUT[here].item()!r} here and {LUT[there].item()!r} there"
    assert text in said.err + said.out and "layers.1.blocks[1, 2, 1, 5]" in said.err + said.out
    for pair in (("mine", "hf()", "two", "ranks(tp = 3)"), ("two", "ranks(tp = 3)", "mine", "hf()")):
        one, calls_one, other, calls_other = pair
        compared = ucpl(
            "compare", tmp_path / one, tmp_path / other, "--as", spec + calls_one, "--with", spec + calls_other
        )
        assert f"w[l=1, e=1, r=2, c={index}]: " in compared.out + compared.err
