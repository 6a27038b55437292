"""Successive saves of a running job equal torch's own saves.

Ranks may skip the exchange of plans or repeat it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.fsdp import fully_shard

import ucpl
from tests.forking import run_all
from ucpl.conversion.opening import open_checkpoint
from ucpl.storage.resolve_url import resolve_source
from ucpl.storage.vaults.memory import ChunkedFile
from ucpl.vault import Vault
from ucpl.vault.persisted import persist
from ucpl.vault.server import Server

RANKS = 2


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> Iterator[tuple[dict[str, Any], bool]]:
    """The states to save; True if only their data changed.

    Each state is made on request.
    """

    def state(**more: object) -> dict[str, Any]:
        model(torch.ones(2, 5) * (rank + 1)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        found = {"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, optimizer)}
        return {**more, **found}

    yield state(), False
    yield state(), True
    optimizer.param_groups[0]["lr"] = 0.1 / 3
    yield state(), True
    optimizer.param_groups[0]["betas"] = (0.5, 0.75)
    yield state(), True
    yield state(epoch="one"), False  # one value more
    # a value of another length, with others behind it in the first file
    yield state(epoch="a good deal longer " * 100), True
    alone = {"alone": torch.arange(3.0)} if rank == 1 else {}
    yield state(**alone), False  # one rank has more: both speak of it
    yield state(**alone), True
    yield state(), False
    yield {"model": get_model_state_dict(model)}, False


def saves(rank: int, port: int, home: Path, out: Path) -> None:
    """A rank that saves, with its server; torch saves the same state."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.GELU(), nn.Linear(7, 3))
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.25)
    known = []
    with Server(home, rank) as server, Vault.at(home).writer(rank, strict=True) as writer:
        for number, (state, expected) in enumerate(steps(model, optimizer, rank)):
            writer.save(number, state)
            known.append((writer._shares is not None and writer._shares.is_known, expected))
            for _ in range(2):
                dist.barrier()
                server.turn()
            dist.barrier()
            save(state, checkpoint_id=out / f"torch-{number}")
            if rank == 0:
                persist(home, out / f"vault-{number}")
            dist.barrier()
    torch.save(known, out / f"{rank}.known")
    dist.destroy_process_group()


def run_ranks(
    act: Callable[[int, int, Path, Path], None], home: Path, out: Path, meanwhile: Callable[[], None] = lambda: None
) -> None:
    run_all(RANKS, act, home, out, meanwhile=meanwhile)


def demand_each_as_torch_saved_it(out: Path, saves: int) -> None:
    """Check that each persisted save equals torch's own.

    No two saves are equal.
    """
    digests = set()
    for number in range(saves):
        whole = []
        for name in ("torch", "vault"):
            dcp_to_torch_save(out / f"{name}-{number}", out / name)
            whole.append(torch.load(out / name, weights_only=False))
        assert same(*whole), f"save {number}"
        digests.add(str(whole[0]))
    assert len(digests) == saves


def test_each_save_is_what_torch_would_have_saved(tmp_path):
    home = tmp_path / "job"
    Vault.make(home, ranks=RANKS, domains=RANKS, protect="mirror")
    run_ranks(saves, home, tmp_path)
    for rank in range(RANKS):
        known = torch.load(tmp_path / f"{rank}.known")
        assert len(known) == 10 and [found for found, _ in known] == [expected for _, expected in known]
    demand_each_as_torch_saved_it(tmp_path, len(known))


def wait_for(path: Path) -> None:
    end = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < end, path
        time.sleep(0.01)


def loads(rank: int, port: int, home: Path, out: Path) -> None:
    """The second rank reads before a commit, the first one after it.

    Then both load.
    """
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    url = f"vault:{home}"
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    if rank == 0:
        wait_for(out / "saved")
    reader = ucpl.StorageReader(url)
    if rank == 1:
        (out / "looked").touch()
    found = []
    for one in (reader, None):
        dist.barrier()
        into = {"w": torch.zeros(5, 2)}
        load({"model": into}, storage_reader=one or ucpl.StorageReader(url))
        found.append(into["w"])
    torch.save(found, out / f"{rank}.loaded")
    dist.destroy_process_group()


def test_ranks_that_see_two_generations_load_one(tmp_path):
    home = tmp_path / "job"
    Vault.make(home, ranks=1, domains=1, protect="none")

    def meanwhile() -> None:
        wait_for(tmp_path / "looked")
        writer.save(2, {"model": {"w": torch.full((5, 2), 2.0)}})
        server.turn()
        (tmp_path / "saved").touch()

    with Server(home, 0) as server, Vault.at(home).writer(0, strict=True) as writer:
        writer.save(1, {"model": {"w": torch.ones(5, 2)}})
        server.turn()
        run_ranks(loads, home, tmp_path, meanwhile)
    for rank in range(RANKS):
        first, second = torch.load(tmp_path / f"{rank}.loaded")
        assert torch.equal(first, torch.ones(5, 2)), f"rank {rank}: the one that both saw"
        assert torch.equal(second, torch.full((5, 2), 2.0)), f"rank {rank}: the newest"


def test_a_checkpoint_is_opened_without_its_tensors(tmp_path, monkeypatch):
    """Only the headers, which are adjacent in the arena.

    No chunk of a tensor is read, and nothing ahead.
    """
    state = {f"w{i}": torch.full((1 << 18,), float(i)) for i in range(6)}  # 1 MiB each
    with (
        Server(Vault.make(tmp_path / "job", ranks=1, domains=1, protect="none").home, 0) as server,
        Vault.at(tmp_path / "job").writer(0, strict=True) as writer,
    ):
        writer.save(1, {"model": state})
        server.turn()
    read: list[int] = []
    before = ChunkedFile._got

    def counted(piece: ChunkedFile, out: Any, position: int) -> bool:
        read.append(len(out))
        return before(piece, out, position)

    monkeypatch.setattr(ChunkedFile, "_got", counted)
    monkeypatch.setattr("concurrent.futures.ThreadPoolExecutor", None)
    assert len(open_checkpoint(resolve_source(f"vault:{tmp_path / 'job'}")).state.tensors) == 6
    assert 0 < sum(read) < 64 << 10 and len(read) == 1
    load({"model": state}, storage_reader=ucpl.StorageReader(f"vault:{tmp_path / 'job'}"))
    assert sorted(read)[-6:] == [1 << 20] * 6  # directly into their destination, each once


def same(one: object, other: object) -> bool:
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and torch.equal(one, other)
    if isinstance(one, dict):
        return isinstance(other, dict) and one.keys() == other.keys() and all(same(v, other[k]) for k, v in one.items())
    if isinstance(one, list | tuple):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and one == other
