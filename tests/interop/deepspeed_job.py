"""Engines of DeepSpeed that train, save, load and compare, for ranks.

`python deepspeed_job.py JOBS`. JOBS is a json list, done in turn, each by its own processes. Each result goes to the
json file that its job names. A job that raises leaves its error there.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("DS_BUILD_OPS", "0")

import deepspeed
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.interop import jobs, models
from tests.interop.jobs import differences as differences  # the other scripts call it by this module

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
CLIENT = {"note": "kept", "numbers": [1, (2, 3.5)], "cursor": torch.arange(5)}


def config(run: dict[str, Any]) -> dict[str, Any]:
    world = dist.get_world_size()
    zero: dict[str, Any] = {
        "stage": run["stage"],
        "reduce_bucket_size": 500_000,
        "allgather_bucket_size": 500_000,
        "stage3_param_persistence_threshold": 0,
        **run.get("zero", {}),
    }
    out: dict[str, Any] = {
        "train_batch_size": models.BATCH,
        "train_micro_batch_size_per_gpu": models.BATCH // world,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "gradient_clipping": run.get("clip", 1.0),
        "steps_per_print": 1_000_000,
    }
    if run["dtype"] == "bf16":
        out["bf16"] = {**run.get("bf16", {}), "enabled": True}
    if run["dtype"] == "fp16":  # which the CPU's accelerator says it cannot, and torch can
        deepspeed.get_accelerator().is_fp16_supported = lambda: True
    if "fp16" in run or run["dtype"] == "fp16":
        out["fp16"] = {**run.get("fp16", {}), "enabled": run["dtype"] == "fp16"}
    if run.get("universal"):
        out["checkpoint"] = {"load_universal": True}
    if run.get("wide_gradients"):
        out["data_types"] = {"grad_accum_dtype": "fp32"}
    return out


def engine_of(run: dict[str, Any], seed: int, spoil: float) -> Any:
    """An engine of a run; `spoil` scrambles all that a load restores."""
    torch.manual_seed(seed)
    model = models.MODELS[run["model"]](run.get("freeze", False))
    if spoil:
        with torch.no_grad():
            for tensor in (*model.parameters(), *model.buffers()):
                tensor.copy_(torch.randn_like(tensor))
            for name, buffer in model.named_buffers():
                if name == "scale":  # not persistent: no checkpoint has it
                    buffer.fill_(0.5)
    groups = models.parameter_groups(model, run.get("groups", 2), 0.0 if run.get("keeps_no_hyper") else spoil)
    if own := run.get("own_group"):
        groups = models.with_own_group(groups, [p for name, p in model.named_parameters() if name in own])
    if run.get("named"):  # torch keeps names of parameters that are given with names
        names = {p: n for n, p in model.named_parameters()}
        groups = [{**g, "params": [(names[p], p) for p in g["params"]]} for g in groups]
    chosen = models.optimizer(run["optimizer"], groups)
    schedule = torch.optim.lr_scheduler.LambdaLR(chosen, lambda step: 1.0 / (1 + 0.1 * step))
    made, *_ = deepspeed.initialize(model=model, optimizer=chosen, lr_scheduler=schedule, config=config(run))
    return made


def losses(engine: Any, first: int, steps: int) -> list[float]:
    out = []
    rank, world = dist.get_rank(), dist.get_world_size()
    share = models.BATCH // world
    for step in range(first, first + steps):
        x, y = models.batch(step)
        loss = engine(x[rank * share : (rank + 1) * share], y[rank * share : (rank + 1) * share])
        engine.backward(loss)
        engine.step()
        total = loss.detach().double()
        dist.all_reduce(total)
        out.append(float(total) / world)
    return out


# ---- the full state, gathered without DeepSpeed's own helpers (which are wrong under round robin)
# -------------------------


def together(part: torch.Tensor) -> torch.Tensor:
    """Equal parts of all ranks, end to end: (ranks * n,)."""
    parts = [torch.empty_like(part) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, part.contiguous())
    return torch.cat(parts)


def in_one_order(states: dict[str, Any]) -> list[tuple[str, Any]]:
    """States in one order, so that all ranks gather the same.

    DeepSpeed's universal loader fills them in its own order.
    """
    return sorted(states.items())


def whole_state(engine: Any) -> dict[str, dict[str, Any]]:
    """{parameter: {"weight", "fp32", each state, "lr", "weight_decay"}} on every rank."""
    names = {p: n for n, p in engine.module.named_parameters()}
    found: dict[str, dict[str, Any]] = {}
    for p, name in names.items():
        if hasattr(p, "ds_id"):
            with deepspeed.zero.GatheredParameters([p]):
                found[name] = {"weight": p.detach().clone()}
        else:
            found[name] = {"weight": p.detach().clone()}
    inner = getattr(engine.optimizer, "optimizer", engine.optimizer)

    def add(name: str, shape: Any, states: dict[str, Any], hyper: dict[str, Any], cut: Any) -> None:
        found[name] |= {"lr": hyper["lr"], "weight_decay": hyper["weight_decay"]}
        for state, value in states.items():
            if torch.is_tensor(value) and value.ndim and state != "step":
                found[name][state] = cut(value).reshape(shape).clone()
            else:
                found[name][state] = float(value)

    o = engine.optimizer
    if hasattr(o, "fp32_partitioned_groups_flat"):  # stage 3
        for s, (params, flat) in enumerate(zip(o.fp16_groups, o.fp32_partitioned_groups_flat, strict=True)):
            hyper = inner.param_groups[o.sub_group_to_group_id[s]]
            whole = {
                k: together(v).view(dist.get_world_size(), -1) if torch.is_tensor(v) and v.ndim and k != "step" else v
                for k, v in in_one_order({"fp32": flat.detach(), **inner.state.get(flat, {})})
            }
            start = 0
            for p in params:
                k = -(-p.ds_numel // dist.get_world_size())
                add(
                    names[p],
                    p.ds_shape,
                    whole,
                    hyper,
                    lambda v, a=start, k=k, n=p.ds_numel: v[:, a : a + k].reshape(-1)[:n],
                )
                start += k
    elif hasattr(o, "single_partition_of_fp32_groups") or hasattr(o, "fp32_groups_flat_partition"):
        parts = getattr(o, "single_partition_of_fp32_groups", None) or o.fp32_groups_flat_partition
        for g, flat in enumerate(parts):
            params = o.round_robin_bit16_groups[g] if hasattr(o, "round_robin_bit16_groups") else o.bf16_groups[g]
            starts = getattr(o, "round_robin_bit16_offsets", None)
            begin = starts[g] if starts else [sum(p.numel() for p in params[:i]) for i in range(len(params))]
            whole = {
                k: together(v) if torch.is_tensor(v) and v.ndim and k != "step" else v
                for k, v in in_one_order({"fp32": flat.detach(), **inner.state.get(flat, {})})
            }
            for p, a in zip(params, begin, strict=True):
                b = a + p.numel()
                add(names[p], p.shape, whole, inner.param_groups[g], lambda v, a=a, b=b: v[a:b])
    elif hasattr(o, "fp32_groups_flat"):  # no ZeRO, 16 bits, FusedAdam
        for params, flat, hyper in zip(o.fp16_groups, o.fp32_groups_flat, inner.param_groups, strict=True):
            start = 0
            for p in params:
                end = start + p.numel()
                states = {"fp32": flat.detach(), **inner.state.get(flat, {})}
                add(names[p], p.shape, states, hyper, lambda v, a=start, b=end: v[a:b])
                start = end
    elif hasattr(o, "fp32_groups"):  # no ZeRO, 16 bits
        for g, (params, masters) in enumerate(zip(o.fp16_groups, o.fp32_groups, strict=True)):
            for p, master in zip(params, masters, strict=True):
                states = {"fp32": master.detach(), **inner.state.get(master, {})}
                add(names[p], p.shape, states, inner.param_groups[g], lambda v: v)
    else:
        for hyper in inner.param_groups:
            for p in hyper["params"]:
                add(names[p], p.shape, {"fp32": p.detach(), **inner.state.get(p, {})}, hyper, lambda v: v)
    return found


def facts(engine: Any, client: dict[str, Any]) -> dict[str, Any]:
    return {
        "params": whole_state(engine),
        "buffers": {n: b.clone() for n, b in engine.module.named_buffers()},
        "global_steps": engine.global_steps,
        "schedule": engine.lr_scheduler.state_dict()["last_epoch"],
        "client": {key: client.get(key) for key in CLIENT},
    }


def names_by_group(run: dict[str, Any]) -> list[list[str]]:
    """A training script's names of its optimizer, before DeepSpeed has it."""
    model = models.MODELS[run["model"]](run.get("freeze", False))
    names = {p: n for n, p in model.named_parameters()}
    chosen = models.optimizer("sgd", models.parameter_groups(model, run.get("groups", 2), 0.0))
    return [[names[p] for p in group["params"]] for group in chosen.param_groups]


