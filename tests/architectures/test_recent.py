"""Lists of sizes, packed groups and repeated heads, compared with torch.

Each rank of two recent architectures is cut by torch alone.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

import ucpl
from tests.architectures.splits import Tensors
from tests.architectures.test_examples import assert_same

# A Swin Transformer: each stage has a width, a number of heads and blocks of its own.
SWIN = """ucpl 2
model swin {
  let width = 6, depths = [1, 2], heads = [2, 4]
  dim s = length(depths), b[s] = depths, n[s] = heads
  dim h[s] = width * [1, 2], d[s] = h / n, down[s] = 2 * h, four = 4
  q, k, v : s b n d h
  table   : s b four n
  merge   : s[..-1] down four h
}
layout hf() of swin {
  framework torch()
  file weights = safetensors "model.safetensors"
  let stage = "{s}.", block = "{stage}{b}."
  q[s, b]     = (n d) h        as "{block}q"
  k[s, b]     = (n d) h        as "{block}k"
  v[s, b]     = (n d) h        as "{block}v"
  table[s, b] = four n         as "{block}table"
  merge[s]    = down (four h)  as "{stage}merge"
}
layout ranks(tp) of swin extends hf() {
  mesh tp
  file weights = safetensors "{tp}.safetensors"
  q[s, b] = none
  k[s, b] = none
  v[s, b] = none
  qkv[s, b]   = (q: n@tp d + k: n@tp d + v: n@tp d) h  as "{block}qkv"
  table[s, b] = four n@tp
}
"""
# Falcon: queries, keys and values group by group; more ranks than heads of keys, and two flat groups.
FALCON = """ucpl 2
model falcon {
  dim l = 2, g = 2, r = 2, d = 3, h = 12, f = 8
  q : l g r d h
  k, v : l g d h
  up : l f h
  ln : l h
  state fp32 : f32
  group decay = q, k, v, up
  group rest  = all - decay
}
layout hf() of falcon {
  framework torch()
  file weights = safetensors "model.safetensors"
  qkv[l] = (g (q: r d + k: d + v: d)) h  as "{l}.qkv"
  up[l]  = f h                           as "{l}.up"
  ln[l]  = h                             as "{l}.ln"
}
layout ranks(tp, dp) of falcon {
  framework torch()
  mesh dp tp
  file weights = safetensors "{tp}.safetensors"
  file optim   = safetensors "{dp}.{tp}.safetensors"
  qkv[l] = (q: (g r)@tp d + k: (g copies(r))@tp d + v: (g copies(r))@tp d) h  as "{l}.qkv"
  up[l]  = f@tp h                        as "{l}.up"
  ln[l]  = h                             as "{l}.ln"
  state fp32 for * = pad(flat(each), dp)@dp  as "{group}"
  fill state fp32  = weight
}
"""


def carried(text: str, whole: Tensors, call: str, tmp_path: Path, *drop: str) -> Path:
    """Convert a folder to ranks and back, and return the ranks' folder."""
    spec = tmp_path / "spec.ucpl"
    spec.write_text(text)
    (tmp_path / "whole").mkdir()
    save_file(whole, tmp_path / "whole" / "model.safetensors")
    ucpl.convert(tmp_path / "whole", tmp_path / "ranks", f"{spec}:{call}", layout=f"{spec}:hf()")
    ucpl.convert(tmp_path / "ranks", tmp_path / "back", f"{spec}:hf()", layout=f"{spec}:{call}", drop=drop)
    assert_same(load_file(tmp_path / "back" / "model.safetensors"), whole)
    return tmp_path / "ranks"


def test_stages_of_different_widths(tmp_path: Path) -> None:
    whole: Tensors = {"0.merge": torch.randn(12, 24)}
    blocks = {"0.0": (2, 6), "1.0": (4, 12), "1.1": (4, 12)}
    for block, (heads, width) in blocks.items():
        whole |= {f"{block}.{x}": torch.randn(width, width) for x in "qkv"} | {f"{block}.table": torch.randn(4, heads)}
    ranks = carried(SWIN, whole, "ranks(tp = 2)", tmp_path)
    for tp in range(2):
        wanted = {"0.merge": whole["0.merge"]}
        for block in blocks:
            wanted[f"{block}.qkv"] = torch.cat([whole[f"{block}.{x}"].chunk(2)[tp] for x in "qkv"])
            wanted[f"{block}.table"] = whole[f"{block}.table"].chunk(2, 1)[tp]
        assert_same(load_file(ranks / f"{tp}.safetensors"), wanted)


def test_repeated_heads_and_groups_of_packed_tensors(tmp_path: Path) -> None:
    whole = {f"{n}.qkv": torch.randn(24, 12) for n in range(2)}
    whole |= {f"{n}.up": torch.randn(8, 12) for n in range(2)} | {f"{n}.ln": torch.randn(12) for n in range(2)}
    ranks = carried(FALCON, whole, "ranks(tp = 4, dp = 3)", tmp_path, "fp32")
    for tp in range(4):
        wanted: Tensors = {}
        for n in range(2):
            groups = whole[f"{n}.qkv"].view(2, 4, 3, 12)
            query = groups[:, :2].reshape(4, 3, 12)
            key, value = (groups[:, part].repeat_interleave(2, 0) for part in (2, 3))
            wanted[f"{n}.qkv"] = torch.cat([query[tp], key[tp], value[tp]])
            wanted |= {f"{n}.up": whole[f"{n}.up"].chunk(4)[tp], f"{n}.ln": whole[f"{n}.ln"]}
        assert_same(load_file(ranks / f"{tp}.safetensors"), wanted)
        decay = torch.cat([wanted[f"{n}.{x}"].flatten() for n in range(2) for x in ("qkv", "up")])
        rest = torch.cat([whole[f"{n}.ln"] for n in range(2)])
        for dp in range(3):
            states = {"decay": decay.chunk(3)[dp], "rest": rest.chunk(3)[dp]}
            assert_same(load_file(ranks / f"{dp}.{tp}.safetensors"), states)
