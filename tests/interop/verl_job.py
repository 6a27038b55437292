"""FSDP2 on gloo ranks, saved and loaded by verl's FSDPCheckpointManager. As dcp_job.

verl asks for some forty packages, which this environment lacks. If VERL names a folder with its source, its own manager is
imported, with stand-ins for its configuration, its log and LoRA; else `Manager` has the statements of verl 0.9.1.
"""

from __future__ import annotations

import json
import os
import random
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.interop import dcp_job, deepspeed_job


class Manager:
    """Statements of verl/utils/checkpoint/fsdp_checkpoint_manager.py and checkpoint_manager.py."""

    def __init__(self, model: Any, optimizer: Any, lr_scheduler: Any) -> None:
        self.model, self.optimizer, self.lr_scheduler = model, optimizer, lr_scheduler
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()

    def path(self, folder: str, what: str) -> str:
        return os.path.join(folder, f"{what}_world_size_{self.world_size}_rank_{self.rank}.pt")

    def load_checkpoint(self, local_path: str) -> None:
        self.model.load_state_dict(torch.load(self.path(local_path, "model"), weights_only=False))
        self.optimizer.load_state_dict(torch.load(self.path(local_path, "optim"), weights_only=False))
        extra = torch.load(self.path(local_path, "extra_state"), weights_only=False)
        if "rng" in extra:
            torch.set_rng_state(extra["rng"]["cpu"])
        state = extra["lr_scheduler"]
        if state is not None and self.lr_scheduler is not None:
            self.lr_scheduler.load_state_dict(state)
        dist.barrier()

    def save_checkpoint(self, local_path: str) -> None:
        os.makedirs(local_path, exist_ok=True)
        torch.save(self.model.state_dict(), self.path(local_path, "model"))
        torch.save(self.optimizer.state_dict(), self.path(local_path, "optim"))
        rng = {"cpu": torch.get_rng_state(), "numpy": np.random.get_state(), "random": random.getstate()}
        torch.save({"lr_scheduler": self.lr_scheduler.state_dict(), "rng": rng}, self.path(local_path, "extra_state"))
        if self.rank == 0:
            os.makedirs(os.path.join(local_path, "huggingface"), exist_ok=True)
            self.model.config.save_pretrained(os.path.join(local_path, "huggingface"))
            config = {"FSDP_version": 2, "world_size": self.world_size}
            Path(local_path, "fsdp_config.json").write_text(json.dumps(config, indent=4))
        dist.barrier()


class Config:
    """Methods of a configuration of transformers that the manager calls."""

    name_or_path = ""

    def save_pretrained(self, folder: str) -> None:
        Path(folder, "config.json").write_text('{"model_type": "net"}')


def manager_of(run: Run) -> Any:
    module: Any = run.module
    module.config, module.can_generate = Config(), lambda: False
    of = _imported(os.environ["VERL"]) if os.environ.get("VERL") else Manager
    return of(module, run.optimizer, lr_scheduler=run.schedule)


def _imported(source: str) -> Any:
    for name in ("verl", "verl.utils", "verl.utils.checkpoint", "verl.trainer"):
        module = sys.modules[name] = ModuleType(name)
        module.__path__ = [os.path.join(source, *name.split("."))]
    stubs: dict[str, dict[str, object]] = {
        "omegaconf": {"DictConfig": dict},
        "verl.trainer.config": {"CheckpointConfig": dict},
        "verl.utils.logger": {"log_with_rank": lambda *_, **__: None},
        "verl.utils.model": {"check_exclude_modules": None, "check_target_modules": None},
    }
    for name, held in stubs.items():
        sys.modules[name] = ModuleType(name)
        vars(sys.modules[name]).update(held)
    from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager  # type: ignore[import-not-found]

    return FSDPCheckpointManager


class Run(dcp_job.Run):
    """`copies`: verl's ddp, for HSDP."""

    def cut(self, module: nn.Module, dp: int, tp: int) -> nn.Module:
        copies = self.run.get("copies", 1)
        shape = (copies, dp // copies) if copies > 1 else (dp,)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("ddp", "fsdp")[-len(shape) :])
        for block in getattr(module, "blocks", ()):
            fully_shard(block, mesh=mesh)
        fully_shard(module, mesh=mesh)
        return module

    def save(self, folder: str) -> None:
        manager_of(self).save_checkpoint(folder)

    def load(self, folder: str, steps: int) -> None:
        manager_of(self).load_checkpoint(folder)
        if not self.run.get("sched", True):  # the source's framework has no such schedule
            self.schedule.last_epoch = steps
            self.schedule.base_lrs = [group["initial_lr"] for group in self.optimizer.param_groups]


def verl_train(job: dict[str, Any]) -> dict[str, Any]:
    """Train, save, and train on."""
    run = Run(job["run"], seed=7, spoil=0.0)
    before = run.losses(0, job["steps"])
    run.save(job["folder"])
    dcp_job.keep(job, run.facts())
    return {"before": before, "after": run.losses(job["steps"], 3)}


def verl_load(job: dict[str, Any]) -> dict[str, Any]:
    """Load into a spoiled run, compare, train on."""
    run = Run(job["run"], seed=99, spoil=0.25)
    run.load(job["folder"], job["steps"])
    truth = dcp_job.common(torch.load(job["truth"], weights_only=False))
    found = deepspeed_job.differences(run.facts(), truth)
    return {"differences": found, "after": run.losses(job["steps"], 3)}


if __name__ == "__main__":
    others = (dcp_job.fsdp_train, dcp_job.fsdp_load, dcp_job.engine_train, dcp_job.engine_load)
    deepspeed_job.main({do.__name__: do for do in (verl_train, verl_load, *others)})