# ---- jobs --------------------------------------------------------------------------------------------------------------


def train(job: dict[str, Any]) -> dict[str, Any]:
    """Train, save, and train on: the losses that a restart must meet."""
    engine = engine_of(job["run"], seed=7, spoil=0.0)
    if "names" in job and dist.get_rank() == 0:
        Path(job["names"]).write_text(json.dumps(names_by_group(job["run"])))
    before = losses(engine, 0, job["steps"])
    engine.save_checkpoint(job["folder"], client_state=CLIENT)
    truth = facts(engine, CLIENT)
    if dist.get_rank() == 0:
        torch.save(truth, job["truth"])
    return {"before": before, "after": losses(engine, job["steps"], 2)}


def load(job: dict[str, Any]) -> dict[str, Any]:
    """Load plainly into a spoiled engine, compare, train on."""
    engine = engine_of(job["run"], seed=99, spoil=0.25)
    path, client = engine.load_checkpoint(job["folder"])
    if path is None:
        return {"error": "load_checkpoint found nothing"}
    truth = torch.load(job["truth"], weights_only=False)
    if job["run"].get("keeps_no_hyper"):  # then the engine's own stand
        for kept in truth["params"].values():
            for name in ("lr", "weight_decay"):
                kept.pop(name, None)
    found = differences(facts(engine, client), truth)
    if job["run"].get("keeps_no_hyper"):
        found = [d for d in found if not d.endswith(("/lr is new", "/weight_decay is new"))]
    return {"differences": found, "after": losses(engine, job["steps"], 2)}


