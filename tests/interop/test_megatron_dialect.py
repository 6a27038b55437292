"""Folders of transformers in Megatron's legacy format, by the shipped specs.

A GPTModel of Megatron-Core loads every tensor of the file, strictly, and gives the logits of transformers' class. The
way back gives the same bytes.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve

import ucpl
from tests.interop.families import FAMILIES, SQUARE, Case, Config
from tests.interop.test_families import logits, made, weights
from ucpl.formats.megatron.orders import registered

pytestmark = pytest.mark.interop

ROOT = Path(__file__).parents[2]
SMALL: Config = SQUARE | {
    "vocab_size": 71, "hidden_size": 60, "intermediate_size": 28, "num_attention_heads": 6, "num_key_value_heads": 2,
    "head_dim": 8, "initializer_range": 0.3, "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}  # fmt: skip
PLAIN = {k: v for k, v in SMALL.items() if k != "head_dim"}  # for those whose heads are the width over their number
QWEN_MOE: Config = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
MOE: Config = {"num_moe_experts": 4, "moe_router_topk": 2, "moe_router_load_balancing_type": "none"}
SHARED = {"shared_expert_intermediate_size": 24}
LATENT: Config = {
    "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10, "kv_lora_rank": 18, "num_key_value_heads": 6,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 20, "n_shared_experts": 2, "n_group": 2,
    "topk_group": 1, "first_k_dense_replace": 1, "norm_topk_prob": True, "routed_scaling_factor": 2.5,
}  # fmt: skip
SIGMOID: Config = {
    **MOE, "moe_ffn_hidden_size": 20, "moe_shared_expert_intermediate_size": 40, "moe_layer_freq": [0, 1],
    "moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True, "moe_router_num_groups": 2,
    "moe_router_group_topk": 1, "moe_router_topk_scaling_factor": 2.5, "multi_latent_attention": True, "qk_layernorm": True,
    "kv_lora_rank": 18, "qk_head_dim": 12, "qk_pos_emb_head_dim": 8, "v_head_dim": 10, "rope_type": "rope",
    "rotary_scaling_factor": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
}  # fmt: skip

# name: class, its config, layout on disk, a layout of Megatron's, and further options of Megatron
MODELS: dict[str, tuple[str, Config, str, str, Config]] = {
    "llama": ("LlamaForCausalLM", SMALL, "llama.ucpl:hf()", "megatron", {}),
    "llama tied": ("LlamaForCausalLM", SMALL | {"tie_word_embeddings": True}, "llama.ucpl:hf()", "megatron", {}),
    "qwen2": ("Qwen2ForCausalLM", PLAIN, "llama.ucpl:hf()", "megatron", {"add_qkv_bias": True}),
    "qwen3": ("Qwen3ForCausalLM", SMALL, "llama.ucpl:hf()", "megatron", {"qk_layernorm": True}),
    "phi3": ("Phi3ForCausalLM", PLAIN, "llama.ucpl:phi3()", "megatron", {}),
    "mixtral": (
        "MixtralForCausalLM", SMALL | {"num_local_experts": 4}, "llama.ucpl:mixtral()", "megatron_moe",
        MOE | {"moe_ffn_hidden_size": 28},
    ),
    "qwen2_moe": (
        "Qwen2MoeForCausalLM", PLAIN | QWEN_MOE | SHARED, "llama.ucpl:qwen_moe()", "megatron_grouped",
        MOE | {
            "moe_ffn_hidden_size": 20, "add_qkv_bias": True, "moe_shared_expert_intermediate_size": 24,
            "moe_shared_expert_gate": True, "moe_router_pre_softmax": True,
        },
    ),
    "qwen3_moe": (
        "Qwen3MoeForCausalLM", SMALL | QWEN_MOE, "llama.ucpl:qwen_moe()", "megatron_local_moe",
        MOE | {"moe_ffn_hidden_size": 20, "qk_layernorm": True, "moe_router_pre_softmax": True},
    ),
    "deepseek_v3": (
        "DeepseekV3ForCausalLM", PLAIN | LATENT | {"q_lora_rank": 14}, "deepseek_v3.ucpl:hf()", "megatron",
        SIGMOID | {"q_lora_rank": 14},
    ),
    "deepseek_v3 without ranks of queries": (
        "DeepseekV3ForCausalLM", PLAIN | LATENT | {"q_lora_rank": None}, "deepseek_v3.ucpl:hf()", "megatron_local",
        SIGMOID | {"q_lora_rank": None},
    ),
    "gpt_oss": (
        "GptOssForCausalLM", SMALL | {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 4},
        "gpt_oss.ucpl:hf()", "megatron_local",
        MOE | {
            "moe_ffn_hidden_size": 28, "activation_func": "quick_gelu", "add_bias_linear": True, "glu_linear_offset": 1.0,
            "activation_func_clamp_value": 7.0, "softmax_type": "learnable", "window_size": [3, 0], "window_attn_skip_freq": 2,
        },
    ),
    "llama4": (
        "Llama4ForCausalLM",
        SMALL | {
            "intermediate_size": 20, "intermediate_size_mlp": 28, "num_local_experts": 4, "num_experts_per_tok": 1,
            "interleave_moe_layer_step": 2, "no_rope_layers": [1, 0], "attention_chunk_size": 32,
        },
        "llama4.ucpl:hf()", "megatron_local",
        MOE | {
            "moe_router_topk": 1, "moe_router_score_function": "sigmoid", "moe_apply_probs_on_input": True,
            "moe_ffn_hidden_size": 20, "moe_shared_expert_intermediate_size": 20, "moe_layer_freq": [0, 1],
            "rotary_interleaved": True, "no_rope_freq": [0, 1], "qk_l2_norm": True,
        },
    ),
    "gpt2": ("GPT2LMHeadModel", FAMILIES["gpt2"]["five"].config, "gpt2.ucpl:hf()", "megatron", {}),
}  # fmt: skip

# In torch_dist, too.
STACKED = dict.fromkeys(
    ("llama", "llama tied", "qwen2", "qwen3", "phi3"), "llama.ucpl:torch_dist(tp=2, pp=2, divisible=1)"
)
STACKED |= dict.fromkeys(
    ("mixtral", "qwen2_moe", "qwen3_moe"),
    'llama.ucpl:torch_dist_moe(tp=2, pp=2, divisible=1, norm="mlp.linear_fc1.layer_norm_")',
)
STACKED |= {"gpt2": "gpt2.ucpl:torch_dist(tp=2, pp=2, divisible=1)"}
STACKED |= {"gpt_oss": 'gpt_oss.ucpl:torch_dist(tp=2, pp=2, divisible=1, norm="mlp.linear_fc1.layer_norm_")'}
STACKED |= {"llama4": 'llama4.ucpl:torch_dist(tp=2, pp=2, divisible=1, norm="mlp.linear_fc1.layer_norm_")'}
STACKED |= dict.fromkeys(
    (name for name in MODELS if name.startswith("deepseek_v3")),
    "deepseek_v3.ucpl:torch_dist_local(tp=2, pp=2, divisible=1)",
)

# Names of Megatron's modules with Transformer Engine, and without.
NAMES = {
    r"self_attention\.linear_qkv\.layer_norm_": "input_layernorm.",
    r"mlp\.linear_fc1\.layer_norm_": "pre_mlp_layernorm.",
    r"experts\.(linear_fc\d)\.weight(\d+)$": r"experts.local_experts.\2.\1.weight",
    r"linear_(q|kv)_up_proj\.layer_norm_": r"\1_layernorm.",
}


def told(config: Config, more: Config) -> tuple[Config, Config]:
    """The config of Megatron's layers and arguments for a class."""
    if "n_embd" in config:
        layers = {
            "num_layers": config["n_layer"], "hidden_size": config["n_embd"], "num_attention_heads": config["n_head"],
            "ffn_hidden_size": config["n_inner"], "normalization": "LayerNorm", "activation_func": "gelu_tanh",
        }  # fmt: skip
        model = {"max_sequence_length": config["n_positions"], "position_embedding_type": "learned_absolute"}
        return layers | more, model | {"vocab_size": config["vocab_size"], "share_embeddings_and_output_weights": True}
    heads = config["num_attention_heads"]
    layers = {
        "num_layers": config["num_hidden_layers"], "hidden_size": config["hidden_size"], "num_attention_heads": heads,
        "ffn_hidden_size": config.get("intermediate_size_mlp", config["intermediate_size"]),
        "normalization": "RMSNorm", "activation_func": "silu",
        "gated_linear_unit": True, "add_bias_linear": False, "layernorm_epsilon": 1e-6,
        "num_query_groups": config["num_key_value_heads"],
        "kv_channels": config.get("head_dim", config["hidden_size"] // heads),
    }  # fmt: skip
    model = {"max_sequence_length": 64, "position_embedding_type": "rope", "vocab_size": config["vocab_size"]}
    return layers | more, model | {"share_embeddings_and_output_weights": config["tie_word_embeddings"]}


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Case, Path, torch.Tensor]]:
    """The folder of each model's class, and Megatron's logits, from one process."""
    top, runs, out = tmp_path_factory.mktemp("megatron"), [], {}
    for name, (kind, config, here, there, more) in MODELS.items():
        case, place = Case(kind, config, (1, 2)), top / name.replace(" ", "_")
        made(case, place / "hf")
        layout = f"{here.partition(':')[0]}:{there}(tp=1, divisible=1)"
        ucpl.convert(place / "hf", place / "m", layout, layout=here)
        state = torch.load(place / "m" / "release" / "mp_rank_00" / "model_optim_rng.pt", weights_only=True)["model"]
        renamed: dict[str, torch.Tensor] = {}
        for key, tensor in state.items():
            for pattern, plain in NAMES.items():
                key = re.sub(pattern, plain, key)
            renamed[key] = tensor
        torch.save(renamed, place / "state.pt")
        layers, model = told(config, more)
        mla = "multi_latent_attention" in more
        runs.append(
            {
                "state": str(place / "state.pt"),
                "out": str(place / "out.pt"),
                "config": layers,
                "model": model,
                "mla": mla,
            }
        )
        out[name] = (case, place)
        if name in STACKED:
            ucpl.convert(place / "hf", place / "dist", STACKED[name], layout=here)
            runs.append({**runs[-1], "torch_dist": str(place / "dist" / "iter_0000000"), "out": str(place / "dist.pt")})
    (top / "runs.json").write_text(json.dumps(runs))
    job = [sys.executable, "-m", "tests.interop.megatron_logits_job", str(top / "runs.json")]
    done = subprocess.run(job, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-1500:]
    return {name: (case, place, torch.load(place / "out.pt", weights_only=True)) for name, (case, place) in out.items()}


