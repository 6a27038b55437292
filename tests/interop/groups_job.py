"""Engines with requested groups load folders, and report their optimizers.

`python groups_job.py JOBS`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import deepspeed
import torch

from tests.interop import deepspeed_job


class Model(torch.nn.Module):
    def __init__(self, shapes: dict[str, list[int]], frozen: list[str]) -> None:
        super().__init__()
        for name, shape in shapes.items():
            self.register_parameter(name, torch.nn.Parameter(torch.zeros(shape), requires_grad=name not in frozen))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        every: torch.Tensor = sum((p.square().sum() for p in self.parameters()), start=batch.sum())
        return every


def load(job: dict[str, Any]) -> dict[str, Any]:
    """The rate and decay of groups, and first elements of parameters."""
    model = Model(job["shapes"], job["frozen"])
    held = dict(model.named_parameters())
    groups = [{"params": [held[name] for name in names], "lr": 9.0, "weight_decay": 9.0} for names in job["groups"]]
    config = {
        "train_batch_size": 1,
        "zero_optimization": {"stage": job["stage"], "stage3_param_persistence_threshold": 0},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 1_000_000,
        "checkpoint": {"load_universal": job["universal"]},
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(groups), config=config)
    path, _ = engine.load_checkpoint(job["folder"], load_lr_scheduler_states=False)
    if path is None:
        return {"error": "load_checkpoint found nothing"}
    inner = getattr(engine.optimizer, "optimizer", engine.optimizer)
    return {"groups": [[group["lr"], group["weight_decay"]] for group in inner.param_groups]}


if __name__ == "__main__":
    deepspeed_job.main({"load": load})
