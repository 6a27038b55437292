"""FSDP2 on gloo ranks, saved and loaded by Accelerate's own functions.

`save_state` and the Trainer call them on GPUs.

python -m torch.distributed.run --nproc_per_node 2 tests/interop/fsdp_folders_job.py save FOLDER RESULT
"""

from __future__ import annotations

import sys
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from accelerate import PartialState
from accelerate.checkpointing import save_accelerator_state
from accelerate.utils import FullyShardedDataParallelPlugin, fsdp_utils
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict
from torch.distributed.fsdp import fully_shard

from tests.interop.jobs import leave

TOKENS, BATCH, STEPS = 11, 12, 3


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, 6)
        self.up, self.norm, self.down = nn.Linear(6, 9), nn.LayerNorm(9), nn.Linear(9, TOKENS, bias=False)
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down(self.norm(torch.relu(self.up(self.embed(x)))))
        return out


def losses(net: nn.Module, chosen: torch.optim.Optimizer, schedule: Any, first: int) -> list[float]:
    """Of all ranks together: each has its share of one batch."""
    out, share = [], BATCH // dist.get_world_size()
    for step in range(first, first + STEPS):
        every = torch.randint(0, TOKENS, (BATCH,), generator=torch.Generator().manual_seed(step))
        x = every[dist.get_rank() * share :][:share]
        loss = F.cross_entropy(net(x), (x * 3 + 1) % TOKENS)
        loss.backward()
        chosen.step()
        schedule.step()
        chosen.zero_grad()
        told = loss.detach().clone()
        dist.all_reduce(told)
        out.append(float(told) / dist.get_world_size())
    return out


def main(do: str, folder: str, result: str) -> None:
    PartialState(cpu=True)
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    rank = dist.get_rank()
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, state_dict_type="SHARDED_STATE_DICT", cpu_ram_efficient_loading=False
    )
    # Accelerate prepares FSDP on accelerators only: its functions get a stand-in.
    accelerator = SimpleNamespace(
        num_processes=dist.get_world_size(), process_index=rank, is_main_process=rank == 0, is_fsdp2=True,
        wait_for_everyone=dist.barrier,
    )  # fmt: skip
    torch.manual_seed(0 if do == "save" else 99)
    net = Net()
    fully_shard(net.up)
    fully_shard(net)
    wide, flat = ([p for p in net.parameters() if (p.ndim > 1) == is_wide] for is_wide in (True, False))
    chosen = torch.optim.AdamW(
        [{"params": wide, "lr": 1e-2, "weight_decay": 0.1}, {"params": flat, "lr": 5e-3, "weight_decay": 0.0}]
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(chosen, lambda step: 1 / (1 + 0.1 * step))
    losses(net, chosen, schedule, 0 if do == "save" else 50)  # an engine that loads nothing has other numbers
    if do == "save":
        net.get_buffer("seen").fill_(3.0)
        Path(folder).mkdir(parents=True, exist_ok=True)
        fsdp_utils.save_fsdp_model(plugin, accelerator, net, folder, 0)
        fsdp_utils.save_fsdp_optimizer(plugin, accelerator, chosen, net, folder, 0)
        save_accelerator_state(folder, [], [], [schedule], [], rank, STEPS)
    else:
        fsdp_utils.load_fsdp_model(plugin, accelerator, net, folder, 0)
        fsdp_utils.load_fsdp_optimizer(plugin, accelerator, chosen, net, folder, 0)
        schedule.load_state_dict(torch.load(Path(folder) / "scheduler.bin", weights_only=False))
    full = StateDictOptions(full_state_dict=True)
    held: dict[str, Any] = {"model": get_model_state_dict(net, options=full)}
    held["optimizer"] = get_optimizer_state_dict(net, chosen, options=full)
    held = deepcopy(held)  # on one rank, these are the tensors that train on
    after = losses(net, chosen, schedule, STEPS)
    if rank == 0:
        torch.save({**held, "after": after}, result)
    leave()


if __name__ == "__main__":
    main(*sys.argv[1:])