@pytest.mark.parametrize("name", MODELS)
def test_megatron_core_says_the_same_logits(name: str, theirs: dict[str, tuple[Case, Path, Any]]) -> None:
    case, place, found = theirs[name]
    wanted = logits(case, place / "hf")
    assert wanted.abs().max() > 0.1
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", MODELS)
def test_other_degrees_and_back_are_the_same_bytes(
    name: str, theirs: dict[str, tuple[Case, Path, Any]], tmp_path: Path
) -> None:
    _, place, _ = theirs[name]
    _, _, here, there, more = MODELS[name]
    spec = here.partition(":")[0]
    ep = ", ep=2" if more.get("num_moe_experts") else ""
    degrees = "tp=1, pp=5" if name == "gpt2" else f"tp=2, pp=2{ep}"
    ranks = f"{spec}:{there}({degrees})"
    ucpl.convert(place / "m", tmp_path / "ranks", ranks, layout=f"{spec}:{there}(tp=1, divisible=1)")
    ucpl.convert(tmp_path / "ranks", tmp_path / "back", here, layout=ranks)
    back, stored = weights(tmp_path / "back"), weights(place / "hf")
    assert back.keys() == stored.keys() and all(torch.equal(back[n], stored[n]) for n in stored)


@pytest.mark.parametrize("name", MODELS)
def test_parameters_are_registered_in_the_order_that_optimizers_are_written_in(
    name: str, theirs: dict[str, tuple[Case, Path, Any]]
) -> None:
    own = json.loads((theirs[name][1] / "out.json").read_text())
    assert registered(sorted(own), fused=False) == tuple(own)


