"""Stand-ins for modules and calls that a CPU lacks.

Old releases, or newer torch, ask for them.
None touches a file of a checkpoint. A release's environment imports this module at the start of its Python.
`UCPL_STAND_INS` names those that it needs, with commas between. `early()` puts them in before the framework is
imported, `late()` after it.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.abc
import importlib.machinery
import math
import os
import sys
import types
import typing
from collections.abc import Callable
from typing import Any

WORDS = {
    "intel": "empty modules `intel_extension_for_pytorch` and `oneccl_bindings_for_pytorch`, which the CPU accelerator imports",
    "torch._six": "`torch._six`, which torch 2 lacks",
    "elastic": "two names of `torch.distributed.elastic` that newer torch lacks",
    "streams": "streams and events of the CPU that do nothing",
    "gloo": "gloo as the backend of the CPU accelerator, without compiled operators",
    "numactl": "one list of cores, in place of the program numactl",
    "mpu": "Megatron's `mpu` with one tensor-parallel rank, which loaders of universal folders ask for",
    "cuda": "calls of CUDA that do nothing, and AdamW in place of the fused kernels",
    "triton": "an empty `triton`, whose kernels need a GPU",
    "libcuda": "empty libraries of CUDA, which builds of torch for GPUs ask for",
    "fsdp1": "streams, gathers and sums of the CPU, for FSDP1: FSDP2 needs a GPU before 2.6",
    "override": "`typing.override`, which Python 3.12 has",
    "gather": "gathers into detached tensors, where newer torch refuses tensors that require gradients",
}
MODULES: dict[str, dict[str, dict[str, Any]]] = {
    "intel": {
        name: {"__version__": "0", "cwd": ""} for name in ("intel_extension_for_pytorch", "oneccl_bindings_for_pytorch")
    },
    "torch._six": {"torch._six": {"inf": math.inf, "nan": math.nan, "string_classes": (str, bytes)}},
}


def _anything(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return lambda *given, **_: given[0] if given and callable(given[0]) else lambda kernel: kernel


def wanted() -> list[str]:
    return [name for name in os.environ.get("UCPL_STAND_INS", "").split(",") if name]


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """A finder of modules that consist of a few names."""

    def __init__(self, modules: dict[str, dict[str, Any]]) -> None:
        self.modules = modules

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        return importlib.machinery.ModuleSpec(name, self) if name in self.modules else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        made = types.ModuleType(spec.name)
        vars(made).update(self.modules[spec.name])
        made.__path__ = []
        return made

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def modules() -> None:
    """Find the empty modules. A build of DeepSpeed needs them, too."""
    if "override" in wanted() and not hasattr(typing, "override"):
        typing.override = lambda method: method  # type: ignore[attr-defined]
    found = {name: held for one in wanted() for name, held in MODULES.get(one, {}).items()}
    if found:
        sys.meta_path.insert(0, Finder(found))


def early() -> None:
    if "triton" in wanted():
        from torch.utils import _triton

        _triton.has_triton_package()  # torch keeps the answer: it has none
        importlib.import_module("torch._inductor.runtime.triton_compat")
        names = ("triton", "triton.language")
        sys.meta_path.insert(0, Finder({name: {"__getattr__": _anything, "__version__": "0"} for name in names}))
    if "elastic" in wanted():
        api = importlib.import_module("torch.distributed.elastic.agent.server.api")
        for name in ("log", "_get_socket_with_port"):
            if not hasattr(api, name):
                setattr(api, name, None)


def late() -> None:
    import torch
    import torch.distributed as dist
    from deepspeed.accelerator import get_accelerator

    kind: Any = type(get_accelerator())
    if "gloo" in wanted():
        builder = kind.create_op_builder
        kind.communication_backend_name = lambda self: "gloo"
        kind.create_op_builder = lambda self, name: None if "Comm" in name else builder(self, name)
    if "streams" in wanted():
        kind.Stream = kind.Event = property(lambda self: Idle)
        kind.current_stream = kind.default_stream = lambda self, *_: Idle()
        kind.stream = lambda self, *_: contextlib.nullcontext()
        kind.memory_stats = lambda self, *_: {"num_alloc_retries": 0}
        torch.Tensor.record_stream = lambda self, *_: None  # type: ignore[method-assign]
    if "numactl" in wanted():
        numa: Any = importlib.import_module("deepspeed.utils.numa")
        numa.get_numa_cores = lambda: [[0, 1]]
    if "gather" in wanted():
        for name in ("all_gather", "all_gather_into_tensor", "_all_gather_base"):
            setattr(dist, name, detached(getattr(dist, name)))


def idle_cpu() -> None:
    """Give FSDP1 idle streams, sums and gathers on CPUs."""
    import torch
    import torch.distributed as dist

    cpu: Any = torch.cpu
    cpu.Stream = cpu.Event = Idle
    for name in ("current_stream", "default_stream", "stream"):
        setattr(cpu, name, lambda *_: Idle())
    for name in ("synchronize", "set_device", "empty_cache"):
        setattr(cpu, name, lambda *_: None)
    cpu.current_device = lambda: "cpu"
    torch.cuda.synchronize = lambda *_: None  # which 2.3 calls for any device
    torch.Tensor.record_stream = lambda self, *_: None  # type: ignore[method-assign]

    def reduce_scatter(output: Any, given: Any, group: Any = None, *_: Any, **__: Any) -> None:
        dist.all_reduce(given, group=group)
        output.copy_(given.chunk(dist.get_world_size(group))[dist.get_rank(group)])

    def all_gather(outputs: Any, given: Any, group: Any = None, *_: Any, **__: Any) -> Idle:
        every: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(every, given.detach(), group=group)
        for output, one in zip(outputs, every, strict=True):  # gloo takes no shards of several sizes
            output.detach().copy_(one)
        return Idle()

    def all_gather_into(output: Any, given: Any, group: Any = None, *_: Any, **__: Any) -> None:
        all_gather(output.detach().chunk(dist.get_world_size(group)), given, group)

    gatherers: Any = dist
    gatherers.all_gather = all_gather
    for module in (gatherers, gatherers.distributed_c10d):
        module.reduce_scatter_tensor, module.all_gather_into_tensor = reduce_scatter, all_gather_into


def detached(gather: Callable[..., Any]) -> Callable[..., Any]:
    def data(value: Any) -> Any:
        if isinstance(value, list):
            return [data(one) for one in value]
        return getattr(value, "data", value) if hasattr(value, "requires_grad") else value

    return lambda *values, **named: gather(*map(data, values), **{name: data(value) for name, value in named.items()})


class Alone:
    """Megatron's mpu, where all ranks are data-parallel."""

    def __init__(self) -> None:
        import torch.distributed as dist

        world, rank = dist.get_world_size(), dist.get_rank()
        alone = [dist.new_group([one]) for one in range(world)][rank]
        for what in (
            "model_parallel",
            "tensor_model_parallel",
            "slice_parallel",
            "pipe_parallel",
            "pipeline_model_parallel",
        ):
            self._say(what, 1, 0, alone)
        self._say("data_parallel", world, rank, dist.group.WORLD)

    def _say(self, what: str, world: int, rank: int, group: Any) -> None:
        for name, value in (("world_size", world), ("rank", rank), ("group", group)):
            setattr(self, f"get_{what}_{name}", lambda value=value: value)


class Idle:
    """A stream, or an event, that does nothing."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass

    def __getattr__(self, name: str) -> Callable[..., int]:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **__: 0


modules()
