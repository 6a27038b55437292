"""Make the tiny checkpoints of this folder with their own libraries' classes.

The libraries are transformers, diffusers and peft.

    python make_checkpoints.py [NAME...] [--out FOLDER]

Sizes are odd and differ from each other, so that a spec that takes one for another does not fit. Every tensor is filled with
numbers of its own.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).resolve().parent


def gpt_neox() -> Any:
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    return GPTNeoXForCausalLM(
        GPTNeoXConfig(
            vocab_size=67,
            hidden_size=24,
            num_hidden_layers=4,
            num_attention_heads=6,
            intermediate_size=42,
            max_position_embeddings=32,
        )
    )


def t5() -> Any:
    from transformers import T5Config, T5ForConditionalGeneration

    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=67, d_model=20, d_kv=4, d_ff=36, num_layers=4, num_decoder_layers=2, num_heads=6,
            relative_attention_num_buckets=10, feed_forward_proj="gated-gelu",
        )
    )  # fmt: skip


def whisper() -> Any:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    return WhisperForConditionalGeneration(
        WhisperConfig(
            vocab_size=67, num_mel_bins=7, encoder_layers=2, encoder_attention_heads=6, encoder_ffn_dim=30, decoder_layers=4,
            decoder_attention_heads=6, decoder_ffn_dim=42, d_model=24, max_source_positions=11, max_target_positions=9,
            pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1, suppress_tokens=None,
            begin_suppress_tokens=None,
        )
    )  # fmt: skip


def gemma3() -> Any:
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    return Gemma3ForCausalLM(
        Gemma3TextConfig(
            vocab_size=67, hidden_size=24, intermediate_size=42, num_hidden_layers=4, num_attention_heads=12,
            num_key_value_heads=6, head_dim=8,
            layer_types=["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"],
        )
    )  # fmt: skip


def gemma3n() -> Any:
    from transformers import Gemma3nForCausalLM, Gemma3nTextConfig

    return Gemma3nForCausalLM(
        Gemma3nTextConfig(
            vocab_size=67, vocab_size_per_layer_input=61, hidden_size=24, hidden_size_per_layer_input=5,
            intermediate_size=[12, 18, 36, 30], num_hidden_layers=4, num_attention_heads=12, num_key_value_heads=6, head_dim=8,
            laurel_rank=7, num_kv_shared_layers=0, altup_num_inputs=3, activation_sparsity_pattern=[0.0] * 4,
            layer_types=["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"],
        )
    )  # fmt: skip


def mamba2() -> Any:
    from transformers import Mamba2Config, Mamba2ForCausalLM

    return Mamba2ForCausalLM(
        Mamba2Config(
            vocab_size=67, hidden_size=18, num_hidden_layers=4, num_heads=12, head_dim=3, expand=2, state_size=5, n_groups=6,
            conv_kernel=4, chunk_size=4,
        )
    )  # fmt: skip


def hybrid() -> Any:
    from transformers import BambaConfig, BambaForCausalLM

    return BambaForCausalLM(
        BambaConfig(
            vocab_size=67, hidden_size=24, intermediate_size=42, num_hidden_layers=4, num_attention_heads=12,
            num_key_value_heads=6, attn_layer_indices=[1, 2], mamba_n_heads=12, mamba_d_head=4, mamba_n_groups=6,
            mamba_d_state=5, mamba_d_conv=3,
            mamba_expand=2, mamba_chunk_size=4,
        )
    )  # fmt: skip


def llama4() -> Any:
    from transformers import Llama4ForCausalLM, Llama4TextConfig

    return Llama4ForCausalLM(
        Llama4TextConfig(
            vocab_size=67, hidden_size=20, intermediate_size=30, intermediate_size_mlp=42, num_hidden_layers=4,
            num_attention_heads=12, num_key_value_heads=6, head_dim=6, num_local_experts=8, num_experts_per_tok=1,
            interleave_moe_layer_step=2,
        )
    )  # fmt: skip


def qwen3_next() -> Any:
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    return Qwen3NextForCausalLM(
        Qwen3NextConfig(
            vocab_size=67, hidden_size=20, intermediate_size=36, num_hidden_layers=4, num_attention_heads=12,
            num_key_value_heads=6, head_dim=6, linear_conv_kernel_dim=3, linear_key_head_dim=5, linear_value_head_dim=7,
            linear_num_key_heads=6,
            linear_num_value_heads=12, decoder_sparse_step=1, moe_intermediate_size=12, shared_expert_intermediate_size=18,
            num_experts_per_tok=2, num_experts=8,
        )
    )  # fmt: skip


def deepseek_v3() -> Any:
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    return DeepseekV3ForCausalLM(
        DeepseekV3Config(
            vocab_size=67, hidden_size=20, intermediate_size=48, moe_intermediate_size=24, num_hidden_layers=4,
            num_attention_heads=6, num_key_value_heads=6, n_routed_experts=8, n_shared_experts=1, n_group=2, topk_group=1,
            num_experts_per_tok=2, first_k_dense_replace=1, q_lora_rank=10, kv_lora_rank=9, qk_rope_head_dim=4,
            qk_nope_head_dim=8, v_head_dim=12,
        )
    )  # fmt: skip


def gpt_oss() -> Any:
    from transformers import GptOssConfig, GptOssForCausalLM

    return GptOssForCausalLM(
        GptOssConfig(
            vocab_size=67, hidden_size=64, intermediate_size=192, num_hidden_layers=4, num_attention_heads=12,
            num_key_value_heads=6, head_dim=4, num_local_experts=4, num_experts_per_tok=2, max_position_embeddings=32,
            rope_parameters={"rope_type": "default", "rope_theta": 150000.0},
        )
    )  # fmt: skip


def lora() -> Any:
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    base = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=67, hidden_size=24, intermediate_size=42, num_hidden_layers=4, num_attention_heads=12,
            num_key_value_heads=6, head_dim=8,
        )
    )  # fmt: skip
    return get_peft_model(base, LoraConfig(r=5, target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "down_proj"]))


def dit() -> Any:
    from diffusers import DiTTransformer2DModel

    return DiTTransformer2DModel(
        num_attention_heads=6, attention_head_dim=4, in_channels=3, out_channels=6, num_layers=4, sample_size=4, patch_size=2,
        num_embeds_ada_norm=7, norm_num_groups=3,
    )  # fmt: skip


def unet() -> Any:
    from diffusers import UNet2DConditionModel

    return UNet2DConditionModel(
        sample_size=8, in_channels=3, out_channels=5, layers_per_block=1, block_out_channels=(6, 12),
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=10, attention_head_dim=6, norm_num_groups=3,
    )  # fmt: skip


MAKERS: dict[str, Callable[[], Any]] = {
    f.__name__: f
    for f in (
        gpt_neox,
        t5,
        whisper,
        gemma3,
        gemma3n,
        mamba2,
        hybrid,
        llama4,
        qwen3_next,
        deepseek_v3,
        gpt_oss,
        lora,
        dit,
        unet,
    )
}


LARGEST = 0.5  # of the weights: with large ones the logits are NaN or 0, and witness nothing


def fill(model: torch.nn.Module) -> None:
    """Give every element a small number of its own, in random order.

    The numbers are so small that the model's logits depend on them.
    """
    tensors = [t for t in {id(t): t for t in (*model.parameters(), *model.buffers())}.values() if t.is_floating_point()]
    count = sum(t.numel() for t in tensors)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(5)).double()
    values = ((2 * order + 1) / count - 1) * LARGEST
    for tensor, own in zip(tensors, values.split([t.numel() for t in tensors]), strict=True):
        with torch.no_grad():
            tensor.copy_(own.reshape(tensor.shape))


BLOCK = 4  # elements along each side of a block that has one scale; published checkpoints have 128


def in_blocks(folder: Path) -> None:
    """DeepSeek's form: fp8 matrices with block scales, and one more layer.

    The layer is behind the last.
    """
    from safetensors.torch import load_file, save_file

    path = folder / "model.safetensors"
    state = load_file(path)
    last = max(int(name.split(".")[2]) for name in state if name.startswith("model.layers."))
    width = state["model.norm.weight"].shape[0]
    for name in [n for n in state if n.startswith(f"model.layers.{last}.")]:
        state[name.replace(f".{last}.", f".{last + 1}.", 1)] = state[name] + 0.5
    extra = f"model.layers.{last + 1}."
    for n, name in enumerate(("enorm", "hnorm", "shared_head.norm")):
        state[f"{extra}{name}.weight"] = torch.arange(width) + 0.25 * n
    state[extra + "eh_proj.weight"] = torch.arange(2.0 * width * width).reshape(width, 2 * width) - 0.5
    state[extra + "embed_tokens.weight"] = state["model.embed_tokens.weight"].clone()
    state[extra + "shared_head.head.weight"] = state["lm_head.weight"].clone()
    numbers = torch.Generator().manual_seed(1)
    for name in [n for n in state if "_proj" in n and "eh_proj" not in n]:
        shape = state[name].shape
        codes = torch.randint(0, 120, shape, generator=numbers) | torch.randint(0, 2, shape, generator=numbers) << 7
        state[name] = codes.to(torch.uint8).view(torch.float8_e4m3fn)
        blocks = [-(-n // BLOCK) for n in shape]
        state[name + "_scale_inv"] = torch.rand(blocks, generator=numbers) + 0.5
    save_file(state, path, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["num_nextn_predict_layers"] = 1
    config["quantization_config"] = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [BLOCK, BLOCK]}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def in_halves(folder: Path) -> None:
    """OpenAI's form: experts in mxfp4, outputs first.

    32 elements of a row are 16 bytes and one exponent.

    transformers quantises with kernels for GPUs alone; that it reads these files as they are meant is held by a test.
    """
    from safetensors.torch import load_file, save_file

    path = folder / "model.safetensors"
    state = load_file(path)
    numbers = torch.Generator().manual_seed(1)
    for name in [n for n in state if n.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, inputs, outputs = state.pop(name).shape
        blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), generator=numbers)
        state[name + "_blocks"] = blocks.to(torch.uint8)
        state[name + "_scales"] = torch.randint(110, 130, blocks.shape[:-1], generator=numbers).to(torch.uint8)
    save_file(state, path, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": kept}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    asked.add_argument("names", nargs="*", choices=[[], *MAKERS], metavar="NAME")
    asked.add_argument("--out", type=Path, default=HERE / "checkpoints")
    given = asked.parse_args()
    for name in given.names or MAKERS:
        model = MAKERS[name]()
        fill(model)
        model.save_pretrained(given.out / name)
        if name == "deepseek_v3":
            in_blocks(given.out / name)
        if name == "gpt_oss":
            in_halves(given.out / name)


if __name__ == "__main__":
    main()
