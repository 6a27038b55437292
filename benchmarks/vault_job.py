"""One job that times what a vault does beside what PyTorch has for it. Run by torchrun, with the vault served beside it.

torchrun --nproc-per-node 4 benchmarks/vault_job.py save|load HOME FOLDER ROUNDS: the first rank prints JSON. `save` saves
DTensors (1 GiB in all) in each way in turn; `load` reads them back into tensors that are there.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import ucpl
from ucpl.vault import Vault

TENSORS, ROWS, WIDE = 64, 2048, 2048  # of f32: 1 GiB in all


def timed(act: Callable[[], object]) -> float:
    """Seconds until the last rank is done."""
    dist.barrier()
    begin = time.perf_counter()
    act()
    dist.barrier()
    return time.perf_counter() - begin


def state_of(mesh: DeviceMesh, dim: int, value: float | None) -> dict[str, DTensor]:
    """The state, cut along a dim: numbers of its elements, or one value in all."""
    found = {}
    for i in range(TENSORS):
        shape = [ROWS, WIDE]
        shape[dim] //= mesh.size()
        if value is None:
            low = dist.get_rank() * shape[dim]
            whole = torch.arange(ROWS * WIDE, dtype=torch.float32).view(ROWS, WIDE) + i
            local = whole.narrow(dim, low, shape[dim]).clone(memory_format=torch.contiguous_format)
        else:
            local = torch.full(shape, value)
        found[f"w{i}"] = DTensor.from_local(local, mesh, [Shard(dim)], run_check=False)
    return found


def saved(home: Path, folder: Path, rounds: int) -> dict[str, list[float]]:
    rank = dist.get_rank()
    state = state_of(init_device_mesh("cpu", (dist.get_world_size(),)), 0, None)
    writer = Vault.at(home).writer(rank, strict=True)
    found: dict[str, list[float]] = {
        "vault": [],
        "counts": [],
        "torch.save": [],
        "async_save": [],
        "async": [],
    }
    apart = dist.new_group()  # what saves beside the job speaks of its own
    for i in range(rounds):
        begin = time.perf_counter()
        found["vault"].append(timed(partial(writer.save, i, state)))
        mine = writer.committed()
        while mine is None or mine[1] != i:
            time.sleep(0.002)
            mine = writer.committed()
        dist.barrier()
        found["counts"].append(time.perf_counter() - begin)
        local = {name: t.to_local() for name, t in state.items()}
        found["torch.save"].append(timed(partial(torch.save, local, folder / f"local-{rank}.pt")))
        dist.barrier()
        begin = time.perf_counter()
        pending = async_save(state, checkpoint_id=folder / "dcp", process_group=apart)
        dist.barrier()
        found["async_save"].append(time.perf_counter() - begin)
        pending.result()
        dist.barrier()
        found["async"].append(time.perf_counter() - begin)
    return found


def loaded(home: Path, folder: Path, rounds: int) -> dict[str, list[float]]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    rank = dist.get_rank()
    found: dict[str, list[float]] = {"vault": [], "torch.load": [], "dcp": [], "vault, another": [], "dcp, another": []}
    same, other = state_of(mesh, 0, -1.0), state_of(mesh, 1, -1.0)
    url = f"vault:{home}"

    def ours(state: dict[str, DTensor]) -> None:
        dcp.load(state, storage_reader=ucpl.StorageReader(url, model="{name}"))

    for _ in range(rounds):
        found["vault"].append(timed(lambda: ours(same)))
        found["vault, another"].append(timed(lambda: ours(other)))
        found["dcp"].append(timed(lambda: dcp.load(same, checkpoint_id=folder / "dcp")))
        found["dcp, another"].append(timed(lambda: dcp.load(other, checkpoint_id=folder / "dcp")))
        found["torch.load"].append(timed(lambda: torch.load(folder / f"local-{rank}.pt", weights_only=True)))
    wanted = state_of(mesh, 0, None)
    assert all(torch.equal(same[name].to_local(), t.to_local()) for name, t in wanted.items())
    return found


def main() -> None:
    what, home, folder, rounds = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4])
    dist.init_process_group("cpu:gloo")
    torch.set_num_threads(1)
    found = (saved if what == "save" else loaded)(home, folder, rounds)
    if dist.get_rank() == 0:
        sys.stdout.write(json.dumps(found) + "\n")
        sys.stdout.flush()
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main()
