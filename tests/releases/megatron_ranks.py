"""Megatron-Core of one release: it trains, saves, loads and compares. `python megatron_ranks.py JOBS`.

The scripts of tests/interop are for the release of constraints.txt. Arguments that another release does not know are left
out, and names that it lacks have stand-ins.
"""

from __future__ import annotations

import functools
import importlib
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
ABSENT: dict[str, tuple[str, ...]] = {
    "megatron.core.models.gpt.gpt_layer_specs": ("get_gpt_mtp_block_spec", "get_gpt_decoder_block_spec"),
    "megatron.core.transformer.multi_token_prediction": ("mtp_on_this_rank",),
    "megatron.core.transformer.enums": ("AttnBackend",),
}


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
    for module, names in ABSENT.items():
        try:
            held: Any = importlib.import_module(module)
        except ImportError:
            held = sys.modules[module] = type(sys)(module)
        for name in names:
            if not hasattr(held, name):
                setattr(held, name, lambda *_, **__: None)
    optimizer = importlib.import_module("megatron.core.optimizer.distrib_optimizer").DistributedOptimizer
    if not hasattr(optimizer, "checkpoint_fully_reshardable_formats"):
        optimizer.checkpoint_fully_reshardable_formats = {"fully_sharded_model_space"}
    for module, names in KNOWN.items():
        held = importlib.import_module(module)
        for name in names:
            setattr(held, name, lenient(getattr(held, name)))
    for module, classes in METHODS.items():
        held = importlib.import_module(module)
        for kind, names in classes.items():
            for name in names:
                setattr(getattr(held, kind), name, lenient(getattr(getattr(held, kind), name)))


def train(job: dict[str, Any]) -> dict[str, Any]:
    from tests.interop import megatron_job

    kind = "fully_reshardable" if version() >= (0, 15) else "fully_sharded_model_space"
    saved = {"kind": kind, **job["run"]["saved"]}
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
    torch.set_num_threads(1)
    jobs.do_all({"train": train, "load": load})


if __name__ == "__main__":
    os.environ.setdefault("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    main()
