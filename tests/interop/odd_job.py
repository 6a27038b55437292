"""Unusual runs, trained, saved, loaded and trained, for ranks: `python odd_job.py JOBS`.

It also made tests/fixtures/odd: jobs {"do": "train", "run": {"odd": NAME, "stage": N}, ...} on two ranks.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import deepspeed
import torch
import torch.distributed as dist

from tests.interop import deepspeed_job, odd_models
from tests.interop.odd_models import BATCH, ODD


def config(run: dict[str, Any]) -> dict[str, Any]:
    out: dict[str, Any] = {
        "train_batch_size": BATCH,
        "train_micro_batch_size_per_gpu": BATCH // dist.get_world_size(),
        "zero_optimization": {"stage": run["stage"], "stage3_param_persistence_threshold": 0, **zero_plus_plus(run)},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 1_000_000,
    }
    return out | {"bf16": {"enabled": run["dtype"] == "bf16"}}


def zero_plus_plus(run: dict[str, Any]) -> dict[str, Any]:
    """hpz: groups of ranks hold a second copy of the model."""
    return {"zero_hpz_partition_size": run["hpz"]} if run.get("hpz") else {}


def engine_of(run: dict[str, Any], is_spoiled: bool) -> Any:
    odd = ODD[run["odd"]]
    torch.manual_seed(7)
    model = odd.model()
    if is_spoiled:
        odd_models.spoil(model, odd.excludes)
    made, *_ = deepspeed.initialize(model=model, optimizer=odd.optimizer(model), config=config(run))
    return made


def losses(engine: Any, first: int, steps: int, toggles: dict[str, bool]) -> list[float]:
    out = []
    parameters = dict(engine.module.named_parameters())
    rank, world = dist.get_rank(), dist.get_world_size()
    share = BATCH // world
    for step in range(first, first + steps):
        for name in toggles if step == 2 else ():
            parameters[name].requires_grad_(toggles[name])
        loss = engine(odd_models.batch(step)[rank * share : (rank + 1) * share])
        engine.backward(loss)
        engine.step()
        total = loss.detach().double()
        dist.all_reduce(total)
        out.append(float(total) / world)
    return out


def whole_state(engine: Any) -> dict[str, dict[str, Any]]:
    """{parameter: {"weight", and if trained "master" and "state": {...}}} on every rank."""
    names = {p: n for n, p in engine.module.named_parameters()}
    found: dict[str, dict[str, Any]] = {}
    for p, name in names.items():
        with deepspeed.zero.GatheredParameters([p] if hasattr(p, "ds_id") else []):
            found[name] = {"weight": p.detach().clone()}
    o = engine.optimizer
    inner = getattr(o, "optimizer", o)
    world = dist.get_world_size()

    def add(name: str, shape: Any, flat: torch.Tensor, cut: Any) -> None:
        kept = deepspeed_job.in_one_order({"": flat.detach(), **inner.state.get(flat, {})})
        whole = {k: deepspeed_job.together(v) if is_along(v, flat) else v for k, v in kept}
        held = {k: cut(v).reshape(shape).clone() if is_along(kept_of(flat, k), flat) else v for k, v in whole.items()}
        found[name] |= {"master": held.pop(""), "state": {k: odd_models.number(v) for k, v in held.items()}}

    def kept_of(flat: torch.Tensor, key: str) -> Any:
        return flat if key == "" else inner.state[flat][key]

    if hasattr(o, "fp32_partitioned_groups_flat"):  # stage 3
        for params, flat in zip(o.fp16_groups, o.fp32_partitioned_groups_flat, strict=True):
            start = 0
            for p in params:
                k = -(-p.ds_numel // world)
                add(
                    names[p],
                    p.ds_shape,
                    flat,
                    lambda v, a=start, k=k, n=p.ds_numel: v.view(world, -1)[:, a : a + k].reshape(-1)[:n],
                )
                start += k
    elif hasattr(o, "single_partition_of_fp32_groups"):
        for g, flat in enumerate(o.single_partition_of_fp32_groups):
            for p, a in zip(o.round_robin_bit16_groups[g], o.round_robin_bit16_offsets[g], strict=True):
                end = a + p.numel()
                add(names[p], p.shape, flat, lambda v, a=a, b=end: v[a:b])
    else:
        for p in (p for group in inner.param_groups for p in group["params"]):
            state = {k: odd_models.number(v) for k, v in inner.state.get(p, {}).items()}
            found[names[p]] |= {"master": p.detach().clone(), "state": state}
    return found


def is_along(value: Any, flat: torch.Tensor) -> bool:
    """Test whether a state has one value for each element."""
    return torch.is_tensor(value) and value.shape == flat.shape and flat.numel() > 1


def facts(engine: Any, client: dict[str, Any]) -> dict[str, Any]:
    kept = engine.module.state_dict()
    return {
        "params": whole_state(engine),
        "buffers": {n: b.clone() for n, b in engine.module.named_buffers() if n in kept},
        "extra": getattr(engine.module, "extra", None),
        "global_steps": engine.global_steps,
        "client": {key: client.get(key) for key in deepspeed_job.CLIENT},
    }


def train(job: dict[str, Any]) -> dict[str, Any]:
    odd = ODD[job["run"]["odd"]]
    engine = engine_of(job["run"], False)
    before = losses(engine, 0, job["steps"], odd.toggles)
    how: dict[str, Any] = {"exclude_frozen_parameters": True} if odd.excludes else {}
    engine.save_checkpoint(job["folder"], client_state=deepspeed_job.CLIENT, **how)
    truth = facts(engine, deepspeed_job.CLIENT) | {"extra": engine.module.state_dict().get("_extra_state")}
    if dist.get_rank() == 0:
        torch.save(truth, job["truth"])
    return {"before": before, "after": losses(engine, job["steps"], 2, {})}


def load(job: dict[str, Any]) -> dict[str, Any]:
    engine = engine_of(job["run"], True)
    odd = ODD[job["run"]["odd"]]
    strictly = not odd.excludes
    path, client = engine.load_checkpoint(job["folder"], load_module_strict=strictly)
    if path is None:
        return {"error": "load_checkpoint found nothing"}
    truth = torch.load(job["truth"], weights_only=False)
    found = deepspeed_job.differences(facts(engine, client), truth)
    for name in odd.toggles:
        dict(engine.module.named_parameters())[name].requires_grad_(odd.toggles[name])
    return {"differences": found, "after": losses(engine, job["steps"], 2, {})}


if __name__ == "__main__":
    importlib.import_module("peft")  # once, not by each rank
    deepspeed_job.main({"train": train, "load": load})
