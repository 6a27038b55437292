"""Experts and latent attention in Megatron's legacy files, rank by rank.

Each tensor by a formula in torch, not by the spec.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

import ucpl
from tests.formats.huggingface.folders import assert_equal, random_of, save, tensors_of
from ucpl.inference.hf.records import Config

Tensors = dict[str, Tensor]
Shapes = dict[str, tuple[int, ...]]

H, V, L = 24, 37, 4  # width, words, layers
E, X, S, F = 4, 6, 10, 14  # experts, widths of an expert, of the shared one, of a dense mlp
TP, PP, EP = 2, 2, 2
QWEN: Config = {
    "model_type": "qwen2_moe", "hidden_size": H, "intermediate_size": F, "num_hidden_layers": L, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": V, "num_experts": E, "moe_intermediate_size": X,
    "shared_expert_intermediate_size": S, "tie_word_embeddings": False,
}  # fmt: skip
DEEPSEEK: Config = {
    "model_type": "deepseek_v3", "hidden_size": H, "intermediate_size": F, "num_hidden_layers": L, "num_attention_heads": 4,
    "num_key_value_heads": 4, "vocab_size": V, "n_routed_experts": E, "moe_intermediate_size": X, "n_shared_experts": 2,
    "first_k_dense_replace": 1, "q_lora_rank": 8, "kv_lora_rank": 6, "qk_nope_head_dim": 3, "qk_rope_head_dim": 4,
    "v_head_dim": 5, "tie_word_embeddings": False,
}  # fmt: skip


def mlp(at: str, width: int) -> Shapes:
    return {
        f"{at}.gate_proj.weight": (width, H),
        f"{at}.up_proj.weight": (width, H),
        f"{at}.down_proj.weight": (H, width),
    }


def experts(at: str, shared: str, width: int) -> Shapes:
    out = {f"{at}.gate.weight": (E, H)} | mlp(f"{at}.{shared}", width)
    for expert in range(E):
        out |= mlp(f"{at}.experts.{expert}", X)
    return out


def whole(config: Config) -> Tensors:
    shapes: Shapes = {"model.embed_tokens.weight": (V, H), "model.norm.weight": (H,), "lm_head.weight": (V, H)}
    for layer in range(L):
        at = f"model.layers.{layer}"
        shapes |= {f"{at}.{name}_layernorm.weight": (H,) for name in ("input", "post_attention")}
        if config is QWEN:
            shapes |= {f"{at}.self_attn.{n}_proj.weight": (rows, H) for n, rows in (("q", H), ("k", 12), ("v", 12))}
            shapes |= {f"{at}.self_attn.{n}_proj.bias": (rows,) for n, rows in (("q", H), ("k", 12), ("v", 12))}
            shapes |= {f"{at}.self_attn.o_proj.weight": (H, H), f"{at}.mlp.shared_expert_gate.weight": (1, H)}
            shapes |= experts(f"{at}.mlp", "shared_expert", S)
            continue
        shapes |= {
            f"{at}.self_attn.{name}.weight": shape
            for name, shape in {
                "q_a_proj": (8, H), "q_a_layernorm": (8,), "q_b_proj": (28, 8), "kv_a_proj_with_mqa": (10, H),
                "kv_a_layernorm": (6,), "kv_b_proj": (32, 6), "o_proj": (H, 20),
            }.items()
        }  # fmt: skip
        if layer < 1:
            shapes |= mlp(f"{at}.mlp", F)
        else:
            shapes |= experts(f"{at}.mlp", "shared_experts", 2 * X) | {f"{at}.mlp.gate.e_score_correction_bias": (E,)}
    return random_of(shapes)


def both(of: Tensors, at: str, tp: int) -> tuple[Tensor, Tensor]:
    """fc1 and fc2 of a tp rank.

    Its rows of the gate, then its rows of the other; its columns.
    """
    gate, up = (of[f"{at}.{name}_proj.weight"].chunk(TP)[tp] for name in ("gate", "up"))
    return torch.cat([gate, up]), of[f"{at}.down_proj.weight"].chunk(TP, 1)[tp]


def attention(of: Tensors, config: Config, tp: int) -> Tensors:
    """A layer's, of the rank that has the heads of `tp`."""
    if config is QWEN:
        out = {"linear_qkv.layer_norm_weight": of["input_layernorm.weight"]}
        for kind, width in (("weight", (H,)), ("bias", ())):
            q, k, v = (
                of[f"self_attn.{n}_proj.{kind}"].view(2, -1, 6, *width) for n in "qkv"
            )  # groups, heads, elements
            out[f"linear_qkv.{kind}"] = torch.cat([q, k, v], 1)[tp].flatten(0, 1)
        return {f"self_attention.{n}": t for n, t in out.items()} | {
            "self_attention.linear_proj.weight": of["self_attn.o_proj.weight"].chunk(TP, 1)[tp]
        }
    at, there = "self_attn", "self_attention"
    return {
        "input_layernorm.weight": of["input_layernorm.weight"],
        f"{there}.linear_q_down_proj.weight": of[f"{at}.q_a_proj.weight"],
        f"{there}.linear_q_up_proj.layer_norm_weight": of[f"{at}.q_a_layernorm.weight"],
        f"{there}.linear_q_up_proj.weight": of[f"{at}.q_b_proj.weight"].chunk(TP)[tp],
        f"{there}.linear_kv_down_proj.weight": of[f"{at}.kv_a_proj_with_mqa.weight"],
        f"{there}.linear_kv_up_proj.layer_norm_weight": of[f"{at}.kv_a_layernorm.weight"],
        f"{there}.linear_kv_up_proj.weight": of[f"{at}.kv_b_proj.weight"].chunk(TP)[tp],
        f"{there}.linear_proj.weight": of[f"{at}.o_proj.weight"].chunk(TP, 1)[tp],
    }