@pytest.mark.parametrize("name", STACKED)
def test_torch_dist_is_loaded_and_comes_back(
    name: str, theirs: dict[str, tuple[Case, Path, Any]], tmp_path: Path
) -> None:
    """Megatron's own `dist_checkpointing.load`; a tied head is the embedding."""
    _, place, found = theirs[name]
    assert torch.equal(torch.load(place / "dist.pt", weights_only=True), found)
    here, config = MODELS[name][2], json.loads((place / "hf" / "config.json").read_text())
    ucpl.convert(place / "dist", tmp_path / "back", here, layout=STACKED[name], config=config)
    back, stored = weights(tmp_path / "back"), weights(place / "hf")
    assert back.keys() == stored.keys() and all(torch.equal(back[n], stored[n]) for n in stored)


# Options that a shipped spec does not support: dense layers between others, biases that Megatron lacks.
NOT_TAKEN = ("mlp_only_layers", "decoder_sparse_step")
BIASES = {"gpt_oss": True, "deepseek_v3": False}
SIZED = {
    "llama": ("llama.ucpl:hf()", "megatron"), "mistral": ("llama.ucpl:hf()", "megatron"),
    "qwen2": ("llama.ucpl:hf()", "megatron"), "qwen3": ("llama.ucpl:hf()", "megatron"),
    "phi3": ("llama.ucpl:phi3()", "megatron"), "mixtral": ("llama.ucpl:mixtral()", "megatron_moe"),
    "qwen2_moe": ("llama.ucpl:qwen_moe()", "megatron_moe"), "qwen3_moe": ("llama.ucpl:qwen_moe()", "megatron_moe"),
    "gpt2": ("gpt2.ucpl:hf()", "megatron"), "gpt_oss": ("gpt_oss.ucpl:hf()", "megatron"),
    "llama4": ("llama4.ucpl:hf()", "megatron"), "deepseek_v3": ("deepseek_v3.ucpl:hf()", "megatron"),
}  # fmt: skip


