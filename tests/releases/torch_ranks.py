"""One release of torch: it trains, saves, loads and compares. `python torch_ranks.py JOBS`.

FSDP is the newest kind that runs on CPUs: FSDP2 from 2.6 on, FSDP1 before.
"""

from __future__ import annotations

import copy
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.interop import jobs, models
from tests.releases import libraries_ranks, stand_ins
from tests.releases.libraries_ranks import Loop, Net

dcp: Any = importlib.import_module("torch.distributed.checkpoint")
RELEASE = tuple(map(int, torch.__version__.split(".")[:2]))

HAS_SECOND = RELEASE >= (2, 6)


class File(Loop):
    """One file of torch.save."""

    def save(self, folder: str) -> None:
        held = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "epoch": self.step}
        torch.save({**held, "lr_scheduler": self.schedule.state_dict()}, folder)

    def load(self, folder: str) -> None:
        file = Path(folder) / "checkpoint.pt"  # of a target
        held = torch.load(file if file.exists() else folder, map_location="cpu")
        self.model.load_state_dict(held["model"])
        self.optimizer.load_state_dict(held["optimizer"])
        self.resumed(held["lr_scheduler"])

    def resumed(self, schedule: Any) -> None:
        """Take the schedule of a folder, or the optimizer's values."""
        if schedule is None:
            rates = [group["initial_lr"] for group in self.optimizer.param_groups]
            step = int(next(iter(self.optimizer.state.values()))["step"])
            schedule = {**self.schedule.state_dict(), "last_epoch": step, "base_lrs": rates}
        self.schedule.load_state_dict(schedule)
        self.step = self.schedule.last_epoch