def recast(job: dict[str, Any]) -> dict[str, Any]:
    """Load into a spoiled engine of another dtype than the run's.

    The truth has weights that torch rounds from masters.
    """
    engine = engine_of(job["run"], seed=99, spoil=0.25)
    path, client = engine.load_checkpoint(job["folder"])
    if path is None:
        return {"error": "load_checkpoint found nothing"}
    truth = torch.load(job["truth"], weights_only=False)
    for kept in truth["params"].values():
        kept["weight"] = kept.get("fp32", kept["weight"]).to(DTYPES[job["run"]["dtype"]])
        if "bf16" not in job["run"]:  # masters and moments may be of 16 bits there, where options say so
            kept |= {k: v.float() for k, v in kept.items() if torch.is_tensor(v) and k != "weight"}
    found = differences(facts(engine, client), truth)
    return {"differences": found, "scale": scale_of(engine), "after": losses(engine, job["steps"], 2)}


def scale_of(engine: Any) -> list[Any]:
    """A flag for a dynamic loss scale, and its value."""
    held = getattr(engine.optimizer, "loss_scaler", None) or getattr(engine.optimizer, "loss_scale_config", None)
    if held is None:
        return [False, 1.0]
    return [getattr(held, "dynamic", None) or getattr(held, "dynamic_loss_scale", False), held.cur_scale]


