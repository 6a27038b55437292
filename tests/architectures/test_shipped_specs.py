"""Every shipped spec of an architecture, with configs of published models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ucpl.conversion.checking import check
from ucpl.conversion.requests import Given
from ucpl.language import nodes, parse, parse_call
from ucpl.layout import load, resolve
from ucpl.resources import spec_files

SPECS = Path(__file__).parents[2] / "specs"
LLAMA = {"model_type": "llama", "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": False}
# Numbers of parameters, from the model cards.
CONFIGS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "Llama-3.1-405B": ("llama.ucpl", 405_853_388_800, {
        **LLAMA, "hidden_size": 16384, "intermediate_size": 53248, "num_hidden_layers": 126, "num_attention_heads": 128,
        "num_key_value_heads": 8, "vocab_size": 128256,
    }),
    "Llama-3.2-1B": ("llama.ucpl", 1_235_814_400, {
        **LLAMA, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 128256, "tie_word_embeddings": True,
    }),
    "Mistral-7B-v0.1": ("llama.ucpl", 7_241_732_096, {
        "model_type": "mistral", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32000, "tie_word_embeddings": False,
    }),
    "Mistral-7B-v0.1, by the lines that decoders share": ("decoder.ucpl", 7_241_732_096, {
        "model_type": "mistral", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32000, "tie_word_embeddings": False,
    }),
    "Mixtral-8x7B": ("llama.ucpl", 46_702_792_704, {
        "model_type": "mixtral", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32000, "num_local_experts": 8,
        "num_experts_per_tok": 2, "tie_word_embeddings": False,
    }),
    "Qwen2-7B": ("llama.ucpl", 7_615_616_512, {
        "model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
        "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064, "tie_word_embeddings": False,
    }),
    "Qwen3-8B": ("llama.ucpl", 8_190_735_360, {
        "model_type": "qwen3", "attention_bias": False, "hidden_size": 4096, "intermediate_size": 12288,
        "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
        "vocab_size": 151936, "tie_word_embeddings": False,
    }),
    "Phi-3-mini": ("llama.ucpl", 3_821_079_552, {
        "model_type": "phi3", "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 32, "vocab_size": 32064, "tie_word_embeddings": False,
    }),
    "Qwen1.5-MoE-A2.7B": ("llama.ucpl", 14_315_784_192, {
        "model_type": "qwen2_moe", "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 24,
        "num_attention_heads": 16, "num_key_value_heads": 16, "num_experts": 60, "num_experts_per_tok": 4,
        "decoder_sparse_step": 1, "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632,
        "vocab_size": 151936, "tie_word_embeddings": False,
    }),
    "Qwen3-30B-A3B": ("llama.ucpl", 30_532_122_624, {
        "model_type": "qwen3_moe", "attention_bias": False, "hidden_size": 2048, "intermediate_size": 6144,
        "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128,
        "num_experts_per_tok": 8, "decoder_sparse_step": 1, "mlp_only_layers": [], "moe_intermediate_size": 768,
        "vocab_size": 151936, "tie_word_embeddings": False,
    }),
    "DeepSeek-V3": ("deepseek_v3.ucpl", 671_026_419_200, {
        "model_type": "deepseek_v3", "first_k_dense_replace": 3, "hidden_size": 7168, "intermediate_size": 18432,
        "kv_lora_rank": 512, "moe_intermediate_size": 2048, "n_routed_experts": 256, "n_shared_experts": 1,
        "num_attention_heads": 128, "num_hidden_layers": 61, "q_lora_rank": 1536, "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64, "v_head_dim": 128, "vocab_size": 129280, "tie_word_embeddings": False,
        "num_nextn_predict_layers": 1, "attention_bias": False,
    }),
    "Llama-4-Scout, without what reads images": ("llama4.ucpl", 107_769_861_120, {
        "model_type": "llama4_text", "hidden_size": 5120, "intermediate_size": 8192, "intermediate_size_mlp": 16384,
        "num_hidden_layers": 48, "num_attention_heads": 40, "num_key_value_heads": 8, "head_dim": 128,
        "num_local_experts": 16, "moe_layers": list(range(48)), "vocab_size": 202048, "attention_bias": False,
        "tie_word_embeddings": False,
    }),
    "gpt-oss-20b": ("gpt_oss.ucpl", 20_914_757_184, {
        "model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 24,
        "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "num_local_experts": 32, "vocab_size": 201088,
        "attention_bias": True, "tie_word_embeddings": False,
    }),
    "gpt2": ("gpt2.ucpl", 124_439_808, {
        "model_type": "gpt2", "n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024, "n_ctx": 1024,
        "vocab_size": 50257,
    }),
}  # fmt: skip
DENSE = {
    "hf",
    "phi3",
    "pairs",
    "autotp",
    "megatron",
    "megatron_local",
    "megatron_1p",
    "torch_dist",
    "hf_rounded",
    "openai",
    "consolidated",
}


@pytest.mark.parametrize("model", CONFIGS)
def test_every_layout_of_a_spec_suits_a_published_model(model: str) -> None:
    """No spec has findings.

    Specs with experts store all of a model; the others report that they leave experts out.
    """
    file, _, config = CONFIGS[model]
    found = check(str(SPECS / file), Given(config=config))
    assert found.findings == ()
    said = [remark for remark in found.remarks if "stores nothing of" in remark]
    metas = {"consolidated"} if model.startswith("Qwen") else set()  # no biases or norms of heads in Meta's files
    leaving = {remark.partition(" ")[0] for remark in said if "stores nothing of `router`" in remark}
    has_experts = file == "llama.ucpl" and ("num_local_experts" in config or "num_experts" in config)
    assert leaving == (DENSE - {"openai"} - metas if has_experts else set())
    shared = (
        {"mixtral", "mixtral_stacked"} if "shared_expert_intermediate_size" in config else set()
    )  # Mixtral has none
    assert {remark.partition(" ")[0] for remark in said} == leaving | shared | metas


@pytest.mark.parametrize("model", CONFIGS)
def test_the_model_has_as_many_parameters_as_the_published_one(model: str) -> None:
    file, parameters, config = CONFIGS[model]
    text = (SPECS / file).read_text()
    call = "decoder_hf()" if file == "decoder.ucpl" else "hf()"
    layout = resolve(load((file, text)), parse_call(call), config=config)
    assert sum(t.numel for t in layout.tensors.values()) == parameters


def test_every_shipped_spec_of_an_architecture_is_among_them() -> None:
    named = {
        file
        for file, path in spec_files()
        if any(isinstance(s, nodes.Model) for s in parse(path.read_text(), file).statements)
    }
    assert named == {file for file, _, _ in CONFIGS.values()}
