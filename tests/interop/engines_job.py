"""Engines of DeepSpeed that `ucpl.load_into` fills, for ranks.

`python engines_job.py JOBS`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

import ucpl
from tests.interop import dcp_job, deepspeed_job
from tests.interop.jobs import differences


def fill(job: dict[str, Any]) -> dict[str, Any]:
    """Fill a spoiled engine, compare it with the saved state, and train."""
    run = job["run"]
    engine = deepspeed_job.engine_of(run, seed=99, spoil=0.25)
    if run.get("warm"):  # it has moments and numbers of its own
        deepspeed_job.losses(engine, 0, 1)
    reader = ucpl.load_into(engine, engine.optimizer, job["folder"])
    truth, mine = torch.load(job["truth"], weights_only=False), deepspeed_job.facts(engine, {})
    if run.get("scripted"):  # a schedule and counters that the source's framework does not have
        engine.lr_scheduler.last_epoch = job["steps"]
        engine.lr_scheduler.base_lrs = [group["initial_lr"] for group in engine.optimizer.param_groups]
        truth, mine = dcp_job.common(truth), dcp_job.common(mine)
    truth.pop("client", None), mine.pop("client", None)
    read = torch.tensor(float(reader.bytes_read))
    dist.all_reduce(read)
    found = differences(mine, truth)
    scale = getattr(getattr(engine.optimizer, "loss_scaler", None), "cur_scale", None)
    after = deepspeed_job.losses(engine, job["steps"], 2)
    return {"differences": found, "after": after, "read": float(read), "needed": needed(truth), "scale": scale}


def needed(truth: dict[str, Any]) -> int:
    """Bytes of masters and moments, once, and of each rank's buffers."""
    states = [v for kept in truth["params"].values() for s, v in kept.items() if s != "weight" or "fp32" not in kept]
    buffers = list(truth["buffers"].values()) * dist.get_world_size()
    return sum(v.numel() * v.element_size() for v in [*states, *buffers] if torch.is_tensor(v))


def refuse(job: dict[str, Any]) -> dict[str, Any]:
    engine = deepspeed_job.engine_of(job["run"], seed=99, spoil=0.25)
    try:
        ucpl.load_into(engine, engine.optimizer, job["folder"])
    except ucpl.UcplError as error:
        return {"said": str(error)}
    return {"said": "nothing"}


def weights(job: dict[str, Any]) -> dict[str, Any]:
    """Weights and masters alone: a run that begins."""
    engine = deepspeed_job.engine_of(job["run"], seed=99, spoil=0.25)
    ucpl.load_into(engine, None, job["folder"])
    truth, mine = torch.load(job["truth"], weights_only=False), deepspeed_job.facts(engine, {})
    masters = {n: kept.get("fp32", kept["weight"]) for n, kept in truth["params"].items()}
    found = [n for n, kept in mine["params"].items() if not torch.equal(kept.get("fp32", kept["weight"]), masters[n])]
    return {"differences": found + ["steps"] * (engine.global_steps != 0)}


JOBS = {do.__name__: do for do in (fill, refuse, weights)} | {
    "fsdp_train": dcp_job.fsdp_train,
    "train": deepspeed_job.train,
}

if __name__ == "__main__":
    deepspeed_job.main(JOBS)
