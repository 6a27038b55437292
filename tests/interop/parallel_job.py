"""Pipelines and models with experts, for ranks, as deepspeed_job.

`python parallel_job.py JOBS`.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import deepspeed
import torch
import torch.distributed as dist

from tests.interop import deepspeed_job, models, parallel_models

MICRO = 10  # sequences
EXPERT = re.compile(r"(?P<module>.*\.deepspeed_experts\.)(?P<number>\d+)(?P<inner>\..*)")
FUSED = re.compile(r"(?P<module>.*\.mlp)\.experts\.w[123]")  # AutoEP's: all experts of a rank in one tensor


def config(run: dict[str, Any], dp: int) -> dict[str, Any]:
    out = deepspeed_job.config({**run, "stage": run.get("stage", 1)})
    micro = MICRO if "pp" in run else models.BATCH // dp
    out |= {"train_micro_batch_size_per_gpu": micro, "gradient_accumulation_steps": models.BATCH // dp // micro}
    if "auto" in run:
        out["expert_parallel"] = {"enabled": True, "autoep_size": run["ep"], "preset_model": run["auto"]}
        out["expert_parallel"] |= {"use_grouped_mm": False}
        out["use_data_before_expert_parallelism"] = run.get("data_first", False)
    return out


def groups_of(module: Any, run: dict[str, Any], spoil: float) -> list[dict[str, Any]]:
    trained = [p for p in module.parameters() if p.requires_grad]
    wide, flat = [p for p in trained if p.ndim >= 2], [p for p in trained if p.ndim < 2]
    cut = [wide, flat] if run.get("groups", 2) == 2 else [trained]
    rates = [(1e-2, 0.1), (5e-3, 0.0)]
    return [
        {"params": params, "lr": lr + spoil, "weight_decay": decay + spoil, "name": f"group {i}"}
        for i, (params, (lr, decay)) in enumerate(zip(cut, rates, strict=False))
    ]


def engine_of(run: dict[str, Any], seed: int, spoil: float) -> Any:
    torch.manual_seed(seed)
    world = dist.get_world_size()
    if "pp" in run:
        module = parallel_models.pipeline(run["pp"], run["method"], seed)
        dp = world // run["pp"]
    elif "auto" in run:  # every rank makes all experts, and keeps its own
        module, dp = parallel_models.Routed(run["auto"]), world
    else:
        module, dp = parallel_models.Mixture(run["ep"]), world
        torch.manual_seed(
            1000 * seed + dist.get_rank() % run["ep"]
        )  # other experts on other ranks, the same on the same
        for name, p in module.named_parameters():
            if EXPERT.fullmatch(name):
                p.data.normal_(std=0.3)
    if spoil:
        torch.manual_seed(seed + dist.get_rank())
        with torch.no_grad():
            kept = (buffer for name, buffer in module.named_buffers() if name not in passing(module))
            for tensor in (*module.parameters(), *kept):
                tensor.copy_(torch.randn_like(tensor))

    def optimizer(_: Any) -> torch.optim.Optimizer:
        """Called when AutoEP has put its layers in."""
        groups = groups_of(module, run, spoil)
        if "ep" in run:
            from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

            groups = split_params_into_different_moe_groups_for_optimizer(groups)
        return models.optimizer(run["optimizer"], groups)

    def schedule(chosen: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.LambdaLR(chosen, lambda step: 1.0 / (1 + 0.1 * step))

    made, *_ = deepspeed.initialize(model=module, optimizer=optimizer, lr_scheduler=schedule, config=config(run, dp))
    return made


def losses(engine: Any, run: dict[str, Any], first: int, steps: int) -> list[float]:
    if "pp" not in run:
        return deepspeed_job.losses(engine, first, steps)
    out = []
    dp, here = engine.grid.get_data_parallel_world_size(), engine.grid.get_data_parallel_id()
    share = models.BATCH // dp
    for step in range(first, first + steps):
        x, y = models.batch(step)
        x, y = x[here * share : (here + 1) * share], y[here * share : (here + 1) * share]
        parts = iter([(x[i : i + MICRO], y[i : i + MICRO]) for i in range(0, share, MICRO)])
        out.append(float(engine.train_batch(data_iter=parts)))
    return out


# ---- the full state --------------------------------------------------------------------------------------------------


def together(part: torch.Tensor, group: Any) -> torch.Tensor:
    parts = [torch.empty_like(part) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, part.contiguous(), group=group)
    return torch.cat(parts)


def held(engine: Any, run: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The state of this rank's data-parallel group, by full names."""
    if run.get("stage", 1) == 0 and not hasattr(engine.optimizer, "bf16_groups"):
        yield from held_without_zero(engine, run)
        return
    if run.get("stage", 1) == 3:
        yield from held_in_slices(engine)
        return
    o, inner = engine.optimizer, engine.optimizer.optimizer
    names = {p: whole_name(n, engine, run) for n, p in engine.module.named_parameters()}
    trained = set()
    parts = getattr(o, "single_partition_of_fp32_groups", None) or o.fp32_groups_flat_partition
    ordered = getattr(o, "round_robin_bit16_groups", None) or o.bf16_groups
    for g, (flat, params) in enumerate(zip(parts, ordered, strict=True)):
        hyper = inner.param_groups[g]
        states = {"fp32": flat.detach(), **inner.state.get(flat, {})}
        whole = {
            k: together(v, o.real_dp_process_group[g]) if torch.is_tensor(v) and v.ndim else float(v)
            for k, v in deepspeed_job.in_one_order(states)
        }
        starts = getattr(o, "round_robin_bit16_offsets", None)  # alignment leaves gaps
        begin = starts[g] if starts else [sum(p.numel() for p in params[:i]) for i in range(len(params))]
        for p, start in zip(params, begin, strict=True):
            trained.add(p)
            cut = {
                k: v[start : start + p.numel()].reshape(p.shape).clone() if torch.is_tensor(v) else v
                for k, v in whole.items()
            }
            kept = {"lr": hyper["lr"], "weight_decay": hyper["weight_decay"], "moe": hyper.get("moe", False)}
            yield from apart(names[p], {"weight": p.detach().clone(), **cut, **kept}, engine)
    for p, name in names.items():
        if p not in trained:
            yield from apart(name, {"weight": p.detach().clone()}, engine)
    for name, buffer in engine.module.named_buffers():
        if name not in passing(engine.module):
            yield name, {"buffer": buffer.clone()}


