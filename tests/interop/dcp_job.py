"""Modules that FSDP2 and tp cut, with stock DCP, for ranks.

As deepspeed_job. `python dcp_job.py JOBS`. These processes do not import ucpl, except to fill a run from a checkpoint
of another kind.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import ShardedOptimStateDictConfig, ShardedStateDictConfig, StateDictType, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.interop import dcp_models, deepspeed_job, models

SCHEDULED = 0.1
WRAPPED = "_fsdp_wrapped_module."  # FSDP1's prefix in names


class Run:
    """A module over a mesh, its optimizer and its schedule."""

    def __init__(self, run: dict[str, Any], seed: int, spoil: float) -> None:
        torch.manual_seed(seed)
        self.run, world, tp = run, dist.get_world_size(), run.get("tp", 1)
        self.tp = tp
        module = dcp_models.made(run["model"], run.get("freeze", False))
        if spoil:
            with torch.no_grad():
                for tensor in (*module.parameters(), *module.buffers()):
                    if tensor.is_floating_point():
                        tensor.copy_(torch.randn_like(tensor))
                for name, buffer in module.named_buffers():
                    if name == "scale":  # not persistent: no checkpoint has it
                        buffer.fill_(0.5)
        self.module = self.cut(module, world // tp, tp)
        groups = models.parameter_groups(self.module, run.get("groups", 2), spoil)
        self.optimizer = models.optimizer(run.get("optimizer", "adamw"), groups)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1.0 / (1 + SCHEDULED * step))
        self.options = StateDictOptions(flatten_optimizer_state_dict=run.get("flat", False))

    def cut(self, module: nn.Module, dp: int, tp: int) -> nn.Module:
        if self.run.get("old"):
            return FSDP(module, auto_wrap_policy=ModuleWrapPolicy({dcp_models.Block}), device_id=torch.device("cpu"))
        if copies := self.run.get("copies"):
            mesh = init_device_mesh("cpu", (copies, dp // copies), mesh_dim_names=("copies", "dp"))
            fully_shard(module, mesh=mesh)
            return module
        mesh = init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))
        if tp > 1:
            for block in module.blocks:  # type: ignore[union-attr]
                parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        if dp > 1 or tp == 1:
            place = across if self.run.get("across") else None
            for block in getattr(module, "blocks", ()):
                fully_shard(block, mesh=mesh["dp"], shard_placement_fn=place)
            fully_shard(module, mesh=mesh["dp"], shard_placement_fn=place)
        return module

    def state(self) -> dict[str, Any]:
        if self.run.get("old"):  # ShardedTensor, by the API of FSDP1
            kinds = StateDictType.SHARDED_STATE_DICT, ShardedStateDictConfig(), ShardedOptimStateDictConfig()
            with FSDP.state_dict_type(self.module, *kinds):
                optimizer = FSDP.optim_state_dict(self.module, self.optimizer)
                return {"model": self.module.state_dict(), "optim": optimizer, "sched": self.schedule.state_dict()}
        model, optimizer = get_state_dict(self.module, self.optimizer, options=self.options)
        out = {"model": model, "optim": optimizer}
        return out | {"sched": self.schedule.state_dict()} if self.run.get("sched", True) else out

    def save(self, folder: str) -> None:
        save(self.state() | {"step": torch.tensor(self.schedule.last_epoch)}, checkpoint_id=folder)

    def load(self, folder: str, steps: int) -> None:
        if self.run.get("straight"):
            import ucpl

            state: dict[str, Any] = {}
            ucpl.load_into(self.module, self.optimizer, folder)
        else:
            state = self.state()
            load(state, checkpoint_id=folder)
            set_state_dict(
                self.module,
                self.optimizer,
                model_state_dict=state["model"],
                optim_state_dict=state["optim"],
                options=self.options,
            )
        if "sched" in state:
            self.schedule.load_state_dict(state["sched"])
        else:  # the source's framework keeps it where no state dict of a script of ours looks
            self.schedule.last_epoch = steps
            self.schedule.base_lrs = [group["initial_lr"] for group in self.optimizer.param_groups]

    def losses(self, first: int, steps: int) -> list[float]:
        out = []
        world, rank = dist.get_world_size() // self.tp, dist.get_rank() // self.tp
        share = models.BATCH // world
        for step in range(first, first + steps):
            x, y = models.batch(step)
            loss = self.loss(x[rank * share : (rank + 1) * share], y[rank * share : (rank + 1) * share])
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.schedule.step()
            total = loss.detach().double()
            dist.all_reduce(total)
            out.append(float(total) / dist.get_world_size())
        return out

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        if self.run["model"] == "llama":
            return self.module(input_ids=x, labels=x).loss
        return self.module(x, y)

    def facts_of_old(self) -> dict[str, Any]:
        """As facts: of FSDP1's module, complete weights only.

        Its ranks can gather nothing else without errors.
        """
        with FSDP.summon_full_params(self.module):
            params = {n.replace(WRAPPED, ""): {"weight": p.detach().clone()} for n, p in self.module.named_parameters()}
        return {
            "params": params,
            "buffers": {n.replace(WRAPPED, ""): b.clone() for n, b in self.module.named_buffers()},
        }

    def facts(self) -> dict[str, Any]:
        """{"params": {name: {"weight", each state, "lr", "weight_decay"}}, "buffers"} on every rank."""
        params: dict[str, dict[str, Any]] = {}
        names = {p: n for n, p in self.module.named_parameters()}
        for p, name in names.items():
            params[name] = {"weight": whole(p.detach())}
        for group in self.optimizer.param_groups:
            for p in group["params"]:
                states = self.optimizer.state[p]
                kept = {k: whole(v) if torch.is_tensor(v) and v.ndim else float(v) for k, v in states.items()}
                params[names[p]] |= {**kept, "lr": group["lr"], "weight_decay": group["weight_decay"]}
        return {"params": params, "buffers": {n: whole(b) for n, b in self.module.named_buffers()}}


def across(p: nn.Parameter) -> Shard:
    """Matrices are cut along their columns."""
    return Shard(1 if p.ndim > 1 else 0)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


def keep(job: dict[str, Any], truth: dict[str, Any]) -> None:
    if dist.get_rank() == 0:
        torch.save(truth, job["truth"])


def fsdp_train(job: dict[str, Any]) -> dict[str, Any]:
    """Train, save, and train on: the losses that a restart must meet."""
    run = Run(job["run"], seed=7, spoil=0.0)
    before = run.losses(0, job["steps"])
    run.save(job["folder"])
    keep(job, run.facts_of_old() if run.run.get("old") else run.facts())
    return {"before": before, "after": run.losses(job["steps"], 3)}


def fsdp_load(job: dict[str, Any]) -> dict[str, Any]:
    """Load into a spoiled run, compare, train on."""
    run = Run(job["run"], seed=99, spoil=0.25)
    run.load(job["folder"], job["steps"])
    truth, mine = common(torch.load(job["truth"], weights_only=False)), run.facts()
    if job.get("weights"):  # the source has only weights; the losses show that the moments are right
        mine["params"] = {name: {"weight": kept["weight"]} for name, kept in mine["params"].items()}
    found = deepspeed_job.differences(mine, truth)
    return {"differences": found, "after": run.losses(job["steps"], 3)}


def shards_load(job: dict[str, Any]) -> dict[str, Any]:
    """Load weights by torch's reader of safetensors into a spoiled run.

    The first loss shows that all are loaded.
    """
    run = Run(job["run"], seed=99, spoil=0.25)
    state = run.state()["model"]
    load(state, storage_reader=HuggingFaceStorageReader(job["folder"]))
    set_model_state_dict(run.module, state)
    truth, mine = common(torch.load(job["truth"], weights_only=False)), run.facts()
    for facts in (truth, mine):
        facts["params"] = {name: {"weight": kept["weight"]} for name, kept in facts["params"].items()}
    return {"differences": deepspeed_job.differences(mine, truth), "after": run.losses(job["steps"], 1)}


def common(truth: dict[str, Any]) -> dict[str, Any]:
    """The values of every framework: in fp32, DeepSpeed's masters are weights."""
    params = {}
    for name, kept in truth["params"].items():
        assert "fp32" not in kept or torch.equal(kept["fp32"], kept["weight"])
        params[name] = {key: value for key, value in kept.items() if key != "fp32"}
    return {"params": params, "buffers": truth["buffers"]}


def engine_train(job: dict[str, Any]) -> dict[str, Any]:
    return deepspeed_job.train(job)


def engine_load(job: dict[str, Any]) -> dict[str, Any]:
    """Load a folder from FSDP2 into a spoiled engine.

    The script has its own schedule.
    """
    engine = deepspeed_job.engine_of(job["run"], seed=99, spoil=0.25)
    path, _ = engine.load_checkpoint(job["folder"], load_lr_scheduler_states=False)
    if path is None:
        return {"error": "load_checkpoint found nothing"}
    engine.lr_scheduler.last_epoch = job["steps"]
    engine.lr_scheduler.base_lrs = [group["initial_lr"] for group in engine.optimizer.param_groups]
    mine = common(deepspeed_job.facts(engine, {}))
    found = deepspeed_job.differences(mine, torch.load(job["truth"], weights_only=False))
    return {"differences": found, "after": deepspeed_job.losses(engine, job["steps"], 3)}


if __name__ == "__main__":
    deepspeed_job.main({do.__name__: do for do in (fsdp_train, fsdp_load, shards_load, engine_train, engine_load)})
