"""Families of transformers' models, each in three unusual sizes.

They are the table of test_families.py. `one` has one layer, one head of keys and values if there can be fewer than of
queries, and a head that is not the width over the heads. `five` has five layers and odd numbers where the class allows
them. `square` has one number for all sizes that can be equal, so that shapes do not distinguish axes.
"""

from __future__ import annotations

from typing import Any

from attrs import frozen

Config = dict[str, Any]

_ENDS: Config = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
ONE: Config = _ENDS | {
    "vocab_size": 53, "hidden_size": 60, "intermediate_size": 27, "num_hidden_layers": 1, "num_attention_heads": 6,
    "num_key_value_heads": 1, "head_dim": 12, "tie_word_embeddings": True, "max_position_embeddings": 40,
}  # fmt: skip
FIVE: Config = _ENDS | {
    "vocab_size": 71, "hidden_size": 54, "intermediate_size": 31, "num_hidden_layers": 5, "num_attention_heads": 9,
    "num_key_value_heads": 3, "head_dim": 4, "tie_word_embeddings": False, "max_position_embeddings": 41,
}  # fmt: skip
SQUARE: Config = _ENDS | {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 8, "head_dim": 8, "tie_word_embeddings": False, "max_position_embeddings": 64,
}  # fmt: skip
DEGREES = {"one": (2, 3), "five": (3, 1), "square": (2, 4)}  # of tensor parallelism, two that the heads divide by


@frozen
class Case:
    """A class, a config, degrees of tensor parallelism, and the saved dtype."""

    kind: str
    config: Config
    degrees: tuple[int, int]
    dtype: str = "float32"


def three(kind: str, one: Config, five: Config, square: Config) -> dict[str, Case]:
    sizes = {"one": one, "five": five, "square": square}
    return {
        size: Case(kind, config, DEGREES[size], "bfloat16" if size == "one" else "float32")
        for size, config in sizes.items()
    }


def like_llama(
    kind: str, one: Config | None = None, five: Config | None = None, square: Config | None = None, without: str = ""
) -> dict[str, Case]:
    """The three sizes with the family's own keys.

    without: a key that its config does not have.
    """
    each = ((ONE, one), (FIVE, five), (SQUARE, square))
    return three(kind, *({k: v for k, v in (sizes | (more or {})).items() if k != without} for sizes, more in each))


_MLA: Config = {
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 6,
    "v_head_dim": 10,
    "kv_lora_rank": 17,
    "rope_interleave": True,
}
_ROUTED: Config = {"moe_intermediate_size": 13, "n_routed_experts": 6, "num_experts_per_tok": 2}