def passing(module: Any) -> set[str]:
    """Buffers that no checkpoint has."""
    inner = ((name, part._non_persistent_buffers_set) for name, part in module.named_modules())
    return {f"{name}.{one}" if name else one for name, mine in inner for one in mine}


def apart(name: str, state: dict[str, Any], engine: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """A tensor, or each expert's part of it by global number."""
    found = FUSED.fullmatch(name)
    if found is None:
        yield name, state
        return
    first = engine.module.get_submodule(found["module"]).ep_rank * len(state["weight"])
    for i in range(len(state["weight"])):
        yield f"{name}.{first + i}", {k: v[i] if torch.is_tensor(v) else v for k, v in state.items()}


def held_in_slices(engine: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Stage 3: each parameter is cut over its own ranks.

    They are those with the same experts, or all.
    """
    o, inner = engine.optimizer, engine.optimizer.optimizer
    names = {p: n for n, p in engine.module.named_parameters()}
    for s, (params, flat) in enumerate(zip(o.fp16_groups, o.fp32_partitioned_groups_flat, strict=True)):
        hyper, group = inner.param_groups[o.sub_group_to_group_id[s]], o.sub_group_process_groups[s]
        states = {"fp32": flat.detach(), **inner.state.get(flat, {})}
        whole = {
            k: together(v, group).view(dist.get_world_size(group), -1) if torch.is_tensor(v) and v.ndim else float(v)
            for k, v in deepspeed_job.in_one_order(states)
        }
        start = 0
        for p in params:
            end = start + p.partition_numel()
            cut = {
                k: v[:, start:end].reshape(-1)[: p.ds_numel].reshape(p.ds_shape).clone() if torch.is_tensor(v) else v
                for k, v in whole.items()
            }
            with deepspeed.zero.GatheredParameters([p]):
                weight = p.detach().clone()
            kept = {"lr": hyper["lr"], "weight_decay": hyper["weight_decay"], "moe": hyper.get("moe", False)}
            yield from apart(names[p], {"weight": weight, **cut, **kept}, engine)
            start = end
    for name, buffer in engine.module.named_buffers():
        if name not in passing(engine.module):
            yield name, {"buffer": buffer.clone()}


def held_without_zero(engine: Any, run: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The state of a stage: the optimizer's states, and masters in fp16."""
    o = engine.optimizer
    inner = getattr(o, "optimizer", o)
    rows = getattr(o, "fp16_groups", None) or [group["params"] for group in inner.param_groups]
    masters = getattr(o, "fp32_groups", None) or rows
    trained: dict[Any, dict[str, Any]] = {}
    for params, mine, hyper in zip(rows, masters, inner.param_groups, strict=True):
        for p, master in zip(params, mine, strict=True):
            states = {"fp32": master.detach(), **inner.state.get(master, {})}
            kept = {k: v.clone() if torch.is_tensor(v) and v.ndim else float(v) for k, v in states.items()}
            trained[p] = kept | {"lr": hyper["lr"], "weight_decay": hyper["weight_decay"], "moe": False}
    for name, p in engine.module.named_parameters():
        yield whole_name(name, engine, run), {"weight": p.detach().clone(), **trained.get(p, {})}
    for name, buffer in engine.module.named_buffers():
        yield name, {"buffer": buffer.clone()}


def whole_name(name: str, engine: Any, run: dict[str, Any]) -> str:
    found = EXPERT.fullmatch(name)
    if found is None:
        return name
    module = dict(engine.module.named_modules())[found["module"].split(".deepspeed_moe.")[0]]
    number = dist.get_rank() % run["ep"] * module.num_local_experts + int(found["number"])
    return f"{found['module']}{number}{found['inner']}"


def facts(engine: Any, run: dict[str, Any], client: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The full state on every rank, and differences between ranks.

    Of values that are not tied, the first stage's copy is used.
    """
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, list(held(engine, run)))
    found: dict[str, Any] = {}
    unequal = []
    for rank, mine in enumerate(every):
        for name, state in mine:
            if name not in found:
                found[name] = state
                continue
            if name == parallel_models.LOOSE and "weight" in state:
                own = ("weight", "fp32") if run.get("stage", 1) == 0 and run["dtype"] == "fp32" else ("weight",)
                state = {**state, **{k: found[name][k] for k in own}}  # no file holds the last stage's
            unequal += [f"rank {rank}: {d}" for d in deepspeed_job.differences(state, found[name], name)]
    out = {
        "params": found,
        "global_steps": engine.global_steps,
        "schedule": engine.lr_scheduler.state_dict()["last_epoch"],
    }
    return {**out, "client": {key: client.get(key) for key in deepspeed_job.CLIENT}}, unequal


# ---- jobs --------------------------------------------------------------------------------------------------------------


def train(job: dict[str, Any]) -> dict[str, Any]:
    run = job["run"]
    engine = engine_of(run, seed=7, spoil=0.0)
    if "names" in job:
        write_names(engine, job["names"])
    before = losses(engine, run, 0, job["steps"])
    engine.save_checkpoint(job["folder"], client_state=deepspeed_job.CLIENT)
    truth, unequal = facts(engine, run, deepspeed_job.CLIENT)
    if dist.get_rank() == 0:
        torch.save(truth, job["truth"])
    return {"before": before, "apart": unequal, "after": losses(engine, run, job["steps"], 2)}


def write_names(engine: Any, file: str) -> None:
    """Write names by stage and group for `order`.

    They are the optimizer's own parameters, in fp32 without ZeRO.
    """
    names = {p: n for n, p in engine.module.named_parameters()}
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, [[names[p] for p in g["params"]] for g in engine.optimizer.param_groups])
    if dist.get_rank() == 0:
        ranks = dist.get_world_size() // engine.grid.get_pipe_parallel_world_size()  # of a stage
        Path(file).write_text(json.dumps(every[::ranks]))


def load(job: dict[str, Any]) -> dict[str, Any]:
    run = job["run"]
    engine = engine_of(run, seed=99, spoil=0.25)
    path, client = engine.load_checkpoint(job["folder"])
    if path is None:
        return {"error": "load_checkpoint found nothing"}
    truth = torch.load(job["truth"], weights_only=False)
    mine, unequal = facts(engine, run, client)
    found = deepspeed_job.differences(mine, truth) + ([] if job.get("loose") else unequal)
    return {"differences": found, "after": losses(engine, run, job["steps"], 2)}


if __name__ == "__main__":
    deepspeed_job.main({"train": train, "load": load})
