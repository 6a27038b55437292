"""One job that times a vault against PyTorch's ways.

Run by torchrun.

torchrun --nproc-per-node 4 benchmarks/vault_job.py save|load|train|replay HOME FOLDER ROUNDS: the first rank prints JSON.
`save` saves DTensors (1 GiB in all) in each way in turn, and copies them, which every way has to do; `load` reads them
back into tensors that are there; `train` trains a small GPT, and saves it and its optimizer after each step, in each way in
turn; `replay` trains it with a vault that keeps gradients, and reads the vault after each save.
"""

from __future__ import annotations

import json
import mmap
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional as F

import ucpl
from ucpl.vault import Vault

TENSORS, ROWS, WIDE = 64, 2048, 2048  # of f32: 1 GiB in all
WIDTH, BLOCKS, WORDS, LONG, BATCH = 256, 6, 2048, 128, 4  # of the GPT


def timed(act: Callable[[], object]) -> float:
    """Seconds until the last rank is done."""
    dist.barrier()
    begin = time.perf_counter()
    act()
    dist.barrier()
    return time.perf_counter() - begin


def state_of(mesh: DeviceMesh, dim: int, value: float | None) -> dict[str, DTensor]:
    """The state, cut along a dim.

    Elements have their numbers, or one value.
    """
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
    writer = Vault.at(home).writer(rank)
    local = {name: t.to_local() for name, t in state.items()}
    copy = _Copy(folder / f"copy-{rank}", local)
    found: dict[str, list[float]] = {
        "copy": [],
        "vault": [],
        "counts": [],
        "torch.save": [],
        "async_save": [],
        "async": [],
    }
    apart = dist.new_group()  # the background save communicates in a group of its own
    for i in range(rounds):
        found["copy"].append(timed(copy))
        begin = time.perf_counter()
        found["vault"].append(timed(partial(writer.save, i, state)))
        mine = writer.committed()
        while mine is None or mine[1] != i:
            time.sleep(0.002)
            mine = writer.committed()
        dist.barrier()
        found["counts"].append(time.perf_counter() - begin)
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


class _Copy:
    """Copies tensors into memory that is there, and looks at nothing."""

    def __init__(self, path: Path, tensors: dict[str, torch.Tensor]) -> None:
        size = sum(t.nbytes for t in tensors.values())
        with path.open("w+b") as file:
            os.posix_fallocate(file.fileno(), 0, size)
            self.room = memoryview(mmap.mmap(file.fileno(), size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE))
        self.parts = [t.reshape(-1).view(torch.uint8).numpy().data for t in tensors.values()]

    def __call__(self) -> None:
        at = 0
        for part in self.parts:
            self.room[at : at + len(part)] = part
            at += len(part)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.after = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (8, -1)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.after(x))))


class Gpt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Embedding(WORDS, WIDTH), nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.embed(words[:, :-1])
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), words[:, 1:].flatten())


def gpt() -> tuple[nn.Module, torch.optim.Optimizer]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = Gpt()
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def stepped(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.randint(0, WORDS, (BATCH, LONG))).backward()
    optimizer.step()


def replayed(home: Path, folder: Path, rounds: int) -> dict[str, list[float]]:
    model, optimizer = gpt()
    into = gpt()
    writer = Vault.at(home).writer(dist.get_rank())
    found: dict[str, list[float]] = {"step": [], "whole": [], "gradients": []}
    for i in range(rounds):
        found["step"].append(timed(partial(stepped, model, optimizer)))
        dist.barrier()
        begin = time.perf_counter()
        steps = writer.save(i, (model, optimizer)).replays
        dist.barrier()
        taken = time.perf_counter() - begin
        while (mine := writer.committed()) is None or mine[1] != i:
            time.sleep(0.002)
        dist.barrier()
        if i >= 2:
            found["gradients" if steps else "whole"].append(taken)
            found.setdefault(f"read {steps}", []).append(timed(partial(ucpl.load_into, *into, f"vault:{home}")))
    for one, other in zip(model.parameters(), into[0].parameters(), strict=True):
        assert torch.equal(one.to_local(), other.to_local())
    return found


def trained(home: Path, folder: Path, rounds: int) -> dict[str, list[float]]:
    model, optimizer = gpt()
    rank, apart = dist.get_rank(), dist.new_group()
    writer = Vault.at(home).writer(rank)

    def state() -> dict[str, object]:
        return {"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, optimizer)}

    found: dict[str, list[float]] = {"step": [], "vault": [], "torch.save": [], "async_save": [], "bytes": []}
    for i in range(rounds):
        found["step"].append(timed(partial(stepped, model, optimizer)))
        found["vault"].append(timed(partial(writer.save, i, (model, optimizer))))
        while (mine := writer.committed()) is None or mine[1] != i:
            time.sleep(0.002)
        found["torch.save"].append(timed(lambda: torch.save(state(), folder / f"trained-{rank}.pt")))
        dist.barrier()
        begin = time.perf_counter()
        pending = async_save(state(), checkpoint_id=folder / "trained", process_group=apart)
        dist.barrier()
        found["async_save"].append(time.perf_counter() - begin)
        pending.result()
        found["bytes"].append(3.0 * sum(p.nbytes for p in model.parameters()))
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
    found = {"save": saved, "load": loaded, "train": trained, "replay": replayed}[what](home, folder, rounds)
    if dist.get_rank() == 0:
        sys.stdout.write(json.dumps(found) + "\n")
        sys.stdout.flush()
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main()
