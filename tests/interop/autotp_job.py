"""AutoTP engines of a given degree, for ranks: `python autotp_job.py JOBS`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.interop import deepspeed_job  # sets DeepSpeed's environment variables first
from tests.interop import deepspeed_tp_job as tp_job

import deepspeed  # isort: skip
import torch
import torch.distributed as dist

from tests.interop.autotp_models import CONFIGS, WORDS, model_of

BATCH = 24


def batch(step: int) -> torch.Tensor:
    """Rows of tokens, each determined by the one before: (BATCH, 7)."""
    rows = [torch.randint(0, WORDS, (BATCH,), generator=torch.Generator().manual_seed(1000 + step))]
    for _ in range(6):
        rows.append((rows[-1] * 3 + 1) % WORDS)
    return torch.stack(rows, -1)


def config(run: dict[str, Any], spoil: float) -> dict[str, Any]:
    out = tp_job.common(run, BATCH * run["tp"] // dist.get_world_size(), spoil)
    if run["tp"] > 1:
        out["tensor_parallel"] = {"autotp_size": run["tp"], **run.get("tensor_parallel", {})}
    return out


def engine_of(run: dict[str, Any], seed: int, spoil: float) -> Any:
    torch.manual_seed(seed)
    made, *_ = deepspeed.initialize(model=model_of(run["class"]), config=config(run, spoil))
    return made


def losses(engine: Any, run: dict[str, Any], first: int, steps: int) -> list[float]:
    if run.get("is_still"):  # a class whose forward does not run on parts
        return []
    out = []
    tp, world = run["tp"], dist.get_world_size()
    share, mine = BATCH * tp // world, dist.get_rank() // tp
    for step in range(first, first + steps):
        x = batch(step)[mine * share : (mine + 1) * share]
        loss = engine(input_ids=x, labels=x, use_cache=False).loss
        engine.backward(loss)
        engine.step()
        total = loss.detach().double()
        dist.all_reduce(total)
        out.append(float(total) / world)
    return out


def weights(job: dict[str, Any]) -> dict[str, Any]:
    """A folder of weights from transformers, and a run with them.

    Returns the run's state and losses.
    """
    run = job["run"]
    engine = engine_of(run, seed=7, spoil=0.0)
    if dist.get_rank() == 0:
        engine.module.save_pretrained(job["folder"])
    truth = {name: {"weight": p.detach().clone()} for name, p in engine.module.named_parameters()}
    if dist.get_rank() == 0:
        torch.save(truth, job["truth"])
    return {"after": losses(engine, run, 0, 3)}


def warm(job: dict[str, Any]) -> dict[str, Any]:
    """Weights and masters from a folder that has no moments."""
    run = job["run"]
    engine = engine_of(run, seed=99, spoil=0.0)
    tp_job.scramble(engine, run)
    path, _ = engine.load_checkpoint(job["folder"], load_optimizer_states=False, load_lr_scheduler_states=False)
    if path is None:
        return {"error": "load_checkpoint found nothing"}
    truth = torch.load(job["truth"], weights_only=False)
    found = tp_job.whole_state(engine, run["tp"])
    wrong = [
        f"{name}/{state} differs"
        for name, states in truth.items()
        for state in ("weight", "fp32")
        if not torch.equal(found[name][state], states["weight"])
    ]
    return {"differences": wrong, "after": losses(engine, run, 0, 3)}


tp_job.engine_of, tp_job.losses = engine_of, losses
tp_job.JOBS |= {"weights": weights, "warm": warm}

if __name__ == "__main__":
    for name in CONFIGS:
        model_of(name)  # whose module is imported once, not by each rank
    deepspeed_job.main(tp_job.JOBS)
