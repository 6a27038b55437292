"""transformers' LlamaForCausalLM under DeepSpeed, for ranks: `python llama_job.py JOBS`.

Sequences, rate and optimizer are those of megatron_run at a steady rate, so that losses can be compared from one
framework to the other. Nothing of ucpl is in these processes.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("DS_BUILD_OPS", "0")

import deepspeed
import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.interop import deepspeed_job

SEQUENCE, BATCH = 8, 12  # as megatron_models, which imports Megatron


def engine_of(job: dict[str, Any], seed: int) -> Any:
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**job["config"]))
    decay = [p for p in model.parameters() if p.dim() > 1]
    still = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": still, "weight_decay": 0.0}]
    chosen = torch.optim.AdamW(groups, lr=job.get("rate", 0.5), betas=(0.9, 0.999), eps=1e-8)  # a load sets it right
    config = {
        "train_batch_size": BATCH,
        "train_micro_batch_size_per_gpu": BATCH // dist.get_world_size(),
        "zero_optimization": {"stage": job["stage"]},
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 0.0,  # DeepSpeed clips at 1 by default
        "zero_force_ds_cpu_optimizer": False,
    }
    made, *_ = deepspeed.initialize(model=model, optimizer=chosen, config=config)
    return made


def losses(engine: Any, first: int, steps: int) -> list[float]:
    out = []
    share = BATCH // dist.get_world_size()
    mine = slice(dist.get_rank() * share, (dist.get_rank() + 1) * share)
    for step in range(first, first + steps):
        told = torch.Generator().manual_seed(1000 + step)
        tokens = torch.randint(engine.module.config.vocab_size, (BATCH, SEQUENCE + 1), generator=told)[mine]
        found = engine(tokens[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(found.flatten(0, 1), tokens[:, 1:].flatten())
        engine.backward(loss)
        engine.step()
        total = loss.detach().double()
        dist.all_reduce(total)
        out.append(float(total) / dist.get_world_size())
    return out


def train(job: dict[str, Any]) -> dict[str, Any]:
    engine = engine_of(job, seed=7)
    before = losses(engine, 0, job["steps"])
    engine.save_checkpoint(job["folder"])
    if dist.get_rank() == 0:
        engine.module.config.architectures = ["LlamaForCausalLM"]
        engine.module.config.save_pretrained(job["folder"])
    return {"before": before, "after": losses(engine, job["steps"], 3)}


def load(job: dict[str, Any]) -> dict[str, Any]:
    """Into an engine of other values and another rate."""
    engine = engine_of(job, seed=99)
    engine.load_checkpoint(job["folder"])
    return {"after": losses(engine, job["steps"], 3), "rates": [g["lr"] for g in engine.optimizer.param_groups]}


if __name__ == "__main__":
    deepspeed_job.main({do.__name__: do for do in (train, load)})