FAMILIES: dict[str, dict[str, Case]] = {
    "llama": like_llama("LlamaForCausalLM", five={"attention_bias": True, "mlp_bias": True}),
    "mistral": like_llama("MistralForCausalLM"),
    "qwen2": like_llama("Qwen2ForCausalLM", without="head_dim"),
    "qwen3": like_llama("Qwen3ForCausalLM", five={"attention_bias": True}),
    "phi3": like_llama("Phi3ForCausalLM", without="head_dim"),
    "gemma2": like_llama("Gemma2ForCausalLM", five={"attention_bias": True}),
    "gemma3": like_llama("Gemma3ForCausalLM"),
    "olmo2": like_llama("Olmo2ForCausalLM", five={"attention_bias": True}, without="head_dim"),
    "glm4": like_llama("Glm4ForCausalLM", one={"attention_bias": False}),
    "gpt2": three(
        "GPT2LMHeadModel",
        _ENDS | {"vocab_size": 53, "n_embd": 42, "n_layer": 1, "n_head": 6, "n_positions": 19},
        _ENDS | {"vocab_size": 71, "n_embd": 45, "n_layer": 5, "n_head": 9, "n_positions": 23, "n_inner": 31},
        _ENDS | {"vocab_size": 64, "n_embd": 64, "n_layer": 2, "n_head": 8, "n_positions": 64, "n_inner": 64},
    ),
    "gpt_neox": three(
        "GPTNeoXForCausalLM",
        *({k: v for k, v in sizes.items() if k not in ("num_key_value_heads", "head_dim")} for sizes in (
            ONE | {"attention_bias": False}, FIVE | {"hidden_size": 72}, SQUARE,
        )),
    ),
    "bloom": three(
        "BloomForCausalLM",
        _ENDS | {"vocab_size": 53, "hidden_size": 42, "n_layer": 1, "n_head": 6},
        _ENDS | {"vocab_size": 71, "hidden_size": 45, "n_layer": 5, "n_head": 9, "tie_word_embeddings": False},
        _ENDS | {"vocab_size": 64, "hidden_size": 64, "n_layer": 2, "n_head": 8},
    ),
    "mixtral": like_llama(
        "MixtralForCausalLM", {"num_local_experts": 3}, {"num_local_experts": 5}, {"num_local_experts": 8}
    ),
    "qwen2_moe": like_llama(
        "Qwen2MoeForCausalLM",
        {"num_experts": 3, "num_experts_per_tok": 1, "moe_intermediate_size": 11, "shared_expert_intermediate_size": 17},
        {
            "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 13, "shared_expert_intermediate_size": 29,
            "mlp_only_layers": [0, 3], "qkv_bias": False,
        },
        {"num_experts": 8, "num_experts_per_tok": 8, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64},
        without="head_dim",
    ),
    "qwen3_moe": like_llama(
        "Qwen3MoeForCausalLM",
        {"num_experts": 3, "num_experts_per_tok": 1, "moe_intermediate_size": 11},
        {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 13, "decoder_sparse_step": 2},
        {"num_experts": 8, "num_experts_per_tok": 8, "moe_intermediate_size": 64},
    ),
    "gpt_oss": like_llama(
        "GptOssForCausalLM",
        {"num_local_experts": 3, "num_experts_per_tok": 1},
        {"num_local_experts": 5, "num_experts_per_tok": 2, "attention_bias": False, "sliding_window": 5},
        {"num_local_experts": 8, "num_experts_per_tok": 8},
    ),
    "llama4": like_llama(
        "Llama4ForCausalLM",
        {"num_local_experts": 3, "intermediate_size_mlp": 29, "attention_chunk_size": 8},
        {"num_local_experts": 5, "intermediate_size_mlp": 37, "attention_chunk_size": 8, "interleave_moe_layer_step": 2},
        {"num_local_experts": 8, "intermediate_size_mlp": 64, "attention_chunk_size": 8},
    ),
    "deepseek_v3": like_llama(
        "DeepseekV3ForCausalLM",
        _MLA | _ROUTED | {
            "num_key_value_heads": 6, "q_lora_rank": None, "n_shared_experts": 1, "first_k_dense_replace": 0, "n_group": 1,
            "topk_group": 1,
        },
        _MLA | _ROUTED | {
            "num_key_value_heads": 9, "q_lora_rank": 23, "n_shared_experts": 2, "first_k_dense_replace": 2, "n_group": 3,
            "topk_group": 2, "attention_bias": True,
        },
        {
            "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8, "kv_lora_rank": 64, "q_lora_rank": 64,
            "moe_intermediate_size": 64, "n_routed_experts": 8, "num_experts_per_tok": 8, "n_shared_experts": 1,
            "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
        },
        without="head_dim",
    ),
    "mamba2": three(
        "Mamba2ForCausalLM",
        _ENDS | {
            "vocab_size": 53, "hidden_size": 30, "num_heads": 6, "head_dim": 10, "expand": 2, "state_size": 14, "n_groups": 1,
            "num_hidden_layers": 1, "conv_kernel": 4, "tie_word_embeddings": True,
        },
        _ENDS | {
            "vocab_size": 71, "hidden_size": 45, "num_heads": 9, "head_dim": 15, "expand": 3, "state_size": 7, "n_groups": 3,
            "num_hidden_layers": 5, "conv_kernel": 3, "use_bias": True, "use_conv_bias": False,
        },
        _ENDS | {
            "vocab_size": 64, "hidden_size": 32, "num_heads": 8, "head_dim": 8, "expand": 2, "state_size": 8, "n_groups": 8,
            "num_hidden_layers": 2, "conv_kernel": 8,
        },
    ),
    "t5": three(
        "T5ForConditionalGeneration",
        {
            "vocab_size": 53, "d_model": 42, "d_kv": 10, "d_ff": 27, "num_layers": 1, "num_heads": 6,
            "feed_forward_proj": "gated-gelu", "relative_attention_num_buckets": 8, "decoder_start_token_id": 0,
        },
        {
            "vocab_size": 71, "d_model": 45, "d_kv": 7, "d_ff": 31, "num_layers": 5, "num_decoder_layers": 2, "num_heads": 9,
            "relative_attention_num_buckets": 6, "decoder_start_token_id": 0, "tie_word_embeddings": False,
        },
        {
            "vocab_size": 64, "d_model": 64, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 8,
            "relative_attention_num_buckets": 8, "decoder_start_token_id": 0,
        },
    ),
    "whisper": three(
        "WhisperForConditionalGeneration",
        *(_ENDS | {"decoder_start_token_id": 3, "suppress_tokens": None, "begin_suppress_tokens": None} | sizes for sizes in (
            {
                "vocab_size": 53, "d_model": 36, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 6,
                "decoder_attention_heads": 12, "encoder_ffn_dim": 27, "decoder_ffn_dim": 29, "num_mel_bins": 5,
                "max_source_positions": 11, "max_target_positions": 13,
            },
            {
                "vocab_size": 71, "d_model": 54, "encoder_layers": 5, "decoder_layers": 2, "encoder_attention_heads": 9,
                "decoder_attention_heads": 3, "encoder_ffn_dim": 31, "decoder_ffn_dim": 37, "num_mel_bins": 7,
                "max_source_positions": 15, "max_target_positions": 17,
            },
            {
                "vocab_size": 64, "d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 8,
                "decoder_attention_heads": 8, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "num_mel_bins": 64,
                "max_source_positions": 64, "max_target_positions": 64,
            },
        )),
    ),
}  # fmt: skip
