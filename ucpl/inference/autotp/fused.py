"""DeepSpeed's order of query, key and value in one tensor."""

from __future__ import annotations

from collections.abc import Sequence

from ucpl.inference.autotp.drawn import Drawn, Part, refuse
from ucpl.inference.hf.modules import Module

__all__ = ["is_fused", "parts_of"]

_NAMES = ("qkv_proj", "query_key_value", "attn.Wqkv", "self_attn.W_pack", "c_attn")
_HEADS, _PARTS, _PACKED, _ONE, _BLOCKS = "heads", "parts", "packed", "one", "blocks"
# Classes of layers, by a part of their name; the longest that there is counts (module_inject/fusedqkv_utils.py).
_LAYERS = {
    "CodeGenBlock": _BLOCKS,
    "BloomBlock": _HEADS,  # q, k and v of each head in turn
    "GLMBlock": _PARTS,  # q of all heads, then k, then v
    "MPTBlock": _PARTS,
    "MptBlock": _PARTS,
    "BaichuanLayer": _PARTS,
    "QWenBlock": _PARTS,
    "FalconDecoderLayer": _HEADS,
    "GPTBigCodeBlock": _ONE,  # one head of keys and values, which every rank has
    "DecoderLayer": _PARTS,
    "Phi3DecoderLayer": _PACKED,  # as parts, with fewer key-value heads
}


def is_fused(name: str) -> bool:
    return any(s in name for s in _NAMES)


def parts_of(drawn: Drawn, text: str, module: Module, path: str) -> tuple[str, Sequence[Part]]:
    """(kind of fused tensor, its parts).

    text: names and classes of its layer. Raises: UcplError E472.
    """
    layer = max((name for name in _LAYERS if name in text), key=len, default="BloomBlock")
    rows, columns = module.shapes["weight"]
    heads, kind = drawn.network.heads, _LAYERS[layer]
    if kind == _BLOCKS:
        refuse(
            f"{path}: DeepSpeed deals blocks of heads in another order ({layer}), which is no run of positions", path
        )
    if kind == _HEADS:
        return layer, [(rows, True)]
    if kind == _ONE:
        if not 0 < heads.hidden < rows:
            refuse(f"{path} has {rows} rows, and hidden_size = {heads.hidden} of them should be queries", path)
        return layer, [(heads.hidden, True), (rows - heads.hidden, False)]
    if kind == _PACKED or drawn.asked.kv_heads == 2:
        each = (
            drawn.asked.kv_heads * (columns // max(1, heads.query)) if kind == _PACKED else (rows - heads.hidden) // 2
        )
        return layer, [(rows - 2 * each, True), (each, True), (each, True)]
    return layer, [(rows // 3, True)] * 3