@pytest.mark.parametrize("size", ["one", "five", "square"])
@pytest.mark.parametrize("family", SIZED)
def test_sizes_that_no_author_had_in_mind(family: str, size: str, tmp_path: Path) -> None:
    """One layer, five, square; odd heads and words: all tensors return."""
    here, there = SIZED[family]
    case = FAMILIES[family][size]
    config = {k: v for k, v in case.config.items() if k not in NOT_TAKEN}
    if family in BIASES and "attention_bias" in config:
        config["attention_bias"] = BIASES[family]
    made(evolve(case, config=config), tmp_path / "hf")
    spec = here.partition(":")[0]
    keys = ("num_key_value_heads", "n_head", "vocab_size", "moe_intermediate_size", "intermediate_size")
    tp = next(n for n in (3, 2, 1) if not any(int(config[key]) % n for key in keys if key in config))
    ranks = f"{spec}:{there}(tp={tp}, divisible=1)"
    ucpl.convert(tmp_path / "hf", tmp_path / "ranks", ranks, layout=here)
    answer = json.loads((tmp_path / "hf" / "config.json").read_text())
    ucpl.convert(tmp_path / "ranks", tmp_path / "back", here, layout=ranks, config=answer)
    back, stored = weights(tmp_path / "back"), weights(tmp_path / "hf")
    assert back.keys() == stored.keys() and all(torch.equal(back[n], stored[n]) for n in stored)
