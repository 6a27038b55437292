"""Saves of gradients alone of several ranks: what comes back is what torch itself saved of them, in any other layout, too."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import ucpl
from tests.vault.test_shares import RANKS, run_ranks, same
from ucpl.vault import Vault
from ucpl.vault.persisting import persist
from ucpl.vault.server import Server

SAVES, REPLAYS = 5, 2
EXPECTED = [0, 1, 2, 0, 1]


def net() -> nn.Module:
    """Some that no two ranks share evenly, one of which a rank has nothing."""
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


def trains(way: str, rank: int, port: int, home: Path, out: Path) -> None:
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


@pytest.mark.parametrize("way", WAYS)
def test_what_several_ranks_saved_of_gradients_is_what_torch_saved(tmp_path, way):
    home = tmp_path / "job"
    Vault.make(home, ranks=RANKS, domains=RANKS, protect="mirror", replays=REPLAYS)
    run_ranks(partial(trains, way), home, tmp_path)
    for rank in range(RANKS):
        assert torch.load(tmp_path / f"{rank}.found") == EXPECTED
    digests = set()
    for number in range(SAVES):
        whole = []
        for name in ("torch", "vault"):
            dcp_to_torch_save(tmp_path / f"{name}-{number}", tmp_path / name)
            whole.append(torch.load(tmp_path / name, weights_only=False))
        assert same(*whole), f"save {number}"
        digests.add(str(whole[0]))
    assert len(digests) == SAVES
    # Into another degree, with a domain lost, of the newest, which steps are made for.
    os.rename(home / "d1", tmp_path / "away")
    plan = ucpl.plan(f"vault:{home}", "dcp(fsdp=3)")
    assert any(str(node).startswith("recompute") for node in plan.nodes)
    ucpl.convert(f"vault:{home}", tmp_path / "three", "dcp(fsdp=3)")
    assert ucpl.compare(tmp_path / "three", tmp_path / f"torch-{SAVES - 1}")
    assert not ucpl.compare(tmp_path / "three", tmp_path / f"torch-{SAVES - 2}")