class Folder(File):
    """A folder of DCP without FSDP, whose optimizer has names."""

    def names(self) -> list[str]:
        names = {p: n for n, p in self.model.named_parameters()}
        return [names[p] for group in self.optimizer.param_groups for p in group["params"]]

    def state(self) -> dict[str, Any]:
        names, held = self.names(), self.optimizer.state_dict()
        groups = [{**g, "params": [names[i] for i in g["params"]]} for g in held["param_groups"]]
        states = {names[i]: s for i, s in held["state"].items()}
        return {"model": self.model.state_dict(), "optim": {"state": states, "param_groups": groups}}

    def take(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        number = {name: i for i, name in enumerate(self.names())}
        states = {number[name]: s for name, s in state["optim"]["state"].items()}
        groups = [{**g, "params": [number[n] for n in g["params"]]} for g in state["optim"]["param_groups"]]
        self.optimizer.load_state_dict({"state": states, "param_groups": groups})

    def save(self, folder: str) -> None:
        write(self.state() | {"lr_scheduler": self.schedule.state_dict()}, folder)

    def load(self, folder: str) -> None:
        self.losses(1)  # states to read into
        state = self.state() | self.scheduled(folder)
        read(state, folder)
        self.take(state)
        self.resumed(state.get("lr_scheduler"))

    def scheduled(self, folder: str) -> dict[str, Any]:
        known = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
        is_there = any(name.startswith("lr_scheduler") for name in known)
        return {"lr_scheduler": self.schedule.state_dict()} if is_there else {}


class Second(Folder):
    """FSDP2."""

    def cut(self, model: Any) -> Any:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        fully_shard(model.up, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return model

    def state(self) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict import get_state_dict

        return dict(zip(("model", "optim"), get_state_dict(self.model, self.optimizer), strict=True))

    def take(self, state: dict[str, Any]) -> None:
        from torch.distributed.checkpoint.state_dict import set_state_dict

        one, two = state["model"], state["optim"]
        set_state_dict(self.model, self.optimizer, model_state_dict=one, optim_state_dict=two)


class First(Folder):
    """FSDP1."""

    def cut(self, model: Any) -> Any:
        from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
        from torch.distributed.fsdp.wrap import ModuleWrapPolicy

        stand_ins.idle_cpu()
        self.vectors = {name for name, p in model.named_parameters() if p.ndim < 2}  # all are, when they are cut
        policy = ModuleWrapPolicy({torch.nn.Linear})
        return FSDP(model, auto_wrap_policy=policy, device_id=torch.device("cpu"), use_orig_params=True)

    def groups(self, spoil: float) -> list[dict[str, Any]]:
        groups = models.parameter_groups(Net(), 2, spoil)
        named = [(n.replace("_fsdp_wrapped_module.", ""), p) for n, p in self.model.named_parameters()]
        for group, is_flat in zip(groups, (False, True), strict=True):
            group["params"] = [p for name, p in named if (name in self.vectors) == is_flat]
        return groups

    def kind(self) -> Any:
        from torch.distributed import fsdp

        kinds: Any = (fsdp.ShardedStateDictConfig(), fsdp.ShardedOptimStateDictConfig())
        return fsdp.FullyShardedDataParallel.state_dict_type(self.model, fsdp.StateDictType.SHARDED_STATE_DICT, *kinds)

    def state(self) -> dict[str, Any]:
        from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

        with self.kind():
            return {"model": self.model.state_dict(), "optim": FSDP.optim_state_dict(self.model, self.optimizer)}

    def facts(self) -> dict[str, Any]:
        # Of the shards: in 2.5 complete states of the optimizer are views of one buffer, which each of them fills anew.
        held = self.state()
        states = {n: {key: joined(one) for key, one in some.items()} for n, some in held["optim"]["state"].items()}
        out: dict[str, Any] = {n: {"weight": joined(p), **number(states[n])} for n, p in held["model"].items()}
        for group in held["optim"]["param_groups"]:
            for name in group["params"]:
                out[name] |= {"lr": group["lr"], "weight_decay": group["weight_decay"]}
        return {"params": out, "schedule": {"last_epoch": self.schedule.last_epoch}}

    def load(self, folder: str) -> None:
        from torch.distributed.checkpoint.optimizer import load_sharded_optimizer_state_dict
        from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

        with self.kind():
            state: dict[str, Any] = {"model": self.model.state_dict(), **self.scheduled(folder)}
            read(state, folder)
            self.model.load_state_dict(state["model"])
            reader = dcp.FileSystemReader(folder)
            own = load_sharded_optimizer_state_dict(self.model.state_dict(), "optim", reader)["optim"]
            self.optimizer.load_state_dict(FSDP.optim_state_dict_to_load(self.model, self.optimizer, own))
        self.resumed(state.get("lr_scheduler"))


def joined(value: Any) -> Any:
    """A copy of a tensor, complete on each rank."""
    if not hasattr(value, "local_shards"):
        return copy.deepcopy(value)
    mine = [(shard.metadata.shard_offsets, shard.tensor) for shard in value.local_shards()]
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    out = torch.full(tuple(value.size()), float("nan"))
    for at, part in (one for some in every for one in some):
        out[tuple(slice(a, a + n) for a, n in zip(at, part.shape, strict=True))] = part
    return out


def number(states: dict[str, Any]) -> dict[str, Any]:
    return {k: v if torch.is_tensor(v) and v.ndim else float(v) for k, v in states.items()}


def write(state: dict[str, Any], folder: str) -> None:
    save = dcp.save if hasattr(dcp, "save") else dcp.save_state_dict
    save(state, storage_writer=dcp.FileSystemWriter(folder))


def read(state: dict[str, Any], folder: str) -> None:
    """Fill a state dict.

    Before 2.4 torch asks for a dict without tensors as one value. If a folder has its items, they are asked for by name.
    """
    reader = dcp.FileSystemReader(folder)
    if RELEASE >= (2, 4):
        dcp.load(state, storage_reader=reader)
        return
    known = reader.read_metadata().state_dict_metadata
    asked = {name: (held, key) for name, held, key in items(state, "", known)}
    found = {name: held[key] for name, (held, key) in asked.items()}
    (dcp.load if hasattr(dcp, "load") else dcp.load_state_dict)(found, storage_reader=reader)
    for name, (held, key) in asked.items():
        held[key] = found[name]


def items(held: Any, prefix: str, known: Any) -> Iterator[tuple[str, Any, Any]]:
    """Name, container and key of each value of the folder."""
    for key, value in held.items() if isinstance(held, dict) else enumerate(held):
        name = f"{prefix}{key}"
        if name not in known and isinstance(value, dict | list) and any(n.startswith(f"{name}.") for n in known):
            yield from items(value, f"{name}.", known)
        else:
            yield name, held, key


FORMS = {"file": File, "folder": Folder, "fsdp": Second if HAS_SECOND else First}

if __name__ == "__main__":
    torch.set_num_threads(1)
    jobs.do_all(libraries_ranks.verbs(FORMS, "form"))
