"""An imported text describes other configs of its class.

Every rank is torch's own split. Tensors hold their element numbers; sizes are odd.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

import ucpl
from ucpl.inference.hf import import_hf

pytestmark = pytest.mark.interop

# name: (class, config, changes of a second config)
PAIRS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "glm4_moe": ("Glm4MoeForCausalLM",
     {"vocab_size": 67,
      "hidden_size": 36,
      "intermediate_size": 22,
      "num_hidden_layers": 4,
      "num_attention_heads": 12,
      "num_key_value_heads": 6,
      "head_dim": 10,
      "max_position_embeddings": 40,
      "bos_token_id": 1,
      "eos_token_id": 2,
      "pad_token_id": 0,
      "moe_intermediate_size": 14,
      "n_routed_experts": 4,
      "n_shared_experts": 2,
      "num_experts_per_tok": 2,
      "first_k_dense_replace": 1,
      "n_group": 1,
      "topk_group": 1,
      "attention_bias": True,
      "use_qk_norm": True},
     {"vocab_size": 71,
      "hidden_size": 40,
      "intermediate_size": 26,
      "num_hidden_layers": 3,
      "num_attention_heads": 8,
      "num_key_value_heads": 4,
      "head_dim": 6,
      "max_position_embeddings": 44,
      "moe_intermediate_size": 10,
      "n_routed_experts": 6,
      "n_shared_experts": 1,
      "first_k_dense_replace": 2}),
    "jamba": ("JambaForCausalLM",
     {"vocab_size": 67,
      "hidden_size": 36,
      "intermediate_size": 22,
      "num_hidden_layers": 8,
      "num_attention_heads": 12,
      "num_key_value_heads": 6,
      "max_position_embeddings": 40,
      "bos_token_id": 1,
      "eos_token_id": 2,
      "pad_token_id": 0,
      "attn_layer_period": 4,
      "attn_layer_offset": 2,
      "num_experts": 4,
      "num_experts_per_tok": 2,
      "expert_layer_period": 2,
      "expert_layer_offset": 1,
      "mamba_d_state": 13,
      "mamba_d_conv": 4,
      "mamba_dt_rank": 9,
      "use_mamba_kernels": False},
     {"vocab_size": 71,
      "hidden_size": 40,
      "intermediate_size": 26,
      "num_hidden_layers": 6,
      "num_attention_heads": 8,
      "num_key_value_heads": 4,
      "max_position_embeddings": 44,
      "attn_layer_period": 3,
      "attn_layer_offset": 1,
      "num_experts": 3,
      "expert_layer_offset": 0,
      "mamba_d_state": 7,
      "mamba_d_conv": 3,
      "mamba_dt_rank": 3}),
    "longcat": ("LongcatFlashForCausalLM",
     {"vocab_size": 67,
      "hidden_size": 36,
      "num_layers": 3,
      "num_hidden_layers": 6,
      "num_attention_heads": 6,
      "ffn_hidden_size": 22,
      "expert_ffn_hidden_size": 14,
      "q_lora_rank": 10,
      "kv_lora_rank": 7,
      "qk_nope_head_dim": 6,
      "qk_rope_head_dim": 4,
      "head_dim": 4,
      "v_head_dim": 5,
      "n_routed_experts": 6,
      "zero_expert_num": 2,
      "moe_topk": 2,
      "pad_token_id": 0},
     {"vocab_size": 61,
      "hidden_size": 32,
      "num_layers": 2,
      "num_hidden_layers": 4,
      "num_attention_heads": 8,
      "ffn_hidden_size": 28,
      "expert_ffn_hidden_size": 12,
      "q_lora_rank": 6,
      "kv_lora_rank": 5,
      "qk_nope_head_dim": 4,
      "qk_rope_head_dim": 2,
      "head_dim": 2,
      "v_head_dim": 3,
      "n_routed_experts": 5,
      "zero_expert_num": 3}),
    "qwen2_5_vl": ("Qwen2_5_VLForConditionalGeneration",
     {"vision_config": {"depth": 3,
                        "hidden_size": 24,
                        "intermediate_size": 26,
                        "num_heads": 6,
                        "in_channels": 3,
                        "patch_size": 2,
                        "temporal_patch_size": 2,
                        "spatial_merge_size": 2,
                        "out_hidden_size": 60,
                        "fullatt_block_indexes": [1],
                        "window_size": 8},
      "text_config": {"vocab_size": 67,
                      "hidden_size": 60,
                      "intermediate_size": 22,
                      "num_hidden_layers": 4,
                      "num_attention_heads": 12,
                      "num_key_value_heads": 6,
                      "max_position_embeddings": 40,
                      "bos_token_id": 1,
                      "eos_token_id": 2,
                      "pad_token_id": 0,
                      "rope_scaling": {"type": "mrope", "rope_type": "default", "mrope_section": [1, 2, 2]}},
      "tie_word_embeddings": False},
     {"vision_config": {"depth": 2,
                        "hidden_size": 32,
                        "intermediate_size": 28,
                        "num_heads": 4,
                        "in_channels": 3,
                        "patch_size": 4,
                        "temporal_patch_size": 2,
                        "spatial_merge_size": 2,
                        "out_hidden_size": 80,
                        "fullatt_block_indexes": [0],
                        "window_size": 16},
      "text_config": {"vocab_size": 71,
                      "hidden_size": 80,
                      "intermediate_size": 26,
                      "num_hidden_layers": 3,
                      "num_attention_heads": 8,
                      "num_key_value_heads": 4,
                      "max_position_embeddings": 44,
                      "bos_token_id": 1,
                      "eos_token_id": 2,
                      "pad_token_id": 0,
                      "rope_scaling": {"type": "mrope", "rope_type": "default", "mrope_section": [1, 2, 2]}}}),
    "clip": ("CLIPModel",
     {"text_config": {"vocab_size": 67,
                      "hidden_size": 30,
                      "intermediate_size": 22,
                      "num_hidden_layers": 3,
                      "num_attention_heads": 6,
                      "max_position_embeddings": 20,
                      "projection_dim": 18,
                      "bos_token_id": 1,
                      "eos_token_id": 2,
                      "pad_token_id": 0},
      "vision_config": {"hidden_size": 24,
                        "intermediate_size": 26,
                        "num_hidden_layers": 3,
                        "num_attention_heads": 6,
                        "image_size": 28,
                        "patch_size": 14,
                        "projection_dim": 18},
      "projection_dim": 18},
     {"text_config": {"vocab_size": 71,
                      "hidden_size": 40,
                      "intermediate_size": 26,
                      "num_hidden_layers": 2,
                      "num_attention_heads": 4,
                      "max_position_embeddings": 24,
                      "projection_dim": 14,
                      "bos_token_id": 1,
                      "eos_token_id": 2,
                      "pad_token_id": 0},
      "vision_config": {"hidden_size": 32,
                        "intermediate_size": 34,
                        "num_hidden_layers": 2,
                        "num_attention_heads": 4,
                        "image_size": 24,
                        "patch_size": 8,
                        "projection_dim": 14},
      "projection_dim": 14}),
    "granitehybrid": ("GraniteMoeHybridForCausalLM",
     {"vocab_size": 67,
      "hidden_size": 30,
      "intermediate_size": 14,
      "num_hidden_layers": 3,
      "num_attention_heads": 6,
      "num_key_value_heads": 6,
      "num_local_experts": 4,
      "num_experts_per_tok": 2,
      "shared_intermediate_size": 18,
      "layer_types": ["mamba", "attention", "mamba"],
      "mamba_n_heads": 6,
      "mamba_d_head": 10,
      "mamba_n_groups": 6,
      "mamba_d_state": 9,
      "mamba_d_conv": 4,
      "mamba_expand": 2,
      "tie_word_embeddings": True,
      "pad_token_id": 0},
     {"vocab_size": 61,
      "hidden_size": 32,
      "intermediate_size": 12,
      "num_hidden_layers": 4,
      "num_attention_heads": 8,
      "num_key_value_heads": 2,
      "num_local_experts": 3,
      "shared_intermediate_size": 20,
      "layer_types": ["attention", "mamba", "mamba", "attention"],
      "mamba_n_heads": 4,
      "mamba_d_head": 16,
      "mamba_n_groups": 2,
      "mamba_d_state": 7}),
    "hubert": ("HubertModel",
     {"vocab_size": 32,
      "hidden_size": 24,
      "num_hidden_layers": 3,
      "num_attention_heads": 6,
      "intermediate_size": 30,
      "conv_dim": [5, 7, 9, 7],
      "conv_kernel": [8, 3, 3, 2],
      "conv_stride": [5, 2, 2, 2],
      "num_feat_extract_layers": 4,
      "num_conv_pos_embeddings": 8,
      "num_conv_pos_embedding_groups": 4},
     {"hidden_size": 32,
      "num_attention_heads": 8,
      "intermediate_size": 28,
      "conv_dim": [6, 8, 10, 12],
      "conv_kernel": [10, 3, 2, 4],
      "num_conv_pos_embeddings": 6,
      "num_conv_pos_embedding_groups": 2}),
    "modernbert": ("ModernBertForMaskedLM",
     {"vocab_size": 67,
      "hidden_size": 36,
      "intermediate_size": 22,
      "num_hidden_layers": 3,
      "num_attention_heads": 6,
      "bos_token_id": 1,
      "eos_token_id": 2,
      "pad_token_id": 0,
      "cls_token_id": 1,
      "sep_token_id": 2},
     {"vocab_size": 71, "hidden_size": 32, "intermediate_size": 44, "num_hidden_layers": 4, "num_attention_heads": 8}),
    "qwen3_moe": ("Qwen3MoeForCausalLM",
     {"vocab_size": 67,
      "hidden_size": 36,
      "intermediate_size": 22,
      "num_hidden_layers": 4,
      "num_attention_heads": 12,
      "num_key_value_heads": 6,
      "head_dim": 10,
      "max_position_embeddings": 40,
      "bos_token_id": 1,
      "eos_token_id": 2,
      "pad_token_id": 0,
      "num_experts": 5,
      "num_experts_per_tok": 2,
      "moe_intermediate_size": 14,
      "decoder_sparse_step": 2},
     {"vocab_size": 71,
      "hidden_size": 40,
      "intermediate_size": 26,
      "num_hidden_layers": 3,
      "num_attention_heads": 8,
      "num_key_value_heads": 4,
      "head_dim": 6,
      "max_position_embeddings": 44,
      "num_experts": 3,
      "moe_intermediate_size": 10,
      "decoder_sparse_step": 3}),
}  # fmt: skip


def saved(kind: str, sizes: dict[str, Any], folder: Path) -> dict[str, torch.Tensor]:
    """The tensors of a class's folder; every element is its own number."""
    made = getattr(transformers, kind)
    model, first = made(made.config_class(**sizes)), 0
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.arange(first, first + parameter.numel()).view(parameter.shape))
            first += parameter.numel()
    model.save_pretrained(folder)
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize("name", PAIRS)
def test_a_text_describes_a_second_config_of_its_class(name: str, tmp_path: Path) -> None:
    kind, sizes, changes = PAIRS[name]
    first = saved(kind, sizes, tmp_path / "a")
    second = saved(kind, sizes | changes, tmp_path / "b")
    (tmp_path / "made.ucpl").write_text(import_hf(tmp_path / "a" / "config.json"))
    here = f"{tmp_path / 'made.ucpl'}:hf()"
    ucpl.convert(tmp_path / "b", tmp_path / "again", here, layout=here)
    again = load_file(tmp_path / "again" / "model.safetensors")
    assert again.keys() == second.keys() and all(torch.equal(again[n], second[n]) for n in second)
    for degrees in ("tp = 3", "tp = 2, pp = 2"):
        ranks = here.replace("hf()", f"tensor_parallel({degrees})")
        ucpl.convert(tmp_path / "a", tmp_path / degrees, ranks, layout=here)
        ucpl.convert(tmp_path / degrees, tmp_path / f"{degrees} back", here, layout=ranks)
        back = load_file(tmp_path / f"{degrees} back" / "model.safetensors")
        assert back.keys() == first.keys() and all(torch.equal(back[n], first[n]) for n in first)


