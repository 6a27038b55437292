"""A small FSDP2 training under Slurm.

It saves after each step, and resumes from the path of `ucpl resume`.

sbatch examples/slurm/train.sbatch
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

BATCH = 12  # of all ranks


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--save", required=True)
    parser.add_argument("--resume", default="")
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()
    rank, world = int(os.environ["SLURM_PROCID"]), int(os.environ["SLURM_NTASKS"])
    dist.init_process_group("gloo", rank=rank, world_size=world)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, 30), nn.Tanh(), nn.Linear(30, 10))
    fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    first = 0
    if options.resume:
        weights, states = get_state_dict(model, optimizer)
        held = {"model": weights, "optimizer": states, "step": torch.tensor(0)}
        load(held, checkpoint_id=options.resume)
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states)
        first = int(held["step"])
    share = BATCH // world
    for step in range(first, options.steps):
        every = torch.randn(BATCH, 10, generator=torch.Generator().manual_seed(step))
        x = every[rank * share : (rank + 1) * share]
        loss = (model(x) - x.flip(1)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        if rank == 0:
            print(f"step {step} loss {mean.item() / world:.6f}", flush=True)
        weights, states = get_state_dict(model, optimizer)
        held = {"model": weights, "optimizer": states, "step": torch.tensor(step + 1)}
        save(held, checkpoint_id=f"{options.save}/step-{step + 1}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