def weights(job: dict[str, Any]) -> dict[str, Any]:
    """Save a fresh model's weights on rank 0 as one safetensors file."""
    from safetensors.torch import save_file

    torch.manual_seed(job["seed"])
    if dist.get_rank() == 0:
        save_file(models.MODELS[job["run"]["model"]](False).state_dict(), job["file"])
    return {}


def warm(job: dict[str, Any]) -> dict[str, Any]:
    """Load weights alone into a spoiled engine, by ucpl's advice.

    Another engine is made with these weights.
    """
    fresh = engine_of(job["run"], seed=job["seed"], spoil=0.0)
    truth, expected = whole_state(fresh), losses(fresh, 0, 3)
    engine = engine_of(job["run"], seed=99, spoil=0.25)
    for group, kept in zip(engine.optimizer.param_groups, fresh.optimizer.param_groups, strict=True):
        group |= {key: kept[key] for key in ("initial_lr", "weight_decay")} | {"lr": kept["initial_lr"]}
    engine.lr_scheduler.base_lrs = list(fresh.lr_scheduler.base_lrs)
    path, _ = engine.load_checkpoint(job["folder"], load_optimizer_states=False, load_lr_scheduler_states=False)
    if path is None:
        return {"error": "load_checkpoint found nothing"}
    mine = whole_state(engine)
    found = [f"{name} differs" for name in truth if not torch.equal(mine[name]["weight"], truth[name]["weight"])]
    trained = [name for name in truth if "fp32" in truth[name]]
    found += [f"fp32 of {name} differs" for name in trained if not torch.equal(mine[name]["fp32"], truth[name]["fp32"])]
    return {"differences": found, "expected": expected, "after": losses(engine, 0, 3)}


def started(job: dict[str, Any]) -> dict[str, Any]:
    """Load filled weights plainly into an engine with other weights and moments."""
    fresh = engine_of(job["run"], seed=job["seed"], spoil=0.0)
    truth, expected = whole_state(fresh), losses(fresh, 0, 3)
    engine = engine_of(job["run"], seed=99, spoil=0.25)
    for group, kept in zip(engine.optimizer.param_groups, fresh.optimizer.param_groups, strict=True):
        group |= {key: kept[key] for key in ("initial_lr", "weight_decay")} | {"lr": kept["initial_lr"]}
    engine.lr_scheduler.base_lrs = list(fresh.lr_scheduler.base_lrs)
    losses(engine, 0, 1)  # moments are no zeros
    engine.lr_scheduler.last_epoch, engine.lr_scheduler._step_count = 0, 1
    path, _ = engine.load_checkpoint(job["folder"], load_lr_scheduler_states=False)
    if path is None:
        return {"error": "load_checkpoint found nothing"}
    for group, kept in zip(engine.optimizer.param_groups, fresh.optimizer.param_groups, strict=True):
        group |= {"lr": kept["initial_lr"]}
    mine = whole_state(engine)
    found = [
        f"{s} of {n} differs" for n in truth for s in ("weight", "fp32") if not torch.equal(mine[n][s], truth[n][s])
    ]
    found += [f"{job['state']} of {n} is not 0" for n in mine if mine[n][job["state"]].count_nonzero()]
    return {"differences": found, "expected": expected, "after": losses(engine, 0, 3)}


