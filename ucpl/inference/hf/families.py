"""Tensors of common decoder classes by config.json, without transformers.

Llama, Mistral, Qwen2 and Qwen3 cover most folders; an import of transformers takes some five seconds. tests/interop
compares the table with the classes. A config that leaves a size to its class, or requests more, is none of these.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from ucpl.inference.hf.records import Config
from ucpl.records import frozen

__all__ = ["HEAD", "KINDS", "LAYERS_MAX", "WORDS", "missing_parts", "shapes_of"]

LAYERS_MAX = 10_000  # of a kind, and experts of a layer
Shapes = dict[str, tuple[int, ...]]
WORDS, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@frozen
class LlamaVariant:
    """Differences of a class from Llama.

    biases: of q, k and v; `None`: those of `attention_bias`.
    """

    kind: str
    biases: bool | None = False
    out_bias: bool = False  # whether `attention_bias` is of the output, too
    mlp_bias: bool = False  # whether the class knows the key
    has_norms: bool = False  # of q and k
    defaults: frozenset[str] = frozenset()  # keys that may be absent


_HEADS, _WIDTH = "num_key_value_heads", "head_dim"
_FAMILIES: Mapping[str, LlamaVariant] = {
    "llama": LlamaVariant("LlamaForCausalLM", None, out_bias=True, mlp_bias=True, defaults=frozenset({_HEADS, _WIDTH})),
    "mistral": LlamaVariant("MistralForCausalLM", defaults=frozenset({_WIDTH})),
    "qwen2": LlamaVariant("Qwen2ForCausalLM", True, defaults=frozenset({_WIDTH})),
    "qwen3": LlamaVariant("Qwen3ForCausalLM", None, out_bias=True, has_norms=True),
}
# By model_type: patterns that names of the class's layers have, in the files and in memory.
_Q, _GATE = r"\.self_attn\.q_proj\.", r"\.mlp\.gate_proj\."
_PARTS: Mapping[str, tuple[str, ...]] = {
    "bloom": (r"\.self_attention\.query_key_value\.", r"\.mlp\.dense_h_to_4h\."),
    "deepseek_v3": (r"\.self_attn\.kv_a_proj_with_mqa\.", r"\.self_attn\.kv_b_proj\."),
    "gemma": (_Q, _GATE),
    "gemma2": (_Q, _GATE, r"\.pre_feedforward_layernorm\."),
    "gemma3_text": (_Q, _GATE, r"\.pre_feedforward_layernorm\.", r"\.self_attn\.q_norm\."),
    "glm4": (_Q, r"\.mlp\.gate_up_proj\.", r"\.post_self_attn_layernorm\."),
    "gpt2": (r"\.attn\.c_attn\.", r"\.mlp\.c_fc\."),
    "gpt_neox": (r"\.attention\.query_key_value\.", r"\.mlp\.dense_h_to_4h\."),
    "gpt_oss": (_Q, r"\.self_attn\.sinks", r"\.mlp\.experts\."),
    "llama": (_Q, _GATE),
    "llama4_text": (_Q, r"\.feed_forward\."),
    "mamba2": (r"\.mixer\.A_log", r"\.mixer\.in_proj\."),
    "mistral": (_Q, _GATE),
    "mixtral": (_Q, r"\.block_sparse_moe\.|\.mlp\.experts\.gate_up_proj"),
    "olmo2": (_Q, _GATE, r"\.post_feedforward_layernorm\.", r"\.self_attn\.q_norm\."),
    "phi3": (r"\.self_attn\.qkv_proj\.", r"\.mlp\.gate_up_proj\."),
    "qwen2": (_Q, _GATE),
    "qwen2_moe": (_Q, r"\.mlp\.experts\.", r"\.mlp\.shared_expert\."),
    "qwen3": (_Q, _GATE, r"\.self_attn\.q_norm\."),
    "qwen3_moe": (_Q, r"\.mlp\.experts\.", r"\.self_attn\.q_norm\."),
    "t5": (r"\.SelfAttention\.q\.", r"\.DenseReluDense\."),
    "whisper": (r"\.encoder_attn\.q_proj\.", r"\.fc1\."),
}
KINDS: Mapping[str, str] = {key: family.kind for key, family in _FAMILIES.items()}


def missing_parts(config: Config, names: Iterable[str]) -> tuple[tuple[str, ...], bool]:
    """Parts of a common class that no name has, and a flag.

    The flag is True if another part is there. Adapters, quantized tensors and classes of their own code have other names.
    """
    kind, names = str(config.get("model_type")), tuple(names)
    if {"auto_map", "quantization_config"} & {*config} or any(".lora_" in name for name in names):
        return (), True
    parts = _PARTS.get(kind, ())
    lacks = tuple(part for part in parts if not any(re.search(part, f".{name}") for name in names))
    return tuple(part.partition("|")[0].replace("\\", "").strip(".") for part in lacks), not lacks or len(lacks) < len(
        parts
    )


def shapes_of(config: Config) -> Shapes | None:
    """Names and shapes of a class's own tensors, with a tied head.

    None: only the class itself has them.
    """
    family = _FAMILIES.get(str(config.get("model_type")))
    if (
        family is None
        or config.get("architectures") != [family.kind]
        or {"auto_map", "quantization_config"} & {*config}
    ):
        return None
    sizes = _sizes(config, family)
    flags = {key: config.get(key, False) for key in ("attention_bias", "mlp_bias", "tie_word_embeddings")}
    if sizes is None or any(type(flag) is not bool for flag in flags.values()):
        return None
    v, h, f, n, g, d = (
        sizes[key] for key in ("vocab_size", "hidden_size", "intermediate_size", "heads", _HEADS, _WIDTH)
    )
    biases = flags["attention_bias"] if family.biases is None else family.biases
    layer: Shapes = {"input_layernorm.weight": (h,), "post_attention_layernorm.weight": (h,)}
    for name, rows in (("q", n), ("k", g), ("v", g)):
        layer[f"self_attn.{name}_proj.weight"] = (rows * d, h)
        if biases:
            layer[f"self_attn.{name}_proj.bias"] = (rows * d,)
    layer["self_attn.o_proj.weight"] = (h, n * d)
    if family.out_bias and flags["attention_bias"]:
        layer["self_attn.o_proj.bias"] = (h,)
    if family.has_norms:
        layer |= {"self_attn.q_norm.weight": (d,), "self_attn.k_norm.weight": (d,)}
    for name, shape in (("gate", (f, h)), ("up", (f, h)), ("down", (h, f))):
        layer[f"mlp.{name}_proj.weight"] = shape
        if family.mlp_bias and flags["mlp_bias"]:
            layer[f"mlp.{name}_proj.bias"] = shape[:1]
    out: Shapes = {WORDS: (v, h)}
    for number in range(sizes["num_hidden_layers"]):
        out |= {f"model.layers.{number}.{name}": shape for name, shape in layer.items()}
    return out | {"model.norm.weight": (h,), HEAD: (v, h)}


def _sizes(config: Config, family: LlamaVariant) -> dict[str, int] | None:
    """The sizes, or None if one is missing or no number.

    The class would have a default for a missing one.
    """
    keys = (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        _HEADS,
        _WIDTH,
    )
    found = {key: value for key in keys if type(value := config.get(key)) is int and value > 0}
    heads, hidden = found.get("num_attention_heads"), found.get("hidden_size")
    if heads is None or hidden is None:
        return None
    found["heads"] = heads
    for key, default in ((_HEADS, heads), (_WIDTH, hidden // heads)):
        if key in family.defaults and config.get(key) is None:
            found[key] = default
    return found if {*keys} <= {*found} and found["num_hidden_layers"] <= LAYERS_MAX else None
