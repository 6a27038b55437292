"""Small classes of transformers, with sizes that most degrees do not divide."""

from __future__ import annotations

from typing import Any

WORDS = 71
_GQA = {"num_attention_heads": 8, "num_key_value_heads": 4, "hidden_size": 48, "intermediate_size": 37}
_SIZES = {"num_hidden_layers": 2, "vocab_size": WORDS, "max_position_embeddings": 32}
_TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_NO_DROPOUT = {"dropout": 0.0, "attention_dropout": 0.0}

CONFIGS: dict[str, dict[str, Any]] = {
    # a plan; the head is joined on every rank, and the embedding is not cut
    "llama": {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **_GQA, **_SIZES, **_TOKENS},
    # biases; the embedding and the head are one tensor, cut by the vocabulary
    "qwen2": {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], **_GQA, **_SIZES, **_TOKENS}
    | {"tie_word_embeddings": True},
    # no plan: DeepSpeed's policies; tied, and not cut
    "opt": {"model_type": "opt", "architectures": ["OPTForCausalLM"], **_SIZES, **_TOKENS, **_NO_DROPOUT}
    | {"num_attention_heads": 4, "hidden_size": 48, "ffn_dim": 44, "word_embed_proj_dim": 48, "layerdrop": 0.0},
    # query, key and value of each head in turn. DeepSpeed cuts it; transformers' own forward does not run on parts
    "bloom": {"model_type": "bloom", "architectures": ["BloomForCausalLM"], **_TOKENS, "vocab_size": WORDS}
    | {"n_layer": 2, "n_head": 4, "hidden_size": 48, "hidden_dropout": 0.0, "attention_dropout": 0.0},
}  # fmt: skip


def model_of(name: str) -> Any:
    """The class, with weights drawn from torch's generator."""
    import transformers

    said = CONFIGS[name]
    config = transformers.CONFIG_MAPPING[said["model_type"]].from_dict(dict(said))
    return getattr(transformers, said["architectures"][0])(config)