def grown(job: dict[str, Any]) -> dict[str, Any]:
    """Load a checkpoint of a smaller, partly frozen model.

    Old values are restored, and the rest is as filled.
    """
    engine = engine_of(job["run"], seed=99, spoil=0.25)
    path, _ = engine.load_checkpoint(job["folder"])
    if path is None:
        return {"error": "load_checkpoint found nothing"}
    truth, mine = torch.load(job["truth"], weights_only=False)["params"], whole_state(engine)
    found = []
    for name, states in mine.items():
        kept = truth.get(name, {})
        for state in ("weight", "fp32", "exp_avg", "exp_avg_sq"):
            wanted = torch.zeros_like(states[state])
            had = kept.get("weight" if state == "fp32" and state not in kept else state)
            if had is not None:
                wanted[tuple(map(slice, had.shape))] = had
            found += [] if torch.equal(states[state], wanted) else [f"{state} of {name} differs"]
    return {"differences": found, "after": losses(engine, 3, 3)}


def as_changed(states: dict[str, Any], kept: dict[str, Any], job: dict[str, Any], name: str) -> list[str]:
    """Differences of a parameter.

    From its old value, or from a new one's.
    """
    weight = kept.get("weight")
    if weight is None:
        weight = torch.full_like(states["weight"], job["new"][name])
    wanted = {"weight": weight}
    if "exp_avg" in states:  # it is trained
        zero = torch.zeros_like(states["fp32"])
        wanted |= {"fp32": kept.get("fp32", weight.to(zero.dtype))}
        wanted |= {state: kept.get(state, zero) for state in ("exp_avg", "exp_avg_sq")}
    found = [f"{s} of {name} differs" for s, v in wanted.items() if not torch.equal(states[s], v)]
    if "exp_avg" in states:
        found += [f"step of {name} is {states['step']}"] * (states["step"] != job["steps"])
        found += [f"lr of {name} is {states['lr']}"] * ("lr" in kept and states["lr"] != kept["lr"])
    return found


def plain_loss(job: dict[str, Any], weights: dict[str, Any], step: int) -> float:
    """The loss of a step by torch alone, with the same weights."""
    model = models.MODELS[job["run"]["model"]](job["run"].get("freeze", False))
    model = model.to(torch.bfloat16) if job["run"]["dtype"] == "bf16" else model
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(weights[name])
    rank, world = dist.get_rank(), dist.get_world_size()
    share = models.BATCH // world
    x, y = models.batch(step)
    total = model(x[rank * share : (rank + 1) * share], y[rank * share : (rank + 1) * share]).detach().double()
    dist.all_reduce(total)
    return float(total) / world


def changed(job: dict[str, Any]) -> dict[str, Any]:
    """Load a checkpoint with other parameters, compare the common ones, and train."""
    engine = engine_of(job["run"], seed=99, spoil=0.25)
    path, _ = engine.load_checkpoint(job["folder"])
    if path is None:
        return {"error": "load_checkpoint found nothing"}
    truth, mine = torch.load(job["truth"], weights_only=False)["params"], whole_state(engine)
    found = [d for name, states in mine.items() for d in as_changed(states, truth.get(name, {}), job, name)]
    kept = {name: truth[name]["weight"] if name in truth else mine[name]["weight"] for name in mine}
    trained = sorted(name for name, states in mine.items() if "exp_avg" in states)
    first = plain_loss(job, kept, job["steps"])
    rates = {name: [states["lr"], states["weight_decay"]] for name, states in mine.items() if "lr" in states}
    out = {"differences": found, "first": first, "after": losses(engine, job["steps"], 3)}
    return {**out, "trained": trained, "rates": rates}


def preload() -> None:
    """Import modules and extensions that each engine needs, before ranks are forked."""
    importlib.import_module("deepspeed.runtime.zero.muon.muon_optimizer")
    deepspeed.get_accelerator().create_op_builder("ShareMemCommBuilder").load()


def main(do: dict[str, Any], begin: Callable[[], Any] | None = None) -> None:
    """Do the jobs listed, each by the function of its name."""
    torch.set_num_threads(1)
    preload()
    jobs.do_all(do, begin or partial(deepspeed.init_distributed, dist_backend="gloo", verbose=False))


if __name__ == "__main__":
    every = (train, load, recast, weights, warm, started, grown, changed)
    main({do.__name__: do for do in every})
