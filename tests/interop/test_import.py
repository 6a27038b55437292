"""import hf: a spec from a config has the class's tensors.

Tensors go to shards and back bit for bit. Sizes of a model differ, and are odd where the class allows it, so that a
coincidence shows.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from attrs import evolve
from safetensors.torch import load_file, save_file

import ucpl
from ucpl import api
from ucpl.cli import main
from ucpl.errors import UcplError
from ucpl.inference.hf import import_hf
from ucpl.language import nodes, parse
from ucpl.language.printer import print_item

pytestmark = pytest.mark.interop

LLAMA: dict[str, Any] = {
    "vocab_size": 67, "hidden_size": 42, "intermediate_size": 22, "num_hidden_layers": 4, "num_attention_heads": 6,
    "num_key_value_heads": 2, "head_dim": 10, "max_position_embeddings": 40, "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": 0,
}  # fmt: skip
MOE = {**LLAMA, "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 14}
DEEPSEEK = {
    **LLAMA, "num_key_value_heads": 6, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1,
    "moe_intermediate_size": 14, "first_k_dense_replace": 2, "n_shared_experts": 1, "q_lora_rank": 26, "kv_lora_rank": 18,
    "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 16, "num_nextn_predict_layers": 1,
}  # fmt: skip
DEEPSEEK.pop("head_dim")
MAMBA2 = {
    "vocab_size": 67, "hidden_size": 30, "num_heads": 6, "head_dim": 10, "expand": 2, "state_size": 14, "n_groups": 2,
    "num_hidden_layers": 3, "conv_kernel": 4, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
JAMBA = {
    **LLAMA, "num_hidden_layers": 5, "attn_layer_period": 3, "attn_layer_offset": 1,
    "num_experts": 4, "expert_layer_period": 2, "expert_layer_offset": 1, "mamba_d_state": 13, "mamba_d_conv": 4,
    "mamba_dt_rank": 9, "use_mamba_kernels": False,
}  # fmt: skip
JAMBA.pop("head_dim")
QWEN3_NEXT = {
    **MOE, "num_hidden_layers": 6, "full_attention_interval": 3, "linear_num_key_heads": 2, "linear_num_value_heads": 6,
    "linear_key_head_dim": 8, "linear_value_head_dim": 9, "linear_conv_kernel_dim": 4, "shared_expert_intermediate_size": 18,
    "partial_rotary_factor": 0.4,
}  # fmt: skip
LLAMA4 = {
    **LLAMA, "intermediate_size_mlp": 26, "num_local_experts": 3, "num_experts_per_tok": 1, "interleave_moe_layer_step": 2,
    "no_rope_layer_interval": 2, "attention_chunk_size": 8,
}  # fmt: skip
NEOX = {**LLAMA, "hidden_size": 42, "num_attention_heads": 6}
T5 = {
    "vocab_size": 67, "d_model": 34, "d_kv": 10, "d_ff": 22, "num_layers": 3, "num_decoder_layers": 2, "num_heads": 6,
    "relative_attention_num_buckets": 8, "relative_attention_max_distance": 16, "decoder_start_token_id": 0, "pad_token_id": 0,
    "eos_token_id": 1,
}  # fmt: skip
WHISPER = {
    "vocab_size": 67, "d_model": 36, "encoder_layers": 3, "decoder_layers": 2, "encoder_attention_heads": 6,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 22, "decoder_ffn_dim": 26, "num_mel_bins": 10, "max_source_positions": 15,
    "max_target_positions": 17, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 3,
    "suppress_tokens": None, "begin_suppress_tokens": None,
}  # fmt: skip
TOWER = {
    "hidden_size": 24, "intermediate_size": 26, "num_hidden_layers": 3, "num_attention_heads": 4, "image_size": 28,
    "patch_size": 14,
}  # fmt: skip
BART = {
    "vocab_size": 67, "d_model": 60, "encoder_layers": 3, "decoder_layers": 2, "encoder_attention_heads": 6,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 22, "decoder_ffn_dim": 26, "max_position_embeddings": 40,
}  # fmt: skip
BAMBA = {
    **LLAMA, "hidden_size": 30, "head_dim": 6, "num_attention_heads": 6, "num_hidden_layers": 4, "attn_layer_indices": [1, 2],
    "mamba_n_heads": 6, "mamba_d_head": 10, "mamba_n_groups": 2, "mamba_d_state": 14, "mamba_expand": 2, "mamba_d_conv": 4,
}  # fmt: skip

# name: (class, config, some expected lines: path and dims)
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, str]]] = {
    "llama": ("LlamaForCausalLM", LLAMA, {
        "self_attn.q_proj.weight": "l n d hidden_size",
        "self_attn.v_proj.weight": "l g d hidden_size",
    }),
    "llama tied": ("LlamaForCausalLM", {**LLAMA, "tie_word_embeddings": True}, {
        "model.embed_tokens.weight": "vocab_size hidden_size",
    }),
    "qwen2": ("Qwen2ForCausalLM", {k: v for k, v in {**LLAMA, "hidden_size": 60}.items() if k != "head_dim"}, {
        "self_attn.q_proj.bias": "l n d",
    }),
    "qwen3": ("Qwen3ForCausalLM", LLAMA, {"self_attn.q_norm.weight": "l d"}),
    "qwen3 moe": ("Qwen3MoeForCausalLM", MOE, {
        "mlp.experts.up_proj.weight": "l e moe_intermediate_size hidden_size",
        "mlp.gate.weight": "l e hidden_size",
    }),
    "mixtral": ("MixtralForCausalLM", {**LLAMA, "num_local_experts": 5, "num_experts_per_tok": 2}, {
        "block_sparse_moe.experts.w1.weight": "l e intermediate_size hidden_size",
    }),
    "deepseek v3": ("DeepseekV3ForCausalLM", DEEPSEEK, {
        "self_attn.kv_b_proj.k": "l n qk_nope_head_dim kv_lora_rank",
        "self_attn.o_proj.weight": "l hidden_size n v_head_dim",
        "eh_proj.embed": "l[config.num_hidden_layers..] hidden_size hidden_size2",
        "mlp.experts.up_proj.weight": "l[config.first_k_dense_replace..] e moe_intermediate_size hidden_size",
    }),
    "gemma3": ("Gemma3ForCausalLM", LLAMA, {"self_attn.q_proj.weight": "l n d hidden_size"}),
    "gpt neox": ("GPTNeoXForCausalLM", NEOX, {
        "attention.query_key_value.q": "l n d hidden_size",
        "attention.query_key_value.q_bias": "l n d",
    }),
    "t5": ("T5ForConditionalGeneration", T5, {"encoder.block.layer.SelfAttention.q.weight": "l n d d_model"}),
    "whisper": ("WhisperForConditionalGeneration", WHISPER, {
        "model.encoder.layers.self_attn.q_proj.weight": "l encoder_n encoder_d d_model",
    }),
    "mamba2": ("Mamba2ForCausalLM", MAMBA2, {
        "mixer.in_proj.x": "l n d hidden_size",
        "mixer.in_proj.b": "l n_groups state_size hidden_size",
    }),
    "jamba": ("JambaForCausalLM", JAMBA, {
        "self_attn.k_proj.weight":
            "l[config.attn_layer_offset.. by config.attn_layer_period] g d hidden_size",
        "mamba.in_proj.x":
            "l[not config.attn_layer_offset.. by config.attn_layer_period] inner hidden_size",
    }),
    "bamba": ("BambaForCausalLM", BAMBA, {
        "self_attn.q_proj.weight": "l[attn_layer_indices] n d hidden_size",
        "mamba.D": "l[not attn_layer_indices] mamba_n_heads",
    }),
    "llama4": ("Llama4ForCausalLM", LLAMA4, {
        "feed_forward.experts.gate": "l[moe_layers] e hidden_size intermediate_size",
    }),
    "qwen3 next": ("Qwen3NextForCausalLM", QWEN3_NEXT, {
        "self_attn.q_proj.gate": "l[full_attention] n d hidden_size",
        "linear_attn.in_proj_qkvz.z": "l[linear_attention] linear_g linear_r linear_value_head_dim hidden_size",
    }),
    "falcon": (
        "FalconForCausalLM",
        {"vocab_size": 67, "hidden_size": 60, "num_hidden_layers": 3, "num_attention_heads": 6, "ffn_hidden_size": 22},
        {"self_attention.query_key_value.k": "l d hidden_size"},
    ),
    "gemma3 with a tower": (
        "Gemma3ForConditionalGeneration", {"text_config": LLAMA, "vision_config": TOWER, "mm_tokens_per_image": 4},
        {"language_model.model.layers.self_attn.q_proj.weight": "l n d hidden_size"},
    ),
    "gpt oss": ("GptOssForCausalLM", {**LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2}, {
        "mlp.experts.gate": "l e hidden_size intermediate_size one",
    }),
    "olmo2": ("Olmo2ForCausalLM", {k: v for k, v in LLAMA.items() if k != "head_dim"}, {
        "self_attn.q_norm.weight": "l n d",
    }),
    "bart": ("BartForConditionalGeneration", BART, {}),
    "phi3": ("Phi3ForCausalLM", {**LLAMA, "hidden_size": 60}, {"self_attn.qkv_proj.k": "l g d hidden_size"}),
    "gpt2": ("GPT2LMHeadModel", {"vocab_size": 61, "n_embd": 18, "n_layer": 4, "n_head": 6, "n_positions": 40}, {
        "attn.c_attn.q": "l n_embd n d", "mlp.c_fc.bias": "l f",
    }),
}  # fmt: skip


def made(name: str, folder: Path) -> None:
    kind, sizes, _ = MODELS[name]
    torch.manual_seed(len(name))
    config = getattr(transformers, kind).config_class(**sizes)
    model = getattr(transformers, kind)(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) / 8)
    model.save_pretrained(folder)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {name: t for file in folder.glob("*.safetensors") for name, t in load_file(file).items()}


@pytest.mark.parametrize("name", MODELS)
def test_a_config_alone_describes_what_the_class_saves(name: str, tmp_path: Path) -> None:
    made(name, tmp_path / "hf")
    spec = tmp_path / "made.ucpl"
    spec.write_text(import_hf(tmp_path / "hf" / "config.json"))
    text = spec.read_text()
    (model,) = [s for s in parse(text).statements if isinstance(s, nodes.Model)]
    tensors = [evolve(i, dtype=None, kind="parameter") for i in model.items if isinstance(i, nodes.Tensor)]
    said = {tensor.path: print_item(tensor) for tensor in tensors}
    for path, dims in MODELS[name][2].items():
        assert said.get(path) == f"{path} : {dims}", text
    config = str(tmp_path / "hf" / "config.json")
    assert main(["check", str(spec), "--config", config]) == 0
    here, there = f"{spec}:hf()", f"{spec}:tensor_parallel(tp=2)"
    checkpoint = api.open_checkpoint(tmp_path / "hf")
    api.source_side(checkpoint, here)  # fits, tensor for tensor
    ucpl.convert(tmp_path / "hf", tmp_path / "tp", there, layout=here)
    ucpl.convert(tmp_path / "tp", tmp_path / "back", here, layout=there)
    ours, theirs = weights(tmp_path / "back"), weights(tmp_path / "hf")
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[n], theirs[n]) for n in theirs)
    first = load_file(tmp_path / "tp" / "tp_00.safetensors")
    assert sum(t.numel() for t in first.values()) < 0.7 * sum(t.numel() for t in theirs.values()), "most of it is cut"


LARGE: dict[str, dict[str, Any]] = {  # as the cards of these models have them
    "LlamaForCausalLM": {
        "model_type": "llama", "hidden_size": 16384, "intermediate_size": 53248, "num_attention_heads": 128,
        "num_hidden_layers": 126, "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 131072,
        "rope_theta": 500000.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
        "rope_scaling": {
            "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
    },
    "DeepseekV3ForCausalLM": {
        "model_type": "deepseek_v3", "first_k_dense_replace": 3, "hidden_size": 7168, "intermediate_size": 18432,
        "kv_lora_rank": 512, "max_position_embeddings": 163840, "moe_intermediate_size": 2048, "n_group": 8,
        "n_routed_experts": 256, "n_shared_experts": 1, "num_attention_heads": 128, "num_experts_per_tok": 8,
        "num_hidden_layers": 61, "num_key_value_heads": 128, "num_nextn_predict_layers": 1, "q_lora_rank": 1536,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "topk_group": 4, "v_head_dim": 128, "vocab_size": 129280,
        "tie_word_embeddings": False, "torch_dtype": "bfloat16",
        "quantization_config": {
            "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128],
        },
    },
}  # fmt: skip


@pytest.mark.parametrize("kind", LARGE)
def test_large_models_are_built_without_weights(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Real sizes, many of them equal by chance (128 heads of 128)."""
    drawn: list[str] = []
    for name in ("normal_", "uniform_"):  # initialised weights would take a minute
        monkeypatch.setattr(torch.Tensor, name, lambda *_, of=name, **__: drawn.append(of))
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"architectures": [kind], **LARGE[kind]}))
    text = import_hf(config)
    assert not drawn
    assert not re.search(r"^ +dim \w+ = \d+$", text, re.MULTILINE), "every size is a key's"
    assert "dim d = config.hidden_size / config.num_attention_heads" in text or kind != "LlamaForCausalLM"
    (tmp_path / "made.ucpl").write_text(text)
    assert main(["check", str(tmp_path / "made.ucpl"), "--config", str(config)]) == 0


