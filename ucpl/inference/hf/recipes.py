"""Roles of axes in transformers' modules, and fused tensors, as data.

A line here is a candidate: it is used if the sizes agree in every version of the class. A role means the keys of a
config that may have it (`sizes.py`); `=key` is that key.
"""

from __future__ import annotations

import re

from attrs import field

from ucpl.records import frozen

__all__ = ["PARTS", "PRODUCTS", "ROLES", "Leaf", "FusedParts", "parts_of", "roles_of"]


def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern)


@frozen
class Leaf:
    """The roles of the axes of a weight.

    A bias has that of the outputs. is_transposed: inputs come first.
    """

    name: re.Pattern[str] = field(converter=_compiled)
    axes: tuple[tuple[str, ...], ...]
    is_transposed: bool = False


@frozen
class FusedParts:
    """The parts of one axis of a fused tensor.

    For each value of the `outer` dims, they are end to end.
    """

    models: re.Pattern[str] = field(converter=_compiled)  # model_type
    name: re.Pattern[str] = field(converter=_compiled)  # the end of a name on disk, without `weight`
    axis: int
    parts: tuple[tuple[str, tuple[str, ...]], ...]
    outer: tuple[str, ...] = ()


_END = r"(\.weight|\.bias)?$"
_ATTENTION = r"(attn|attention|Attention|SelfAttention|EncDecAttention|encoder_attn|cross_attn)\.(\w+\.)?"

ROLES: tuple[Leaf, ...] = (
    Leaf(
        r"(embed_tokens|wte|word_embeddings|embed_in|tok_embeddings|shared|embeddings)" + _END, (("vocab",), ("width",))
    ),
    Leaf(r"(lm_head|embed_out|proj_out|shared_head\.head)" + _END, (("vocab",), ("width",))),
    Leaf(r"\.(q|q_proj|wq|query|to_q|q_lin)" + _END, (("heads", "head"), ("width",))),
    Leaf(r"\.(k|v|k_proj|v_proj|wk|wv|key|value|to_k|to_v)" + _END, (("groups", "head"), ("width",))),
    Leaf(r"\.eh_proj" + _END, (("width",),)),
    Leaf(r"\.q_b_proj" + _END, (("heads", "qk"), ("=q_lora_rank",))),
    Leaf(_ATTENTION + r"(o|o_proj|out_proj|wo|dense|to_out|proj)" + _END, (("width",), ("heads", "head"))),
    Leaf(r"\.(gate_proj|up_proj|w1|w3|fc1|wi|wi_0|wi_1|dense_h_to_4h|fc_in)" + _END, (("ffn",), ("width",))),
    Leaf(r"\.(down_proj|w2|fc2|wo|dense_4h_to_h|fc_out)" + _END, (("width",), ("ffn",))),
    Leaf(r"c_fc" + _END, (("width",), ("ffn",)), True),  # of GPT-2
    Leaf(r"mlp\.c_proj" + _END, (("ffn",), ("width",)), True),
    Leaf(r"attn\.c_proj" + _END, (("heads", "head"), ("width",)), True),
    Leaf(r"(q_norm|k_norm)" + _END, (("head",),)),
    Leaf(r"q_norm" + _END, (("heads", "head"),)),
    Leaf(r"k_norm" + _END, (("groups", "head"),)),
    Leaf(r"(layernorm|layer_norm|norm\d?|ln_\w+|rmsnorm)" + _END, (("width",),)),
)

_QKV = (("q", ("heads", "head")), ("k", ("groups", "head")), ("v", ("groups", "head")))
_ONE_KV = (("q", ("heads", "head")), ("k", ("head",)), ("v", ("head",)))
_GATE_UP = (("gate", ("ffn",)), ("up", ("ffn",)))
_MLA = r"deepseek_v|glm_moe_dsa|glm4_moe_lite|kimi|longcat|youtu"
_MAMBA2 = r"^(mamba2|bamba|falcon_h1|granitemoehybrid|nemotron_h|zamba2)$"
_MAMBA1 = r"^(mamba|jamba|falcon_mamba)$"
_DELTA = r"qwen3_next"
_HV = ("linear_keys", "linear_ratio", "=linear_value_head_dim")

