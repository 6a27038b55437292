"""Each rank's part of an example architecture, cut with torch alone.

No spec is used.

A rule is (pattern of names, stage, cut). The first rule whose pattern is found in a name is its rule. A stage is one of the
words below; a cut takes the full tensor, the degree of tensor parallelism and the rank.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

Cut = Callable[[Tensor, int, int], Tensor]
Tensors = dict[str, Tensor]
FIRST, LAST, EVERY, LAYER = "first", "last", "every", "layer"


class Rank(NamedTuple):
    pp: int
    ep: int
    tp: int


class Degrees(NamedTuple):
    pp: int
    ep: int
    tp: int

    def ranks(self) -> Iterator[Rank]:
        return (Rank(p, e, t) for p in range(self.pp) for e in range(self.ep) for t in range(self.tp))


def copy(t: Tensor, _tp: int, _rank: int) -> Tensor:
    return t


def dim(n: int) -> Cut:
    """Equal pieces of one dim.

    If it does not divide, the first ones are longer by one.
    """
    return lambda t, tp, rank: torch.tensor_split(t, tp, n)[rank]


def parts(*sizes: int) -> Cut:
    """Several matrices one below the other, each cut for itself."""
    return lambda t, tp, rank: torch.cat([p.chunk(tp)[rank] for p in t.split(sizes)])


ROWS, COLUMNS = dim(0), dim(1)
Rule = tuple[str, str, Cut]

RULES: dict[str, tuple[int, list[Rule]]] = {
    "gpt_neox": (4, [
        ("embed_in", FIRST, ROWS), ("final_layer_norm", LAST, copy), ("embed_out", LAST, ROWS),
        ("query_key_value|h_to_4h", LAYER, ROWS), (r"(dense|4h_to_h)\.weight", LAYER, COLUMNS), ("", LAYER, copy),
    ]),
    "t5": (0, [
        ("shared", EVERY, ROWS), (r"encoder.*(\.[qkv]\.|wi_)", FIRST, ROWS), (r"encoder.*(\.o\.|wo|bias)", FIRST, COLUMNS),
        ("encoder", FIRST, copy), (r"(\.[qkv]\.|wi_)", LAST, ROWS), (r"(\.o\.|wo|bias)", LAST, COLUMNS), ("", LAST, copy),
    ]),
    "whisper": (0, [
        (r"encoder\.(layers.*([qkv]_proj|fc1)|conv)", FIRST, ROWS),
        (r"encoder\.layers.*(out_proj|fc2)\.weight", FIRST, COLUMNS),
        (r"encoder\.", FIRST, copy), ("embed_tokens|[qkv]_proj|fc1", LAST, ROWS), (r"(out_proj|fc2)\.weight", LAST, COLUMNS),
        ("", LAST, copy),
    ]),
    "mamba2": (4, [
        ("embeddings", FIRST, ROWS), ("norm_f", LAST, copy), ("lm_head", LAST, ROWS),
        ("in_proj", LAYER, parts(36, 36, 30, 30, 12)), ("conv1d", LAYER, parts(36, 30, 30)),
        (r"A_log|\.D$|dt_bias|mixer\.norm", LAYER, ROWS), ("out_proj", LAYER, COLUMNS), ("", LAYER, copy),
    ]),
    "hybrid": (4, [
        ("embed_tokens", FIRST, ROWS), ("final_layernorm", LAST, copy), ("lm_head", LAST, ROWS),
        ("in_proj", LAYER, parts(48, 48, 30, 30, 12)), ("conv1d", LAYER, parts(48, 30, 30)),
        (r"A_log|\.D$|dt_bias|mamba\.norm|[qkv]_proj|gate_proj|up_proj", LAYER, ROWS),
        ("out_proj|o_proj|down_proj", LAYER, COLUMNS), ("", LAYER, copy),
    ]),
    "qwen3_next": (4, [
        ("embed_tokens", FIRST, ROWS), (r"model\.norm", LAST, copy), ("lm_head", LAST, ROWS),
        ("conv1d", LAYER, parts(30, 30, 84)), (r"in_proj|[qkv]_proj|A_log|dt_bias|gate_proj|up_proj", LAYER, ROWS),
        ("out_proj|o_proj|down_proj", LAYER, COLUMNS), ("", LAYER, copy),
    ]),
    "deepseek_v3": (5, [
        (r"model\.embed_tokens", FIRST, ROWS), (r"model\.norm", LAST, copy), ("lm_head", LAST, ROWS),
        ("[qk]v?_b_proj|gate_proj|up_proj", LAYER, ROWS), ("o_proj|down_proj", LAYER, COLUMNS), ("", LAYER, copy),
    ]),
    "gemma3n": (4, [
        (r"embed_tokens\.", FIRST, ROWS),
        ("embed_tokens_per|per_layer_model|per_layer_projection_norm|altup_proj", FIRST, copy),
        (r"model\.norm|altup_unembed", LAST, copy), ("[qkv]_proj|gate_proj|up_proj", LAYER, ROWS),
        ("o_proj|down_proj", LAYER, COLUMNS), ("", LAYER, copy),
    ]),
    "unet": (0, [
        (r"resnets.*(conv1|time_emb_proj|norm2)|to_[qkv]\.", EVERY, ROWS),
        (r"(resnets.*conv2|to_out\.0)\.weight", EVERY, COLUMNS),
        ("", EVERY, copy),
    ]),
    "llama4": (4, [
        ("embed_tokens", FIRST, ROWS), (r"model\.norm", LAST, copy), ("lm_head", LAST, ROWS),
        ("[qkv]_proj|gate_proj|up_proj", LAYER, ROWS), ("o_proj|down_proj", LAYER, COLUMNS), ("", LAYER, copy),
    ]),
    "gpt_oss": (4, [
        ("embed_tokens", FIRST, ROWS), (r"model\.norm", LAST, copy), ("lm_head", LAST, ROWS),
        ("[qkv]_proj|sinks", LAYER, ROWS), (r"o_proj\.weight", LAYER, COLUMNS), ("", LAYER, copy),
    ]),
    "lora": (4, [
        ("[qkv]_proj.lora_B", LAYER, ROWS), ("(o|down)_proj.lora_A", LAYER, COLUMNS), ("", LAYER, copy),
    ]),
    "dit": (4, [
        ("pos_embed", FIRST, copy), ("proj_out", LAST, copy), (r"norm1\.linear", LAYER, parts(*[24] * 6)),
        (r"linear_1|to_[qkv]|net\.0", LAYER, ROWS), (r"(linear_2|to_out\.0|net\.2)\.weight", LAYER, COLUMNS), ("", LAYER, copy),
    ]),
}  # fmt: skip


def layer_of(name: str) -> int:
    found = re.search(r"(?:layers|blocks)\.(\d+)\.", name)
    assert found, name
    return int(found[1])


def expert_of(name: str) -> int | None:
    found = re.search(r"experts\.(\d+)\.", name)
    return int(found[1]) if found else None


def is_here(stage: str, name: str, layers: int, degrees: Degrees, rank: Rank) -> bool:
    if stage == LAYER:
        return layer_of(name) in torch.arange(layers).tensor_split(degrees.pp)[rank.pp]
    return {FIRST: rank.pp == 0, LAST: rank.pp == degrees.pp - 1, EVERY: True}[stage]


def by_rules(architecture: str, whole: Tensors, degrees: Degrees, experts: int, rank: Rank) -> Tensors:
    layers, rules = RULES[architecture]
    out = {}
    for name, tensor in whole.items():
        _, stage, cut = next(rule for rule in rules if re.search(rule[0], name))
        expert = expert_of(name)
        if expert is not None and expert // (experts // degrees.ep) != rank.ep:
            continue
        if is_here(stage, name, layers, degrees, rank):
            out[name] = cut(tensor, degrees.tp, rank.tp)
    return out


def gemma3(whole: Tensors, degrees: Degrees, rank: Rank) -> Tensors:
    """Megatron's blocks: queries, keys, values by group.

    Gate and up as halves of the rank's part.
    """
    groups, width, own = 6, 8, 4 // degrees.pp
    out = {}
    for local in range(own):
        here, there = f"model.layers.{rank.pp * own + local}.", f"layers.{local}."
        q, k, v = (whole[f"{here}self_attn.{x}_proj.weight"] for x in "qkv")
        rows = [
            torch.cat(
                [q[2 * g * width : 2 * (g + 1) * width], k[g * width : (g + 1) * width], v[g * width : (g + 1) * width]]
            )
            for g in range(groups)
        ]
        out[there + "attention.qkv.weight"] = torch.cat(rows).chunk(degrees.tp)[rank.tp]
        out[there + "attention.proj.weight"] = COLUMNS(whole[here + "self_attn.o_proj.weight"], degrees.tp, rank.tp)
        halves = [ROWS(whole[f"{here}mlp.{x}_proj.weight"], degrees.tp, rank.tp) for x in ("gate", "up")]
        out[there + "mlp.fc1.weight"] = torch.cat(halves)
        out[there + "mlp.fc2.weight"] = COLUMNS(whole[here + "mlp.down_proj.weight"], degrees.tp, rank.tp)
        for mine, theirs in NORMS.items():
            out[f"{there}{mine}.weight"] = whole[f"{here}{theirs}.weight"]
        for x in "qk":
            out[f"{here}self_attn.{x}_norm.weight"] = whole[f"{here}self_attn.{x}_norm.weight"]
    embed = ROWS(whole["model.embed_tokens.weight"], degrees.tp, rank.tp)
    if rank.pp == 0:
        out["embedding.weight"] = embed
    if rank.pp == degrees.pp - 1:
        out["head.weight"], out["norm.weight"] = embed, whole["model.norm.weight"]
    return out


NORMS = {
    "input_layernorm": "input_layernorm",
    "post_attention_layernorm": "post_attention_layernorm",
    "pre_mlp_layernorm": "pre_feedforward_layernorm",
    "post_mlp_layernorm": "post_feedforward_layernorm",
}


def llama4(whole: Tensors, degrees: Degrees, rank: Rank) -> Tensors:
    """The experts of a layer one by one, outputs first.

    The rest by rules.
    """
    stacked = {n: t for n, t in whole.items() if ".experts." in n}
    out = by_rules("llama4", {n: t for n, t in whole.items() if n not in stacked}, degrees, 0, rank)
    for name, tensor in stacked.items():
        layer = layer_of(name)
        if layer // (4 // degrees.pp) != rank.pp:
            continue
        for e in torch.arange(8).chunk(degrees.ep)[rank.ep].tolist():
            mine, matrix = f"model.layers.{layer}.experts.{e}.", tensor[e].T
            if name.endswith("gate_up_proj"):
                out[mine + "fc1.weight"] = parts(30, 30)(matrix, degrees.tp, rank.tp).contiguous()
            else:
                out[mine + "fc2.weight"] = COLUMNS(matrix, degrees.tp, rank.tp).contiguous()
    return out


def gpt_oss(whole: Tensors, degrees: Degrees, rank: Rank) -> Tensors:
    """The experts of a layer in one tensor.

    Those of the rank, then rows of gate and up, or groups of 32 inputs.
    """
    out = by_rules("gpt_oss", whole, degrees, 0, rank)
    for name in [n for n in out if ".experts." in n]:
        mine = out[name].chunk(degrees.ep)[rank.ep]
        along = 1 if "gate_up" in name else 2
        out[name] = (mine if name.endswith("down_proj_bias") else mine.chunk(degrees.tp, along)[rank.tp]).contiguous()
    return out


OTHERWISE: dict[str, Callable[[Tensors, Degrees, Rank], Tensors]] = {
    "gemma3": gemma3,
    "gpt_oss": gpt_oss,
    "llama4": llama4,
}


def split(architecture: str, whole: Tensors, degrees: Degrees, experts: int = 0) -> dict[Rank, Tensors]:
    """The tensors of each rank."""
    if architecture in OTHERWISE:
        return {rank: OTHERWISE[architecture](whole, degrees, rank) for rank in degrees.ranks()}
    return {rank: by_rules(architecture, whole, degrees, experts, rank) for rank in degrees.ranks()}