def of_rank(every: Tensors, config: Config, tp: int, pp: int, ep: int) -> Tensors:
    out: Tensors = {}
    head, places = ("embedding.word_embeddings", "model.embed_tokens") if pp == 0 else ("output_layer", "lm_head")
    rows = torch.cat([every[f"{places}.weight"], torch.zeros(8 * TP * 3 - V, H)])  # to a multiple of 8 x tp
    out[f"{head}.weight"] = rows.chunk(TP)[tp]
    if pp == PP - 1:
        out["decoder.final_layernorm.weight"] = every["model.norm.weight"]
    for local in range(L // PP):
        start = f"model.layers.{pp * L // PP + local}."
        of = {n.removeprefix(start): t for n, t in every.items() if n.startswith(start)}
        at = f"decoder.layers.{local}."
        out |= {at + n: t for n, t in attention(of, config, tp).items()}
        norm = of["post_attention_layernorm.weight"]
        if "mlp.gate.weight" not in of:
            out[f"{at}mlp.linear_fc1.layer_norm_weight"] = norm
            out[f"{at}mlp.linear_fc1.weight"], out[f"{at}mlp.linear_fc2.weight"] = both(of, "mlp", tp)
            continue
        out |= {f"{at}pre_mlp_layernorm.weight": norm, f"{at}mlp.router.weight": of["mlp.gate.weight"]}
        if config is QWEN:
            out[f"{at}mlp.shared_experts.gate_weight"] = of["mlp.shared_expert_gate.weight"]
        else:
            out[f"{at}mlp.router.expert_bias"] = of["mlp.gate.e_score_correction_bias"]
        shared = "shared_expert" if config is QWEN else "shared_experts"
        fc1, fc2 = both(of, f"mlp.{shared}", tp)
        out |= {f"{at}mlp.shared_experts.linear_fc1.weight": fc1, f"{at}mlp.shared_experts.linear_fc2.weight": fc2}
        for mine in range(E // EP):
            fc1, fc2 = both(of, f"mlp.experts.{ep * E // EP + mine}", tp)
            out |= {f"{at}mlp.experts.linear_fc1.weight{mine}": fc1, f"{at}mlp.experts.linear_fc2.weight{mine}": fc2}
    return out


@pytest.mark.parametrize(
    ("config", "here", "there"),
    [
        (QWEN, "llama.ucpl:qwen_moe()", "llama.ucpl:megatron_grouped"),
        (DEEPSEEK, "deepseek_v3.ucpl:hf()", "deepseek_v3.ucpl:megatron"),
    ],
    ids=["qwen2_moe", "deepseek_v3"],
)
def test_every_tensor_of_every_rank(config: Config, here: str, there: str, tmp_path: Path) -> None:
    tensors = whole(config)
    save(tmp_path / "hf", tensors, config)
    ranks = f"{there}(tp={TP}, pp={PP}, ep={EP}, divisible=8)"
    ucpl.convert(tmp_path / "hf", tmp_path / "m", ranks, layout=here)
    files = {str(p.parent.relative_to(tmp_path / "m")): p for p in (tmp_path / "m").rglob("model_optim_rng.pt")}
    assert len(files) == TP * PP * EP
    for name, file in files.items():
        tp, pp, ep = (int(n) for n in re.findall(r"\d+", name))
        assert_equal(of_rank(tensors, config, tp, pp, ep), torch.load(file, weights_only=True)["model"])
    other = f"{there}(tp=1, pp=4, ep=4, divisible=8)"
    ucpl.convert(tmp_path / "m", tmp_path / "n", other, layout=ranks)
    ucpl.convert(tmp_path / "n", tmp_path / "back", here, layout=other)
    assert_equal(tensors, tensors_of(tmp_path / "back"))


def test_without_transformer_engine_experts_stand_one_by_one(tmp_path: Path) -> None:
    """Names of the other form; the assignment is the same."""
    save(tmp_path / "hf", whole(QWEN), QWEN)
    for there in ("megatron_grouped", "megatron_moe", "megatron_local_moe"):
        layout = f"llama.ucpl:{there}(tp=1, ep=2, divisible=8)"
        ucpl.convert(tmp_path / "hf", tmp_path / there, layout, layout="llama.ucpl:qwen_moe()")
    file = Path("release") / "mp_rank_00_001" / "model_optim_rng.pt"
    grouped, alone, local = (
        torch.load(tmp_path / n / file, weights_only=True)["model"]
        for n in ("megatron_grouped", "megatron_moe", "megatron_local_moe")
    )
    renamed = {
        re.sub(r"experts\.(linear_fc.)\.weight(\d)$", r"experts.local_experts.\2.\1.weight", n): t
        for n, t in grouped.items()
    }
    assert_equal(renamed, alone)
    norms = {re.sub(r"self_attention\.linear_qkv\.layer_norm_", "input_layernorm.", n): t for n, t in alone.items()}
    assert_equal(norms, local)


@pytest.mark.parametrize("layout", ["torch_dist", "torch_dist_local"])
def test_latent_attention_in_torch_dist(tmp_path: Path, layout: str) -> None:
    """A name for each layer, stacked experts, and `_extra_state` of linear modules."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    save(tmp_path / "hf", whole(DEEPSEEK), DEEPSEEK)
    here, there = "deepseek_v3.ucpl:hf()", f"deepseek_v3.ucpl:{layout}(tp=3, pp=2, divisible=8)"
    legacy = "megatron" + layout.removeprefix("torch_dist")
    ucpl.convert(tmp_path / "hf", tmp_path / "files", f"deepseek_v3.ucpl:{legacy}(tp=1, divisible=8)", layout=here)
    ucpl.convert(tmp_path / "hf", tmp_path / "dist", there, layout=here)
    file = tmp_path / "files" / "release" / "mp_rank_00" / "model_optim_rng.pt"
    wanted, stacks = {}, dict[str, dict[int, Tensor]]()
    for name, tensor in torch.load(file, weights_only=True)["model"].items():
        expert = re.fullmatch(r"(.*\.experts\.)(?:local_experts\.(\d)\.)?(linear_fc\d\.weight)(\d?)", name)
        if expert is None:
            wanted[name] = tensor
        else:
            stacks.setdefault(f"{expert[1]}experts.{expert[3]}", {})[int(expert[2] or expert[4])] = tensor
    wanted |= {name: torch.stack([of[n] for n in range(E)]) for name, of in stacks.items()}
    folder = tmp_path / "dist" / "iter_0000000"
    dcp_to_torch_save(folder, tmp_path / "whole.pt")
    made = torch.load(tmp_path / "whole.pt", weights_only=False)
    assert_equal(wanted, {name: tensor for name, tensor in made.items() if torch.is_tensor(tensor)})
    known = {n for n in FileSystemReader(folder).read_metadata().state_dict_metadata if "_extra_state" in n}
    linear = ("linear_q_down_proj", "linear_q_up_proj", "linear_kv_down_proj", "linear_kv_up_proj", "linear_proj")
    modules = {f"decoder.layers.{l}.self_attention.{name}" for l in range(L) for name in linear}
    mlps = {f"decoder.layers.{l}.mlp.{'shared_experts.' * (l > 0)}linear_fc{n}" for l in range(L) for n in (1, 2)}
    assert known == {f"{name}._extra_state/shard_0_1" for name in modules | mlps} | {
        f"{name.removesuffix('.weight')}._extra_state/shard_{e}_{E}" for name in stacks for e in range(E)
    }
    ucpl.convert(tmp_path / "dist", tmp_path / "back", here, layout=there, config=DEEPSEEK)
    assert_equal(tensors_of(tmp_path / "hf"), tensors_of(tmp_path / "back"))


GPT_OSS: Config = {
    "model_type": "gpt_oss", "hidden_size": H, "intermediate_size": X, "num_hidden_layers": L, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 3, "vocab_size": V, "num_local_experts": E, "tie_word_embeddings": False,
}  # fmt: skip


def test_gpt_oss_by_a_formula(tmp_path: Path) -> None:
    """Gates and their others alternate in transformers' tensors, unlike Megatron's.

    There they follow each other, inputs last.
    """
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    shapes: Shapes = {"model.embed_tokens.weight": (V, H), "model.norm.weight": (H,), "lm_head.weight": (V, H)}
    for layer in range(L):
        at = f"model.layers.{layer}"
        shapes |= {f"{at}.{name}_layernorm.weight": (H,) for name in ("input", "post_attention")}
        for name, rows in (("q", 12), ("k", 6), ("v", 6)):
            shapes |= {f"{at}.self_attn.{name}_proj.weight": (rows, H), f"{at}.self_attn.{name}_proj.bias": (rows,)}
        shapes |= {f"{at}.self_attn.o_proj.weight": (H, 12), f"{at}.self_attn.o_proj.bias": (H,)}
        shapes |= {f"{at}.self_attn.sinks": (4,), f"{at}.mlp.router.weight": (E, H), f"{at}.mlp.router.bias": (E,)}
        shapes |= {f"{at}.mlp.experts.gate_up_proj": (E, H, 2 * X), f"{at}.mlp.experts.gate_up_proj_bias": (E, 2 * X)}
        shapes |= {f"{at}.mlp.experts.down_proj": (E, X, H), f"{at}.mlp.experts.down_proj_bias": (E, H)}
    tensors = random_of(shapes)
    save(tmp_path / "hf", tensors, GPT_OSS)
    here, there = "gpt_oss.ucpl:hf()", "gpt_oss.ucpl:torch_dist(tp=2, pp=2, divisible=1)"
    ucpl.convert(tmp_path / "hf", tmp_path / "dist", there, layout=here)
    dcp_to_torch_save(tmp_path / "dist" / "iter_0000000", tmp_path / "whole.pt")
    made = torch.load(tmp_path / "whole.pt", weights_only=False)

    def layers(name: str) -> Tensor:
        return torch.stack([tensors[f"model.layers.{layer}.{name}"] for layer in range(L)])

    qkv = [layers(f"self_attn.{n}_proj.weight").view(L, 2, -1, H) for n in "qkv"]  # of two groups of heads
    assert torch.equal(made["decoder.layers.self_attention.linear_qkv.weight"], torch.cat(qkv, 2).flatten(1, 2))
    assert torch.equal(made["decoder.layers.self_attention.core_attention.softmax_offset"], layers("self_attn.sinks"))
    both = layers("mlp.experts.gate_up_proj").transpose(2, 3)
    fc1 = torch.cat([both[:, :, ::2], both[:, :, 1::2]], 2)
    assert torch.equal(made["decoder.layers.mlp.experts.experts.linear_fc1.weight"], fc1)
    biases = layers("mlp.experts.gate_up_proj_bias")
    inner = torch.cat([biases[..., ::2], biases[..., 1::2]], 2)
    assert torch.equal(made["decoder.layers.mlp.experts.experts.linear_fc1.bias"], inner)
    down = layers("mlp.experts.down_proj").transpose(2, 3)
    assert torch.equal(made["decoder.layers.mlp.experts.experts.linear_fc2.weight"], down)
    ucpl.convert(tmp_path / "dist", tmp_path / "back", here, layout=there, config=GPT_OSS)
    assert_equal(tensors, tensors_of(tmp_path / "back"))
    ranks = "gpt_oss.ucpl:megatron(tp=2, pp=2, ep=2, divisible=1)"
    ucpl.convert(tmp_path / "hf", tmp_path / "m", ranks, layout=here)
    file = tmp_path / "m" / "release" / "mp_rank_01_001_001" / "model_optim_rng.pt"  # the last rank: experts 2 and 3
    last = torch.load(file, weights_only=True)["model"]
    half = torch.cat([fc1[3, 2, X // 2 : X], fc1[3, 2, X + X // 2 :]])
    assert torch.equal(last["decoder.layers.1.mlp.experts.linear_fc1.weight0"], half)
    assert torch.equal(last["decoder.layers.1.mlp.experts.linear_fc2.weight1"], down[3, 3, :, X // 2 :])
    assert torch.equal(
        last["decoder.layers.1.self_attention.core_attention.softmax_offset"], layers("self_attn.sinks")[3, 2:]
    )


LLAMA4: Config = {
    "model_type": "llama4_text", "hidden_size": H, "intermediate_size": X, "intermediate_size_mlp": F, "num_hidden_layers": L,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 3, "vocab_size": V, "num_local_experts": E,
    "moe_layers": [1, 3], "tie_word_embeddings": False,
}  # fmt: skip


def test_llama4_by_a_formula(tmp_path: Path) -> None:
    """Layers of experts alternate with dense ones, each under its name.

    The experts of one are a stack, inputs last.
    """
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    shapes: Shapes = {"model.embed_tokens.weight": (V, H), "model.norm.weight": (H,), "lm_head.weight": (V, H)}
    for layer in range(L):
        at = f"model.layers.{layer}"
        shapes |= {f"{at}.{name}_layernorm.weight": (H,) for name in ("input", "post_attention")}
        shapes |= {f"{at}.self_attn.{n}_proj.weight": (rows, H) for n, rows in (("q", 12), ("k", 6), ("v", 6))}
        shapes[f"{at}.self_attn.o_proj.weight"] = (H, 12)
        if layer % 2 == 0:
            shapes |= mlp(f"{at}.feed_forward", F)
            continue
        shapes |= {f"{at}.feed_forward.router.weight": (E, H)} | mlp(f"{at}.feed_forward.shared_expert", X)
        shapes |= {f"{at}.feed_forward.experts.gate_up_proj": (E, H, 2 * X)}
        shapes |= {f"{at}.feed_forward.experts.down_proj": (E, X, H)}
    tensors = random_of(shapes)
    save(tmp_path / "hf", tensors, LLAMA4)
    here, there = "llama4.ucpl:hf()", "llama4.ucpl:torch_dist(tp=2, pp=2, divisible=1)"
    ucpl.convert(tmp_path / "hf", tmp_path / "dist", there, layout=here)
    dcp_to_torch_save(tmp_path / "dist" / "iter_0000000", tmp_path / "whole.pt")
    made = torch.load(tmp_path / "whole.pt", weights_only=False)
    for layer in range(L):
        of, at = f"model.layers.{layer}.", f"decoder.layers.{layer}."
        qkv = [tensors[f"{of}self_attn.{n}_proj.weight"].view(2, -1, H) for n in "qkv"]  # of two groups of heads
        assert torch.equal(made[f"{at}self_attention.linear_qkv.weight"], torch.cat(qkv, 1).flatten(0, 1))
        dense, norm = (
            (at + "mlp.", "mlp.linear_fc1.layer_norm_") if layer % 2 == 0 else (at + "mlp.shared_experts.", "")
        )
        ours = of + "feed_forward." + "shared_expert." * (layer % 2)
        both = torch.cat([tensors[f"{ours}{n}_proj.weight"] for n in ("gate", "up")])
        assert torch.equal(made[f"{dense}linear_fc1.weight"], both)
        assert torch.equal(
            made[f"{at}{norm or 'pre_mlp_layernorm.'}weight"], tensors[f"{of}post_attention_layernorm.weight"]
        )
        if layer % 2:
            experts = f"{at}mlp.experts.experts."
            fc1 = tensors[f"{of}feed_forward.experts.gate_up_proj"].transpose(1, 2)
            assert torch.equal(made[f"{experts}linear_fc1.weight"], fc1)
            down = tensors[f"{of}feed_forward.experts.down_proj"].transpose(1, 2)
            assert torch.equal(made[f"{experts}linear_fc2.weight"], down)
    ucpl.convert(tmp_path / "dist", tmp_path / "back", here, layout=there, config=LLAMA4)
    assert_equal(tensors, tensors_of(tmp_path / "back"))