def test_layers_that_the_class_drops_are_described_where_files_have_them(tmp_path: Path) -> None:
    """DeepSeek-V3's multi-token prediction: a layer, a projection, and copies."""
    made("deepseek v3", tmp_path / "hf")
    said = import_hf(tmp_path / "hf" / "config.json")
    assert "let mtp = 0" in said and "described with -D mtp=1" in said
    name = "model.layers.3."
    stored = weights(tmp_path / "hf")
    stored |= {t.replace(name, "model.layers.4."): v + 1 for t, v in stored.items() if t.startswith(name)}
    width, vocab = DEEPSEEK["hidden_size"], DEEPSEEK["vocab_size"]
    shapes = {"enorm": (width,), "hnorm": (width,), "eh_proj": (width, 2 * width), "shared_head.norm": (width,)}
    shapes |= {"embed_tokens": (vocab, width), "shared_head.head": (vocab, width)}
    stored |= {f"model.layers.4.{part}.weight": torch.randn(shape) for part, shape in shapes.items()}
    save_file(stored, tmp_path / "hf" / "model.safetensors", {"format": "pt"})
    spec = tmp_path / "made.ucpl"
    spec.write_text(import_hf(tmp_path / "hf"))
    assert (
        spec.read_text().splitlines()[4:]
        == said.replace("mtp = 0", "mtp = config.num_nextn_predict_layers").splitlines()[4:]
    )
    here, there = f"{spec}:hf()", f"{spec}:tensor_parallel(tp=2)"
    ucpl.convert(tmp_path / "hf", tmp_path / "tp", there, layout=here)
    ucpl.convert(tmp_path / "tp", tmp_path / "back", here, layout=there)
    back = weights(tmp_path / "back")
    assert back.keys() == stored.keys() and all(torch.equal(back[n], stored[n]) for n in stored)


@pytest.mark.parametrize("name", ["llama tied", "mixtral", "deepseek v3", "jamba", "t5"])
def test_a_folder_and_its_config_say_the_same(name: str, tmp_path: Path) -> None:
    made(name, tmp_path / "hf")
    alone, folder = import_hf(tmp_path / "hf" / "config.json"), import_hf(tmp_path / "hf")
    assert sorted(set(alone.splitlines()[3:])) == sorted(set(folder.splitlines()[3:]))


def test_nothing_that_a_config_names_is_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A backbone by its repository's name, which the class would download."""
    asked: list[object] = []
    monkeypatch.setattr("socket.getaddrinfo", lambda *where, **_: asked.append(where))
    config = {"model_type": "detr", "architectures": ["DetrModel"], "encoder_layers": 1, "decoder_layers": 1}
    config |= {"backbone": "microsoft/resnet-50", "use_timm_backbone": False, "use_pretrained_backbone": True}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UcplError, match=r"E396.*offline"):
        import_hf(tmp_path)
    assert asked == []
