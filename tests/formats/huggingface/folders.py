"""Hugging Face folders for tests, by the safetensors library and plain torch."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

HERE = Path(__file__).parent
WRITTEN = HERE / "written"  # by transformers 5.23 itself


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a folder, by the safetensors library.

    An index must name the file of each.
    """
    found: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        for name, tensor in load_file(path).items():
            assert name not in found, f"{name} is in two shards"
            found[name] = tensor
    index = folder / "model.safetensors.index.json"
    if index.exists():
        weight_map = json.loads(index.read_text())["weight_map"]
        assert set(weight_map) == set(found)
        for name, file in weight_map.items():
            assert name in load_file(folder / file)
    else:
        assert [p.name for p in folder.glob("*.safetensors")] == ["model.safetensors"]
    return found


def assert_equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert set(a) == set(b), set(a) ^ set(b)
    for name, tensor in a.items():
        assert tensor.dtype == b[name].dtype and tensor.shape == b[name].shape, name
        kind = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
        same = tensor.contiguous().view(kind) == b[name].contiguous().view(kind)
        assert same.all(), f"{name} differs first at {(~same).nonzero()[0].tolist()}"


def llama_shapes(c: dict) -> dict[str, tuple[int, ...]]:
    """Names and shapes of LlamaForCausalLM from a config, written by hand."""
    h, f, v, n = c["hidden_size"], c["intermediate_size"], c["vocab_size"], c["num_attention_heads"]
    g, d = c.get("num_key_value_heads", n), c.get("head_dim") or h // n
    out: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (v, h)}
    for i in range(c["num_hidden_layers"]):
        p = f"model.layers.{i}."
        a = p + "self_attn."
        out |= {a + "q_proj.weight": (n * d, h), a + "k_proj.weight": (g * d, h), a + "v_proj.weight": (g * d, h)}
        out |= {a + "o_proj.weight": (h, n * d)}
        if c.get("attention_bias") or c["model_type"] == "qwen2":
            out |= {a + "q_proj.bias": (n * d,), a + "k_proj.bias": (g * d,), a + "v_proj.bias": (g * d,)}
        if c.get("attention_bias"):
            out |= {a + "o_proj.bias": (h,)}
        if c["model_type"] == "qwen3":
            out |= {a + "q_norm.weight": (d,), a + "k_norm.weight": (d,)}
        out |= {
            p + "mlp.gate_proj.weight": (f, h),
            p + "mlp.up_proj.weight": (f, h),
            p + "mlp.down_proj.weight": (h, f),
        }
        if c.get("mlp_bias"):
            out |= {p + "mlp.gate_proj.bias": (f,), p + "mlp.up_proj.bias": (f,), p + "mlp.down_proj.bias": (h,)}
        out |= {p + "input_layernorm.weight": (h,), p + "post_attention_layernorm.weight": (h,)}
    out["model.norm.weight"] = (h,)
    if not c.get("tie_word_embeddings"):
        out["lm_head.weight"] = (v, h)
    return out


def llama_config(**more) -> dict:
    """Three kv heads of three query heads each; nothing divides by 128."""
    return {
        "model_type": "llama", "hidden_size": 36, "intermediate_size": 22, "vocab_size": 67, "num_hidden_layers": 4,
        "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 4, "tie_word_embeddings": False, "dtype": "float32",
        **more,
    }  # fmt: skip


def random_of(shapes: dict[str, tuple[int, ...]], dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Values that make every element of every tensor unique (in float32)."""
    made = {}
    at = 0
    for name, shape in shapes.items():
        numel = int(torch.tensor(shape).prod())
        made[name] = (torch.arange(at, at + numel, dtype=torch.float64) / 8192).reshape(shape).to(dtype)
        at += numel
    return made


def save(folder: Path, tensors: dict[str, torch.Tensor], config: dict | None = None, shards: int = 1) -> Path:
    """A folder as transformers would write it."""
    folder.mkdir(parents=True)
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        return folder
    weight_map: dict[str, str] = {}
    for i in range(shards):
        name = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        part = dict(list(tensors.items())[i::shards])
        save_file(part, folder / name, {"format": "pt"})
        weight_map |= dict.fromkeys(part, name)
    total = sum(t.numel() * t.element_size() for t in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder
