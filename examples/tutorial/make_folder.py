"""A tiny GLM-4 as a Hugging Face folder, for docs/TUTORIAL.md."""

import json
import os

import torch
from safetensors.torch import save_file

config = {
    "architectures": ["Glm4ForCausalLM"],
    "model_type": "glm4",
    "torch_dtype": "float32",
    "num_hidden_layers": 4,
    "hidden_size": 24,
    "intermediate_size": 20,
    "vocab_size": 51,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 6,
    "attention_bias": True,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "eos_token_id": 0,
    "max_position_embeddings": 64,
}
torch.manual_seed(0)
tensors = {}


def add(name, *shape):
    tensors[name] = torch.randn(shape) if len(shape) == 2 else 1 + torch.rand(shape)


add("model.embed_tokens.weight", 51, 24)
for layer in (f"model.layers.{n}" for n in range(4)):
    for norm in ("input", "post_attention", "post_self_attn", "post_mlp"):
        add(f"{layer}.{norm}_layernorm.weight", 24)
    for name, rows in (("q", 48), ("k", 24), ("v", 24)):
        add(f"{layer}.self_attn.{name}_proj.weight", rows, 24)
        add(f"{layer}.self_attn.{name}_proj.bias", rows)
    add(f"{layer}.self_attn.o_proj.weight", 24, 48)
    add(f"{layer}.mlp.gate_up_proj.weight", 40, 24)
    add(f"{layer}.mlp.down_proj.weight", 24, 20)
add("model.norm.weight", 24)
add("lm_head.weight", 51, 24)
os.makedirs("folder")
save_file(tensors, "folder/model.safetensors", {"format": "pt"})
with open("folder/config.json", "w") as file:
    json.dump(config, file)
