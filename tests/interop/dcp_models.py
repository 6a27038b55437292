"""A model that tensor parallelism cuts, by torch's styles."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from tests.interop import models

LLAMA: dict[str, Any] = {
    "vocab_size": 67, "hidden_size": 36, "intermediate_size": 22, "num_hidden_layers": 2, "num_attention_heads": 9,
    "num_key_value_heads": 3, "head_dim": 4, "max_position_embeddings": 40, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(10)
        self.up = nn.Linear(10, 24)
        self.down = nn.Linear(24, 10, bias=False)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return h + self.down(F.silu(self.up(self.norm(h))))


class Cut(nn.Module):
    """Two blocks that tp cuts in four, and odd sizes.

    FSDP cuts the odd sizes unevenly.
    """

    def __init__(self, freeze: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 10)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.gain = nn.Parameter(torch.ones(5))
        self.head = nn.Linear(10, 11)
        self.register_buffer("calls", torch.zeros(3))
        if freeze:
            self.embed.weight.requires_grad_(False)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)  # type: ignore[operator]
        h = self.embed(x)
        for block in self.blocks:
            h = block(h)
        logits = self.head(h) * self.gain.sum()
        return F.cross_entropy(logits.float().reshape(-1, 11), y.reshape(-1))


def llama() -> Any:
    import transformers

    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA))


def made(name: str, freeze: bool = False) -> nn.Module:
    if name == "cut":
        return Cut(freeze)
    return llama() if name == "llama" else models.MODELS[name](freeze)