FUSED = {  # class -> names of fused pairs and of the matrix behind them
    "granitehybrid": ("shared_mlp.input_linear.weight", "shared_mlp.output_linear.weight", 2),
    "modernbert": ("mlp.Wi.weight", "mlp.Wo.weight", 2),
    "qwen2_5_vl": ("attn.qkv.weight", "attn.proj.weight", 3),
}


@pytest.mark.parametrize("name", FUSED)
def test_fused_tensors_are_cut_as_torch_cuts_their_parts(name: str, tmp_path: Path) -> None:
    kind, sizes, _ = PAIRS[name]
    fused, behind, count = FUSED[name]
    first = saved(kind, sizes, tmp_path / "a")
    (tmp_path / "made.ucpl").write_text(import_hf(tmp_path / "a" / "config.json"))
    here = f"{tmp_path / 'made.ucpl'}:hf()"
    ucpl.convert(tmp_path / "a", tmp_path / "tp", here.replace("hf()", "tensor_parallel(tp = 2)"), layout=here)
    for rank in range(2):
        found = load_file(tmp_path / "tp" / f"tp_0{rank}.safetensors")
        seen = 0
        for key, tensor in first.items():
            if key.endswith(fused):
                parts = [part.chunk(2)[rank] for part in tensor.chunk(count)]
                assert torch.equal(found[key], torch.cat(parts)), key
            if key.endswith(behind):
                assert torch.equal(found[key], tensor.chunk(2, dim=1)[rank]), key
            seen += key.endswith((fused, behind))
        assert seen > 1
