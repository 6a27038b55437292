"""A small model of torch and its optimizers.

It has tied and frozen parameters, buffers, norms and two groups.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

Groups = list[dict[str, Any]]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(5)
        self.up = nn.Linear(5, 7)
        self.down = nn.Linear(7, 5, bias=False)
        self.register_buffer("seen", torch.arange(3.0) / 7)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(torch.relu(self.up(self.norm(x))))
        return out


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(11, 5)
        self.position = nn.Embedding(4, 5)
        self.position.weight.requires_grad_(False)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.stats = nn.BatchNorm1d(5)
        self.head = nn.Linear(5, 11, bias=False)
        self.head.weight = self.token.weight
        self.register_buffer("count", torch.tensor([3, 5]))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.token(ids) + self.position(torch.arange(ids.shape[1]))
        for block in self.layers:
            x = block(x)
        out: Tensor = self.head(self.stats(x.transpose(1, 2)).transpose(1, 2))
        return out


def built(seed: int = 3) -> Tiny:
    torch.manual_seed(seed)
    return Tiny()


def trained(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    return ((name, one) for name, one in model.named_parameters() if one.requires_grad)


def groups(model: nn.Module, *, named: bool = False) -> Groups:
    """Matrices with decay, vectors without."""
    matrices = [(n, p) if named else p for n, p in trained(model) if p.ndim >= 2]
    vectors = [(n, p) if named else p for n, p in trained(model) if p.ndim < 2]
    return [
        {"params": matrices, "lr": 1e-2, "weight_decay": 0.1},
        {"params": vectors, "lr": 5e-3, "weight_decay": 0.0},
    ]


def train(
    model: nn.Module, optimizers: list[torch.optim.Optimizer], first: int, count: int, schedule: Any = None
) -> list[float]:
    """The losses of some steps."""
    losses = []
    for step in range(first, first + count):
        ids = torch.randint(0, 11, (3, 5), generator=torch.Generator().manual_seed(100 + step))

        def loss(ids: Tensor = ids) -> Tensor:
            for one in optimizers:
                one.zero_grad()
            made = nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
            made.backward()
            return made

        closure: Callable[[], Tensor] = loss
        if any(isinstance(one, torch.optim.LBFGS) for one in optimizers):
            losses.append(float(optimizers[0].step(closure)))  # type: ignore[arg-type]
        else:
            losses.append(float(closure().detach()))
            for one in optimizers:
                one.step()
        if schedule is not None:
            schedule.step()
    return losses


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups(model), betas=(0.9, 0.95))
