"""Megatron-Core of one release: it trains, saves, loads and compares. `python megatron_ranks.py JOBS`.

The scripts of tests/interop are for the release of constraints.txt. Arguments that another release does not know are left
out, and names that it lacks have stand-ins.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

# where Megatron's callables are looked up
KNOWN: dict[str, tuple[str, ...]] = {
    "megatron.core.parallel_state": ("initialize_model_parallel",),
    "megatron.core.transformer": ("TransformerConfig",),
    "megatron.core.models.gpt.gpt_layer_specs": ("get_gpt_layer_local_spec", "get_gpt_decoder_block_spec"),
    "megatron.core.models.gpt": ("GPTModel",),
    "megatron.core.distributed": ("DistributedDataParallelConfig",),
    "megatron.core.optimizer": ("OptimizerConfig", "get_megatron_optimizer"),
    "megatron.core.dist_checkpointing": ("save",),
}
METHODS: dict[str, dict[str, tuple[str, ...]]] = {
    "megatron.core.optimizer.distrib_optimizer": {"DistributedOptimizer": ("sharded_state_dict",)},
    "megatron.core.models.gpt.gpt_model": {"GPTModel": ("sharded_state_dict",)},
}


class Schedule:
    """Megatron-LM's own of a constant rate: Megatron-Core has one from 0.9 on."""

    def __init__(self, optimizer: Any, **_: Any) -> None:
        self.optimizer, self.num_steps = optimizer, 0

    def step(self, increment: int) -> None:
        self.num_steps += increment

    def state_dict(self) -> dict[str, Any]:
        return {"num_steps": self.num_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.num_steps = state["num_steps"]


ABSENT: dict[str, tuple[str, ...]] = {
    "megatron.core.models.gpt.gpt_layer_specs": ("get_gpt_mtp_block_spec", "get_gpt_decoder_block_spec"),
    "megatron.core.transformer.multi_token_prediction": ("mtp_on_this_rank",),
    "megatron.core.transformer.enums": ("AttnBackend",),
}


class Absent:
    """A call or a choice that the release lacks."""

    auto = None

    def __new__(cls, *_: Any, **__: Any) -> Any:
        return None


STRATEGIES = "megatron.core.dist_checkpointing.strategies"


def version() -> tuple[int, ...]:
    return tuple(map(int, importlib.import_module("megatron.core").__version__.split(".")[:2]))


def lenient(call: Callable[..., Any]) -> Callable[..., Any]:
    """The same without arguments that it does not know."""
    known = inspect.signature(call).parameters

    @functools.wraps(call, updated=())
    def inner(*given: Any, **named: Any) -> Any:
        if not any(one.kind is one.VAR_KEYWORD for one in known.values()):
            named = {name: value for name, value in named.items() if name in known}
        return call(*given, **named)

    return inner


def adapt() -> None:
    """Let a release take the calls of the pinned one."""
    place: Any = "megatron.core.optimizer_param_scheduler"
    if importlib.util.find_spec(place) is None:
        sys.modules[place] = type(sys)(place)
        sys.modules[place].OptimizerParamScheduler = Schedule  # type: ignore[attr-defined]
    for module, names in ABSENT.items():
        try:
            held: Any = importlib.import_module(module)
        except ImportError:
            held = sys.modules[module] = type(sys)(module)
        for name in names:
            if not hasattr(held, name):
                setattr(held, name, Absent)
    held = importlib.import_module("megatron.core.optimizer.distrib_optimizer")
    if not hasattr(held.DistributedOptimizer, "checkpoint_fully_reshardable_formats"):
        held.DistributedOptimizer.checkpoint_fully_reshardable_formats = {"fully_sharded_model_space"}
    if hasattr(held, "quantize_param_shard"):  # without Transformer Engine it fails where no parameter has 8 bits
        held.quantize_param_shard = lambda *_, **__: None
    if not hasattr(held.DistributedOptimizer, "_get_main_param_and_optimizer_states"):
        held.DistributedOptimizer._get_main_param_and_optimizer_states = states_of
    if "metadata" not in inspect.signature(held.DistributedOptimizer.sharded_state_dict).parameters:
        held.DistributedOptimizer.sharded_state_dict = of_type(held.DistributedOptimizer.sharded_state_dict)
    if version() < (0, 13):
        told: Any = importlib.import_module("megatron.core.dist_checkpointing")
        told.load_content_metadata = metadata_of
    ranks: Any = importlib.import_module("megatron.core.parallel_state")
    if not hasattr(ranks, "get_expert_data_parallel_rank"):
        ranks.get_expert_data_parallel_rank = ranks.get_data_parallel_rank
    for module, names in KNOWN.items():
        held = importlib.import_module(module)
        for name in names:
            setattr(held, name, lenient(getattr(held, name)))
    for module, classes in METHODS.items():
        held = importlib.import_module(module)
        for kind, names in classes.items():
            for name in names:
                setattr(getattr(held, kind), name, lenient(getattr(getattr(held, kind), name)))


def of_torch(write: Callable[..., Any]) -> Callable[..., Any]:
    """torch's call that writes one item, with the arguments of older torch."""
    filesystem: Any = importlib.import_module("torch.distributed.checkpoint.filesystem")

    def inner(*given: Any, **named: Any) -> Any:
        form = {"serialization_format": filesystem.SerializationFormat.TORCH_SAVE}
        return write(filesystem._StorageWriterTransforms(), *given[-4:], **{**form, **named})

    return inner


def of_type(call: Callable[..., Any]) -> Callable[..., Any]:
    """The same with metadata for a type, as since 0.13."""

    def inner(*given: Any, metadata: dict[str, Any], **named: Any) -> Any:
        kind = metadata.get("distrib_optim_sharding_type", "fully_sharded_model_space")
        return call(*given, **named, sharding_type=kind)

    return inner


def states_of(optimizer: Any, parameter: Any) -> dict[str, Any]:
    """This rank's master and states of a parameter, as from 0.11 on."""
    group, order = optimizer.model_param_group_index_map[parameter]
    master = optimizer.optimizer.param_groups[group]["params"][order]
    return {"param": master, **optimizer.optimizer.state[master]}


def metadata_of(preloaded_state_dict: dict[str, Any]) -> dict[str, Any]:
    """Metadata as of 0.13, by the type that the optimizer saved."""
    held = preloaded_state_dict.get("optimizer", {})
    kinds = (one.get("param_state_sharding_type") for one in (held, *held.values()) if isinstance(one, dict))
    kind = next((one for one in kinds if one), None)
    return {"distrib_optim_sharding_type": kind} if kind else {}


def train(job: dict[str, Any]) -> dict[str, Any]:
    from tests.interop import megatron_job

    is_old = version() < (0, 15)
    saved = {"kind": "fully_sharded_model_space" if is_old else "fully_reshardable", **job["run"]["saved"]}
    if saved["kind"] == "buckets":
        saved["kind"] = "fully_sharded_bucket_space" if is_old else "dp_reshardable"
    return megatron_job.train({**job, "saves": {job["folder"]: saved}})


def load(job: dict[str, Any]) -> dict[str, Any]:
    from tests.interop import megatron_job

    return megatron_job.load(job)


def main() -> None:
    import torch

    from tests.releases import stand_ins

    stand_ins.early()
    adapt()
    from tests.interop import jobs, megatron_run  # noqa: F401  # once, for all jobs

    if version() < (0, 15):  # it saves in a process of its own
        writer: Any = importlib.import_module(f"{STRATEGIES}.filesystem_async")
        writer._results_queue = None
        writer._write_item = of_torch(writer._write_item)
    torch.set_num_threads(1)
    jobs.do_all({"train": train, "load": load})


if __name__ == "__main__":
    os.environ.setdefault("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    main()
