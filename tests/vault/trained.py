"""A training job of one rank, its vault, and the expected results."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

import ucpl
from ucpl.errors import UcplError
from ucpl.storage.vaults.checksummed_text import JsonObject
from ucpl.vault import Saved, Vault, Writer
from ucpl.vault.files import ToSave, text_file
from ucpl.vault.server import Server

REPLAYS = 3


class Net(nn.Module):
    """Layers of odd sizes, one with running statistics.

    One is frozen, and one weight has two names.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(37, 53)
        self.norm = nn.BatchNorm1d(53)
        self.frozen = nn.Linear(53, 53)
        self.frozen.requires_grad_(False)
        self.last = nn.Linear(53, 37)
        self.tied = nn.Linear(37, 53, bias=False)
        self.tied.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.frozen(self.norm(self.first(x)).relu())
        found: torch.Tensor = self.last(hidden + self.tied(x))
        return found


class Training:
    """A job of one rank, its vault, and the same without one."""

    def __init__(self, home: Path, ends: ExitStack, *, domains: int = 1, protect: str = "none", **how: object) -> None:
        torch.manual_seed(3)
        self.model = Net()
        two = [
            {"params": [p for n, p in self.model.named_parameters() if "weight" in n], "weight_decay": 0.1},
            {"params": [p for n, p in self.model.named_parameters() if "weight" not in n], "lr": 0.02},
        ]
        self.optimizer = torch.optim.AdamW(two, lr=1e-2, **how)  # type: ignore[arg-type]
        self.optimizer.param_groups[0]["seen"] = [1]
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        self.vault = Vault.make(home, ranks=domains, domains=domains, protect=protect, replays=REPLAYS)
        self.servers = [ends.enter_context(Server(home, n)) for n in range(domains)]
        self.writer, *self.others = [
            ends.enter_context(self.vault.writer(rank, run="first", wait=0.0, strict=True)) for rank in range(domains)
        ]
        for other in self.others:
            other._collect = partial(self._beside, other)  # type: ignore[method-assign]
        self.done = 0

    def _beside(self, other: Writer, step: int, *_: object) -> tuple[list[ToSave], JsonObject | None]:
        """The files of a rank without training, in step with the first."""
        said: JsonObject = {"optimizer": "AdamW", "by": {"device": "cpu"}, "groups": [], "units": {}}
        return [text_file(f"beside-{other.rank}", f"{step}".encode() * 5000)], said if self.is_light else None

    def backward(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randn(6, 37)).square().mean().backward()

    def step(self) -> None:
        self.backward()
        self.optimizer.step()
        self.schedule.step()

    def save(self) -> Saved:
        self.done += 1
        saved = self.writer.save(self.done, (self.model, self.optimizer), {"at": self.done})
        self.is_light = bool(saved.replays)
        for other in self.others:
            other.save(self.done, None)
        for _ in range(2):
            for server in self.servers:
                server.turn()
        assert self.writer.committed() == (self.done, self.done)
        return saved

    def demand_same(self, source: str | Path | None = None) -> None:
        """Check that a read returns this state, bit for bit.

        It compares weights, moments, steps and the numbers of groups.
        """
        model = Net()
        groups = [
            {"params": [p for n, p in model.named_parameters() if ("weight" in n) is big]} for big in (True, False)
        ]
        optimizer = torch.optim.AdamW(groups, lr=1.0, amsgrad="max_exp_avg_sq" in self.names())
        ucpl.load_into(model, optimizer, source or f"vault:{self.vault.home}")
        assert same(model.state_dict(), self.model.state_dict())
        assert same(optimizer.state_dict()["state"], self.optimizer.state_dict()["state"])
        mine, theirs = self.optimizer.state_dict()["param_groups"], optimizer.state_dict()["param_groups"]
        for one, other in zip(mine, theirs, strict=True):
            assert {k: one[k] for k in ("lr", "betas", "weight_decay")} == {
                k: other[k] for k in ("lr", "betas", "weight_decay")
            }

    def names(self) -> set[str]:
        return {name for state in self.optimizer.state.values() for name in state}


def same(one: object, other: object) -> bool:
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[k], other[k]) for k in one)
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and bits(one) == bits(other)
    return one == other


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@contextmanager
def training(home: Path, **how: object) -> Iterator[Training]:
    with ExitStack() as ends:
        yield Training(home, ends, **how)  # type: ignore[arg-type]


def code_of(refused: pytest.ExceptionInfo[UcplError]) -> str:
    return refused.value.diagnostics[0].code