PARTS: tuple[FusedParts, ...] = (
    FusedParts(r"phi3|glm4?$|phimoe", r"qkv_proj", 0, _QKV),
    FusedParts(r"phi3|glm4?$", r"gate_up_proj", 0, _GATE_UP),
    FusedParts(r"llama4", r"experts\.gate_up_proj", 2, _GATE_UP),
    FusedParts(r"gpt_oss", r"experts\.gate_up_proj", 2, (("gate", ("one",)), ("up", ("one",))), ("ffn",)),
    FusedParts(r"gpt_oss", r"experts\.gate_up_proj_bias", 1, (("gate_bias", ("one",)), ("up_bias", ("one",))), ("ffn",)),
    FusedParts(r"gpt2", r"attn\.c_attn", 1, _QKV),
    FusedParts(r"gpt_neox|bloom", r"query_key_value", 0, (("q", ("head",)), ("k", ("head",)), ("v", ("head",))), ("heads",)),
    FusedParts(r"falcon$", r"query_key_value", 0, _ONE_KV),
    FusedParts(r"gpt_bigcode", r"attn\.c_attn", 0, _ONE_KV),
    FusedParts(_MLA, r"kv_a_proj_with_mqa", 0, (("c", ("=kv_lora_rank",)), ("rope", ("=qk_rope_head_dim",)))),
    FusedParts(_MLA, r"kv_b_proj", 0, (("k", ("=qk_nope_head_dim",)), ("v", ("=v_head_dim",))), ("heads",)),
    FusedParts(r"deepseek_v3|glm", r"eh_proj", 1, (("embed", ("width",)), ("hidden", ("width",)))),
    FusedParts(_DELTA, r"self_attn\.q_proj", 0, (("q", ("head",)), ("gate", ("head",))), ("heads",)),
    FusedParts(
        _DELTA, r"in_proj_qkvz", 0,
        (("q", ("=linear_key_head_dim",)), ("k", ("=linear_key_head_dim",)), ("v", _HV[1:]), ("z", _HV[1:])), ("linear_keys",),
    ),
    FusedParts(_DELTA, r"in_proj_ba", 0, (("b", ("linear_ratio",)), ("a", ("linear_ratio",))), ("linear_keys",)),
    FusedParts(
        _DELTA, r"linear_attn\.conv1d", 0,
        (("q", ("linear_keys", "=linear_key_head_dim")), ("k", ("linear_keys", "=linear_key_head_dim")), ("v", _HV)),
    ),
    FusedParts(
        _MAMBA2, r"(mixer|mamba)\.in_proj", 0,
        (
            ("z", ("ssm_heads", "ssm_head")), ("x", ("ssm_heads", "ssm_head")), ("b", ("ssm_groups", "ssm_state")),
            ("c", ("ssm_groups", "ssm_state")), ("dt", ("ssm_heads",)),
        ),
    ),
    FusedParts(
        _MAMBA2, r"(mixer|mamba)\.conv1d", 0,
        (("x", ("ssm_heads", "ssm_head")), ("b", ("ssm_groups", "ssm_state")), ("c", ("ssm_groups", "ssm_state"))),
    ),
    FusedParts(_MAMBA1, r"(mixer|mamba)\.in_proj", 0, (("x", ("inner",)), ("z", ("inner",)))),
    FusedParts(_MAMBA1, r"(mixer|mamba)\.x_proj", 0, (("dt", ("ssm_rank",)), ("b", ("ssm_state",)), ("c", ("ssm_state",)))),
)  # fmt: skip

# Axes of one part that are products of dims, by the end of a name: of the models that have such modules.
PRODUCTS: tuple[Leaf, ...] = (
    Leaf(r"linear_attn\.(A_log|dt_bias)$", (("linear_keys", "linear_ratio"),)),
    Leaf(r"linear_attn\.out_proj" + _END, (("width",), _HV)),
    Leaf(r"(mixer|mamba)\.(A_log|D|dt_bias)$", (("ssm_heads",),)),
    Leaf(r"(mixer|mamba)\.norm" + _END, (("ssm_heads", "ssm_head"),)),
    Leaf(r"(mixer|mamba)\.out_proj" + _END, (("width",), ("ssm_heads", "ssm_head"))),
    Leaf(r"(mixer|mamba)\.(A_log|x_proj)" + _END, (("inner",), ("ssm_state",))),
    Leaf(r"(mixer|mamba)\.(D|conv1d|in_proj|dt_proj)" + _END, (("inner",), ("ssm_rank",))),
    Leaf(r"(mixer|mamba)\.out_proj" + _END, (("width",), ("inner",))),
    Leaf(r"(mixer|mamba)\.x_proj" + _END, ((), ("inner",))),
)


def roles_of(name: str) -> list[tuple[tuple[str, ...], ...]]:
    """The possible roles of a tensor's axes, the likelier first."""
    found = [leaf for leaf in (*PRODUCTS, *ROLES) if leaf.name.search(name)]
    is_bias = name.endswith(".bias")
    return [leaf.axes[-1:] if is_bias and leaf.is_transposed else leaf.axes for leaf in found]


def parts_of(models: set[str], name: str, axis: int) -> list[FusedParts]:
    """The possible parts of an axis, by tensor's name and model.

    A bias has the outputs alone.
    """
    end = re.sub(_END, "", name)
    is_bias = name.endswith(".bias")
    return [
        p
        for p in PARTS
        if axis == (0 if is_bias else p.axis)
        and re.search(f"(?:{p.name.pattern})$", end)
        and any(p.models.search(m) for m in models)
    ]
