"""A pipeline and a model with experts: ties, functions, odd sizes.

Layers have different numbers of experts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

TOKENS, WIDTH, PLACES = 11, 6, 7
LOOSE = "tied_modules.embed.position.weight"  # in the tied module, and not tied


class Embedding(nn.Module):
    """An embedding tied with the head, with positions of the first stage.

    The last stage has them, too.
    """

    def __init__(self) -> None:
        super().__init__()
        self.word = nn.Embedding(TOKENS, WIDTH)
        self.position = nn.Embedding(PLACES, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.word(x) + self.position(torch.arange(x.shape[1]))
        return out


def head(embedding: Embedding, h: torch.Tensor) -> torch.Tensor:
    return F.linear(h, embedding.word.weight)


def wave(h: torch.Tensor) -> torch.Tensor:
    """A layer that saves nothing."""
    return torch.sin(h) + h


class Block(nn.Module):
    def __init__(self, inner: int, frozen: bool = False) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, inner)
        self.down = nn.Linear(inner, WIDTH, bias=False)
        self.register_buffer("seen", torch.zeros(2))
        if frozen:
            self.up.bias.requires_grad_(False)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = h + self.down(F.silu(self.up(self.norm(h))))
        return out


def pipeline(stages: int, method: str, seed: int) -> Any:
    """Seven layers: tied, block, function, two blocks, a norm, tied."""
    from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec

    layers = [
        TiedLayerSpec("embed", Embedding, tied_weight_attr=["word.weight"]),
        LayerSpec(Block, 13),
        wave,
        LayerSpec(Block, 5, frozen=True),
        LayerSpec(Block, 17),
        LayerSpec(nn.LayerNorm, WIDTH),
        TiedLayerSpec("embed", Embedding, forward_fn=head, tied_weight_attr=["word.weight"]),
    ]
    # DeepSpeed cannot seed layers that 'parameters' dealt: it counts them in NumPy's numbers there.
    seeds = {"base_seed": seed, "seed_layers": method == "uniform"}
    return PipelineModule(layers, num_stages=stages, loss_fn=loss, partition_method=method, **seeds)


def loss(logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.float().reshape(-1, TOKENS), y.reshape(-1))


class Expert(nn.Module):
    def __init__(self, inner: int) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, inner)
        self.down = nn.Linear(inner, WIDTH, bias=False)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down(F.silu(self.up(h)))
        return out


class Mixture(nn.Module):
    """Two layers with experts between dense ones, and a tied head."""

    def __init__(self, ep: int) -> None:
        from deepspeed.moe.layer import MoE

        super().__init__()
        self.embed = nn.Embedding(TOKENS, WIDTH)
        self.first = Block(9)
        same = {"ep_size": ep, "k": 1, "capacity_factor": 8.0, "drop_tokens": False, "use_rts": False}
        self.few = MoE(WIDTH, Expert(5), num_experts=4, **same)
        self.norm = nn.LayerNorm(WIDTH)
        self.many = MoE(WIDTH, Expert(3), num_experts=8, **same)
        self.head = nn.Linear(WIDTH, TOKENS, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = self.first(self.embed(x))
        h = h + self.few(h)[0]
        h = h + self.many(self.norm(h))[0]
        return loss(self.head(h), y)


class Routed(nn.Module):
    """A model of transformers whose layers AutoEP replaces, four experts each."""

    def __init__(self, kind: str) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        super().__init__()
        sizes = {"vocab_size": TOKENS, "hidden_size": 8, "intermediate_size": 10, "num_hidden_layers": 2}
        heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 16}
        of_kind: dict[str, dict[str, Any]] = {
            "mixtral": {"num_local_experts": 4},
            "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 5, "head_dim": 4, "mlp_only_layers": [0]},
        }
        config = AutoConfig.for_model(kind, **sizes, **heads, num_experts_per_tok=2, **of_kind[kind])
        self.config = config
        whole = AutoModelForCausalLM.from_config(config)
        self.model, self.lm_head = whole.model, whole.lm_head
        for module in self.modules():  # DeepSpeed supports an older form of this table of the router's recorders
            if hasattr(module, "_can_record_outputs"):
                vars(module)["_can_record_outputs"] = None

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return loss(self.lm_head(self.model(x).last_hidden_state), y)
