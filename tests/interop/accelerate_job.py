"""A training loop with Accelerate and DeepSpeed, for ranks: `python accelerate_job.py JOBS`.

One process group does all jobs of a world size in turn. `train` calls `save_state` in the middle and continues; `load`
resumes by `load_state` in a model of other numbers, and reports differences: in the engine's state, the schedule,
objects of the user, and random numbers.
"""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("DS_BUILD_OPS", "0")

import numpy as np
import torch
import torch.distributed as dist
from accelerate import Accelerator, DeepSpeedPlugin, PartialState
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DataLoaderConfiguration, DummyScheduler

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.interop import deepspeed_job, trainer_job
from tests.interop.trainer_job import BATCH, Data

SAVED, STEPS = 2, 4  # the step that is saved, and all that one epoch has


class Seen:
    """An object of the user's own, registered for checkpointing."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def state_dict(self) -> dict[str, Any]:
        return {"losses": list(self.losses), "worst": torch.tensor(self.losses).max()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.losses = list(state["losses"])


class Loop:
    """A loop as people write it with Accelerate."""

    def __init__(self, run: dict[str, Any], seed: int, spoil: float) -> None:
        AcceleratorState._reset_state()
        GradientState._reset_state()
        random.seed(seed + dist.get_rank()), np.random.seed(seed + dist.get_rank()), torch.manual_seed(7)
        self.accelerator = Accelerator(
            deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config(run)),
            dataloader_config=DataLoaderConfiguration(split_batches=True, use_seedable_sampler=True, data_seed=5),
        )
        model = trainer_job.MODELS[run["model"]](run.get("dropout", 0.0))
        if run.get("lora"):
            model = trainer_job.adapted(model, bool(spoil))
        if spoil:  # except frozen parameters under an adapter: no checkpoint has them
            with torch.no_grad():
                for p in model.parameters():
                    if p.requires_grad:
                        p.copy_(torch.randn_like(p))
        torch.manual_seed(seed + dist.get_rank())
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=5e-3 + spoil, weight_decay=0.1 + spoil)
        loader = torch.utils.data.DataLoader(Data(), batch_size=BATCH, shuffle=True)
        self.engine, self.optimizer, self.schedule, self.loader = self.accelerator.prepare(
            model, optimizer, self._schedule(run, optimizer), loader
        )
        self.seen = Seen()
        self.accelerator.register_for_checkpointing(self.seen)

    def _schedule(self, run: dict[str, Any], optimizer: torch.optim.Optimizer) -> Any:
        if run.get("schedule"):  # DeepSpeed's own, which the engine keeps
            return DummyScheduler(optimizer, total_num_steps=STEPS, warmup_num_steps=2)
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + 0.1 * step))

    def losses(self, first: int, last: int) -> list[float]:
        """Steps first to last - 1 of the first epoch."""
        out = []
        batches = self.accelerator.skip_first_batches(self.loader, first)
        for _, batch in zip(range(first, last), batches, strict=False):
            loss = self.engine(**batch).loss
            self.accelerator.backward(loss)
            self.optimizer.step()
            self.schedule.step()
            self.optimizer.zero_grad()
            total = loss.detach().double()
            dist.all_reduce(total)
            out.append(float(total) / dist.get_world_size())
        self.seen.losses += out
        return out

    def facts(self) -> dict[str, Any]:
        return {
            "params": deepspeed_job.whole_state(self.engine),
            "seen": list(self.seen.losses),
            "schedule": self.schedule.scheduler.state_dict(),
            "step": self.accelerator.step,
        }


def config(run: dict[str, Any]) -> dict[str, Any]:
    """A user's configuration for Accelerate, without values that Accelerate sets."""
    out: dict[str, Any] = {
        "zero_optimization": {"stage": run["stage"], "stage3_param_persistence_threshold": 0},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "gradient_clipping": 1.0,
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": 1,
        "steps_per_print": 1_000_000,
    }
    if run.get("schedule"):
        out["scheduler"] = {
            "type": "WarmupDecayLR",
            "params": {
                "warmup_min_lr": 0.0, "warmup_max_lr": 5e-3, "warmup_num_steps": 2, "total_num_steps": 20,
            },
        }  # fmt: skip
    return out


def drawn() -> list[float]:
    """The next random number of each kind on this rank."""
    return [random.random(), float(np.random.random()), float(torch.rand(1))]


def every_rank(value: Any) -> list[Any]:
    out: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(out, value)
    return out


def train(job: dict[str, Any]) -> dict[str, Any]:
    """Train, save, and train on: the losses that a restart must meet."""
    loop = Loop(job["run"], seed=11, spoil=0.0)
    before = loop.losses(0, SAVED)
    adapter = {"exclude_frozen_parameters": True} if job["run"].get("lora") else {}
    loop.accelerator.save_state(job["folder"], **adapter)
    truth = loop.facts()
    numbers = every_rank(drawn())
    if dist.get_rank() == 0:
        torch.save(truth, job["truth"])
    return {"before": before, "after": loop.losses(SAVED, STEPS), "drawn": numbers}


def load(job: dict[str, Any]) -> dict[str, Any]:
    """Load into a loop whose numbers are all others, compare, train on."""
    loop = Loop(job["run"], seed=99, spoil=0.25)
    adapter = {"load_module_strict": False} if job["run"].get("lora") else {}
    loop.accelerator.load_state(job["folder"], **adapter)
    numbers = every_rank(drawn())
    truth = torch.load(job["truth"], weights_only=False)
    found = deepspeed_job.differences(loop.facts(), truth)
    return {"differences": found, "drawn": numbers, "after": loop.losses(SAVED, STEPS)}


if __name__ == "__main__":
    deepspeed_job.main({"train": train, "load": load}, begin=lambda: PartialState(cpu=True))
