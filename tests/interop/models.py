"""Small models and optimizers with unusual parts.

Odd sizes, ties, frozen parts, buffers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

BATCH = 120  # divides by every degree that the tests use


class Net(nn.Module):
    """Convolution, tied layers, a one-element gain, buffers, and odd sizes.

    One buffer is persistent.
    """

    rows = 11

    def __init__(self, freeze: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(self.rows, 6)
        self.conv = nn.Conv1d(6, 5, 3, padding=1)
        self.norm = nn.LayerNorm(5)
        self.up = nn.Linear(5, 13)
        self.down = nn.Linear(13, 6, bias=False)
        self.gain = nn.Parameter(torch.ones(1))
        self.head = nn.Linear(6, self.rows, bias=False)
        self.head.weight = self.embed.weight  # tied
        self.register_buffer("calls", torch.zeros(3))
        self.register_buffer("scale", torch.full((1,), 0.5), persistent=False)
        if freeze:
            self.conv.weight.requires_grad_(False)
            self.norm.bias.requires_grad_(False)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)  # type: ignore[operator]
        h = self.embed(x)
        h = h + self.down(F.silu(self.up(self.norm(self.conv(h.transpose(1, 2)).transpose(1, 2)))))
        logits = self.head(h) * self.gain
        return F.cross_entropy(logits.float().reshape(-1, self.rows), y.reshape(-1))


class Grown(Net):
    """The same with two rows more, and a parameter that is new."""

    rows = 13

    def __init__(self, freeze: bool) -> None:
        super().__init__(freeze)
        self.shift = nn.Parameter(torch.zeros(6))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return super().forward(x, y) + self.shift.float().square().sum() + self.shift.float().sum()


class Lean(Net):
    """The same without a bias and the buffer."""

    def __init__(self, freeze: bool) -> None:
        super().__init__(freeze)
        self.up = nn.Linear(5, 13, bias=False)
        del self._buffers["calls"]
        self.__dict__["calls"] = torch.zeros(3)


class Bare(Net):
    """The same without one-dimensional parameters: their group is empty."""

    def __init__(self, freeze: bool) -> None:
        super().__init__(False)
        self.conv = nn.Conv1d(6, 5, 3, padding=1, bias=False)
        self.norm = nn.LayerNorm(5, elementwise_affine=False)
        self.up = nn.Linear(5, 13, bias=False)
        del self.gain
        self.gain = torch.ones(1)  # type: ignore[assignment]  # no parameter any more


class Tied(nn.Module):
    """A head that has no parameter of its own name."""

    def __init__(self, embed: nn.Embedding) -> None:
        super().__init__()
        self.of = [embed]  # in a list: no submodule

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return F.linear(h, self.of[0].weight)


class Headless(Net):
    """The same without second name and bias; the embedding is frozen."""

    def __init__(self, freeze: bool) -> None:
        super().__init__(False)
        self.norm.bias = None  # type: ignore[assignment]
        self.embed.weight.requires_grad_(False)
        self.head = Tied(self.embed)  # type: ignore[assignment]


class Wider(Net):
    """The same with an adapter at the last layer.

    Two matrices and a gain.
    """

    def __init__(self, freeze: bool) -> None:
        super().__init__(freeze)
        self.lora_a = nn.Parameter(torch.full((2, 6), 0.5))
        self.lora_b = nn.Parameter(torch.zeros(6, 2))
        self.tone = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)  # type: ignore[operator]
        h = self.embed(x)
        h = h + self.down(F.silu(self.up(self.norm(self.conv(h.transpose(1, 2)).transpose(1, 2)))))
        h = h + F.linear(F.linear(h, self.lora_a), self.lora_b) * self.tone
        logits = self.head(h) * self.gain
        return F.cross_entropy(logits.float().reshape(-1, self.rows), y.reshape(-1))


class Few(nn.Module):
    """Fewer parameters than ranks in one group: some ranks hold only padding."""

    def __init__(self, freeze: bool) -> None:
        super().__init__()
        self.mix = nn.Embedding(11, 3)
        self.out = nn.Linear(3, 11)
        self.bend = nn.Parameter(torch.tensor([0.5, -0.25, 1.0]))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.out(torch.tanh(self.mix(x) * self.bend)).float().reshape(-1, 11), y.reshape(-1))


class Lion(torch.optim.Optimizer):
    """An optimizer that DeepSpeed has never heard of: one moment, no `step`."""

    def __init__(self, params: Any, lr: float = 1e-3, beta: float = 0.9, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "beta": beta, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["slow"] = torch.zeros_like(p)
                update = (state["slow"] * group["beta"] + p.grad * (1 - group["beta"])).sign()
                p.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-group["lr"])
                state["slow"].lerp_(p.grad, 1 - group["beta"])


MODELS = {
    "net": Net,
    "grown": Grown,
    "lean": Lean,
    "bare": Bare,
    "headless": Headless,
    "wider": Wider,
    "few": Few,
}


def parameter_groups(model: nn.Module, how: int, spoil: float) -> list[dict[str, Any]]:
    """One, two or three groups.

    `spoil` changes hyper-parameters, which a load must restore.
    """
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    flat = [p for _, p in trained if p.ndim < 2]
    wide = [p for _, p in trained if p.ndim >= 2]
    cut: list[list[nn.Parameter]]
    match how:
        case 1:
            cut = [[p for _, p in trained]]
        case 2:
            cut = [wide, flat]
        case 3:
            cut = [wide[::-1], flat[:1], flat[1:]]  # not in the model's order; one tiny group
        case 4:  # one behind another, as learning rates by layer have them: shapes of the norm and its bias are alike
            every = [p for _, p in trained]
            cut = [every[:4], every[4:]]
        case _:
            cut = [flat[::-1], wide[::-1]]  # backwards, with shapes that would do for another order
    rates = [(1e-2, 0.1), (5e-3, 0.0), (2e-3, 0.01)]
    return [
        {"params": params, "lr": lr + spoil, "weight_decay": decay + spoil}
        for params, (lr, decay) in zip(cut, rates, strict=False)
    ]


def with_own_group(groups: list[dict[str, Any]], own: list[nn.Parameter]) -> list[dict[str, Any]]:
    """One more group with hyper-parameters that a load must restore."""
    ids = set(map(id, own))
    left = [{**group, "params": [p for p in group["params"] if id(p) not in ids]} for group in groups]
    return [*left, {"params": own, "lr": 2e-3, "weight_decay": 0.01}]


def fused(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """DeepSpeed's FusedAdam, for flat masters without ZeRO; its step is torch's."""
    from deepspeed.ops.adam import FusedAdam

    class Stepped(FusedAdam):
        def __init__(self, params: Any) -> None:
            defaults = {"lr": 1e-3, "bias_correction": True, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.0}
            torch.optim.Optimizer.__init__(self, params, defaults)
            self.set_grad_none = True

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                group.setdefault("step", 0)
                for p in (p for p in group["params"] if p.grad is not None):
                    state = self.state[p]
                    if not state:
                        state |= {"step": 0, "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
                    state["step"] += 1
                    (b, c), n = group["betas"], state["step"]
                    state["exp_avg"].lerp_(p.grad, 1 - b)
                    state["exp_avg_sq"].mul_(c).addcmul_(p.grad, p.grad, value=1 - c)
                    p.mul_(1 - group["lr"] * group["weight_decay"])
                    root = (state["exp_avg_sq"] / (1 - c**n)).sqrt_().add_(group["eps"])
                    p.addcdiv_(state["exp_avg"], root, value=-group["lr"] / (1 - b**n))

    return Stepped(groups)


def optimizer(name: str, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    match name:
        case "fused":
            return fused(groups)
        case "adamw":
            return torch.optim.AdamW(groups, betas=(0.9, 0.95))
        case "nadam":  # two numbers a parameter: step and mu_product
            return torch.optim.NAdam(groups)
        case "sgd":
            return torch.optim.SGD(groups, momentum=0.9)
        case "lion":
            return Lion(groups)
    raise ValueError(name)


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 + step)
    x = torch.randint(0, 11, (BATCH, 7), generator=generator)
    return x, (x * 3 + 1) % 11
