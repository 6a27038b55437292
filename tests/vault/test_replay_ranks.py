"""Saves of gradients alone by several ranks.

A restore equals torch's own save, also in another layout.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import ucpl
from tests.vault.test_shares import RANKS, demand_each_as_torch_saved_it, run_ranks
from ucpl.vault import Vault
from ucpl.vault.persisted import persist
from ucpl.vault.server import Server

SAVES, REPLAYS = 5, 2
EXPECTED = [0, 1, 2, 0, 1]


def net() -> nn.Module:
    """Parameters that two ranks share unevenly; one rank has none of one."""
    return nn.Sequential(nn.Linear(5, 7), nn.GELU(), nn.Linear(7, 3), nn.Linear(3, 1))


def sharded(model: nn.Module) -> nn.Module:
    fully_shard(model)
    return model


def replicated(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model)


def both(model: nn.Module) -> nn.Module:
    fully_shard(model, mesh=init_device_mesh("cpu", (RANKS, 1), mesh_dim_names=("copies", "shards")))
    return model


WAYS: dict[str, Callable[[nn.Module], nn.Module]] = {"sharded": sharded, "replicated": replicated, "both": both}


def trains(way: str, rank: int, port: int, home: Path, out: Path, *, odd: int = -1) -> None:
    """A training rank.

    odd: before this save, the second rank's values change without a step.
    """
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    torch.manual_seed(0)
    model = WAYS[way](net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.25)
    found = []
    with Server(home, rank) as server, Vault.at(home).writer(rank, strict=True) as writer:
        for number in range(SAVES):
            optimizer.zero_grad()
            model(torch.randn(4, 5) * (rank + 1)).square().mean().backward()
            optimizer.step()
            if number == odd and rank == 1:
                with torch.no_grad():
                    next(model.parameters()).mul_(2)
            found.append(writer.save(number, (model, optimizer)).replays)
            for _ in range(2):
                dist.barrier()
                server.turn()
            dist.barrier()
            state = {"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, optimizer)}
            save(state, checkpoint_id=out / f"torch-{number}")
            if rank == 0:
                persist(home, out / f"vault-{number}")
            dist.barrier()
    torch.save(found, out / f"{rank}.found")
    dist.destroy_process_group()


def saved_by_both(home: Path, out: Path, act: Callable[[int, int, Path, Path], None]) -> list[list[int]]:
    """The number of replayed steps of each save, by rank.

    Each restore is compared with torch's own save.
    """
    Vault.make(home, ranks=RANKS, domains=RANKS, protect="mirror", replays=REPLAYS)
    run_ranks(act, home, out)
    demand_each_as_torch_saved_it(out, SAVES)
    return [torch.load(out / f"{rank}.found") for rank in range(RANKS)]


def test_where_one_rank_cannot_replay_all_save_all(tmp_path):
    found = saved_by_both(tmp_path / "job", tmp_path, partial(trains, "sharded", odd=2))
    assert found == [[0, 1, 0, 1, 2]] * RANKS


@pytest.mark.fault("Vaults", "the same with DDP, FSDP2 and both on two ranks", "the trained bits")
@pytest.mark.parametrize("way", WAYS)
def test_what_several_ranks_saved_of_gradients_is_what_torch_saved(tmp_path, way):
    home = tmp_path / "job"
    assert saved_by_both(home, tmp_path, partial(trains, way)) == [EXPECTED] * RANKS
    # Into another degree, with a domain lost, of the newest, which steps are made for.
    os.rename(home / "d1", tmp_path / "away")
    plan = ucpl.plan(f"vault:{home}", "dcp(fsdp=3)")
    assert any(str(node).startswith("recompute") for node in plan.nodes)
    ucpl.convert(f"vault:{home}", tmp_path / "three", "dcp(fsdp=3)")
    assert ucpl.compare(tmp_path / "three", tmp_path / f"torch-{SAVES - 1}")
    assert not ucpl.compare(tmp_path / "three", tmp_path / f"torch-{SAVES - 2}")


class Odd(nn.Linear):
    """One whose state is more than tensors."""

    extra: object = 1

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: object) -> None:
        self.extra = state


def cannot_say(rank: int, port: int, home: Path, out: Path) -> None:
    """The second rank's value cannot be serialized at the second save."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=RANKS, timeout=timedelta(seconds=30))
    stage = Odd(4, 4)
    model = nn.ModuleDict({f"stage{rank}": stage})
    optimizer = torch.optim.AdamW(model.parameters())
    found = []
    with Server(home, rank) as server, Vault.at(home).writer(rank, wait=1.0, beside=False) as writer:
        for number in range(4):
            optimizer.zero_grad()
            stage(torch.randn(3, 4)).square().sum().backward()
            optimizer.step()
            if rank == 1:
                stage.extra = (lambda: 0) if number == 1 else 1
            saved = writer.save(number, (model, optimizer))
            found.append((bool(saved), saved.replays))
            for _ in range(2):
                dist.barrier()
                server.turn()
            dist.barrier()
    torch.save(found, out / f"{rank}.found")
    dist.destroy_process_group()


def test_a_rank_that_cannot_say_what_it_has_keeps_no_other_waiting(tmp_path):
    Vault.make(tmp_path / "job", ranks=RANKS, domains=RANKS, protect="mirror", replays=REPLAYS)
    run_ranks(cannot_say, tmp_path / "job", tmp_path)
    for rank in range(RANKS):
        assert torch.load(tmp_path / f"{rank}.found") == [(True, 0), (False, 0), (True, 0), (True, 1)]


def unlike(rank: int, port: int, home: Path, out: Path) -> None:
    """Pipeline stages with two optimizers; only one is replayable."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=RANKS, timeout=timedelta(seconds=30))
    stage = nn.Linear(4, 4)
    model = nn.ModuleDict({f"stage{rank}": stage})
    kind = torch.optim.AdamW if rank == 0 else torch.optim.SGD
    optimizer = kind(model.parameters(), lr=0.1)
    found = []
    with Server(home, rank) as server, Vault.at(home).writer(rank, strict=True) as writer:
        for number in range(3):
            optimizer.zero_grad()
            stage(torch.randn(3, 4)).square().sum().backward()
            optimizer.step()
            found.append(writer.save(number, (model, optimizer)).replays)
            for _ in range(2):
                dist.barrier()
                server.turn()
            dist.barrier()
    torch.save(found, out / f"{rank}.found")
    dist.destroy_process_group()


def test_ranks_with_optimizers_of_two_kinds_save_all(tmp_path):
    Vault.make(tmp_path / "job", ranks=RANKS, domains=RANKS, protect="mirror", replays=REPLAYS)
    run_ranks(unlike, tmp_path / "job", tmp_path)
    for rank in range(RANKS):
        assert torch.load(tmp_path / f"{rank}.found") == [0, 0, 0]
