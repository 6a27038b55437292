"""Unusual but real models: adapters over an unsaved model, and others."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from attrs import field, frozen
from torch import nn
from torch.nn import functional as F

BATCH, WORDS, LENGTH = 12, 11, 6


class Adapted(nn.Module):
    """peft's LoRA over a small model of transformers, with a tied head.

    Nothing is downloaded: only configs are used.
    """

    def __init__(self, kind: str) -> None:
        peft = importlib.import_module("peft")
        transformers = importlib.import_module("transformers")

        super().__init__()
        torch.manual_seed(3)  # the base model has its weights from elsewhere: the same wherever it is made
        if kind == "gpt2":
            config = transformers.GPT2Config(
                vocab_size=WORDS, n_positions=8, n_embd=4, n_layer=1, n_head=2,
                resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
            )  # fmt: skip
            base, where = transformers.GPT2LMHeadModel(config), ["c_attn"]
        else:
            config = transformers.LlamaConfig(
                vocab_size=WORDS, hidden_size=8, intermediate_size=12, num_hidden_layers=2, num_attention_heads=2,
                num_key_value_heads=1, max_position_embeddings=8, tie_word_embeddings=True,
            )  # fmt: skip
            base, where = transformers.LlamaForCausalLM(config), ["q_proj", "v_proj"]
        self.model = peft.get_peft_model(base, peft.LoraConfig(r=2, lora_alpha=16, target_modules=where))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.model(input_ids=x, labels=x).loss
        return loss


class Odd(nn.Module):
    """A shared norm, a twice named buffer, and a parameter `*`."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, 6)
        norm = nn.LayerNorm(6)
        self.norms = nn.ModuleList([norm, norm])
        self.middle = nn.Linear(6, 6)
        self.head = nn.Linear(6, WORDS, bias=False)
        self.register_parameter("*", nn.Parameter(torch.ones(3)))
        calls = torch.zeros(3)
        self.register_buffer("calls", calls)
        self.register_buffer("counted", calls)
        self.extra: Any = None

    def get_extra_state(self) -> Any:
        return {"seen": [1, (2, 3.5)], "note": "kept"}

    def set_extra_state(self, state: Any) -> None:
        self.extra = state

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)  # type: ignore[operator]
        h = self.norms[1](self.middle(self.norms[0](self.embed(x))))
        loss = F.cross_entropy(self.head(h).float().reshape(-1, WORDS), (x * 3 + 1).reshape(-1) % WORDS)
        return loss + getattr(self, "*").float().square().sum()


class Toggled(Odd):
    """One layer is frozen from the beginning: see `toggles`."""

    def __init__(self) -> None:
        super().__init__()
        self.middle.weight.requires_grad_(False)
        self.middle.bias.requires_grad_(False)


class Keeper(torch.optim.Optimizer):
    """Momentum with states of reserved names, and states of other shapes."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1e-2})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            state = self.state[p]
            if not state:
                state |= {"weight": torch.zeros_like(p), "fp32": torch.full_like(p, 0.5), "none": None}
                state |= {"history": [1, 2.5], "one": torch.tensor([2.5])}
            p.sub_(state["weight"].mul_(0.9).add_(p.grad), alpha=1e-2)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=5e-2)


@frozen
class Run:
    """A model, its optimizer, and its way of saving."""

    model: Callable[[], nn.Module]
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = adamw
    toggles: dict[str, bool] = field(factory=dict)  # requires_grad that is changed after the second step
    excludes: bool = False  # save_checkpoint(exclude_frozen_parameters=True), load_checkpoint(load_module_strict=False)


ODD: dict[str, Run] = {
    "gpt2_lora": Run(lambda: Adapted("gpt2"), excludes=True),
    "llama_lora": Run(lambda: Adapted("llama"), excludes=True),
    "names": Run(Odd),
    "states": Run(Odd, lambda model: Keeper(model.parameters())),
    "toggled": Run(Toggled, toggles={"norms.0.weight": False, "middle.bias": True}),
}


def batch(step: int) -> torch.Tensor:
    return torch.randint(0, WORDS, (BATCH, LENGTH), generator=torch.Generator().manual_seed(1000 + step))


def spoil(model: nn.Module, is_excluding: bool) -> None:
    """Change all values that a load must restore."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad or not is_excluding:
                parameter.copy_(torch.randn_like(parameter))
        kept = model.state_dict()
        for name, buffer in model.named_buffers():
            if name in kept and buffer.is_floating_point():
                buffer.copy_(torch.randn_like(buffer))


def number(value: Any) -> Any:
    """A value as it is compared: a 0-dim tensor is a number."""
    return float(value) if torch.is_tensor(value) and value.ndim == 0 else value
