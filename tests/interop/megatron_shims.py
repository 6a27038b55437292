"""Megatron-Core on a CPU: import this before Megatron.

It replaces the calls of devices. Only placement and synchronisation are replaced; computation and files stay Megatron's
own. Its kernels of AdamW need CUDA, too: FusedAdam replaces them.
"""

from __future__ import annotations

import contextlib
import queue
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

warnings.filterwarnings(
    "ignore", category=UserWarning, module="megatron"
)  # that Transformer Engine and Apex are not there


RANDOM = torch.arange(16, dtype=torch.uint8)  # the size of a random state of CUDA


class Nothing:
    """A stream or event on which every operation is done at once."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: Nothing()


class OnCpu(TorchFunctionMode):
    """`device="cuda"` means the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = dict(kwargs or {})
        if _is_cuda(named.get("device", "")):
            named["device"] = "cpu"
        if func is torch.device and _is_cuda(args[0]):  # "cuda:" and the current device
            args = ("cpu",)
        if getattr(func, "__name__", "") == "to" and len(args) > 1 and _is_cuda(args[1]):
            args = (args[0], "cpu", *args[2:])
        return func(*args, **named)


def _is_cuda(device: Any) -> bool:
    return not isinstance(device, torch.Tensor) and "cuda" in str(device)


class FusedAdam(torch.optim.Optimizer):
    """AdamW with the state of the fused kernels.

    Moments, and a group's step. Transformer Engine's and Apex's kernels keep it so. Megatron-Core loads its distributed
    optimizer with these only: torch's AdamW has a step of each parameter, which it does not save.
    """

    def __init__(
        self,
        params: Any,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        adam_w_mode: bool = True,
        **_: Any,
    ) -> None:
        assert adam_w_mode
        told = {"lr": lr, "bias_correction": True, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, told)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for p in group["params"]:
                state, (first, second) = self.state[p], group["betas"]
                # also for parameters without elements on this rank: Megatron-FSDP saves all ranks' tensors together
                if not state and (p.grad is not None or isinstance(p, DTensor)):
                    state |= {"exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
                if p.grad is None:
                    continue
                p.mul_(1 - group["lr"] * group["weight_decay"])
                state["exp_avg"].lerp_(p.grad, 1 - first)
                state["exp_avg_sq"].mul_(second).addcmul_(p.grad, p.grad, value=1 - second)
                root = (state["exp_avg_sq"] / (1 - second ** group["step"])).sqrt().add_(group["eps"])
                p.addcdiv_(state["exp_avg"], root, value=-group["lr"] / (1 - first ** group["step"]))


def adam_of(fused: bool) -> None:
    """Select Megatron's AdamW: the fused one, or torch's own."""
    from megatron.core import optimizer
    from megatron.core.optimizer import distrib_optimizer

    optimizer.Adam = distrib_optimizer.Adam = FusedAdam if fused else torch.optim.Adam
    optimizer.USING_PYTORCH_OPTIMIZER = not fused
    distrib_optimizer.HAVE_APEX_OR_TE = distrib_optimizer.USING_TE_OPTIMIZER = fused


class Tracker:
    """Of CUDA's random states there are none: nothing here drops out."""

    def fork(self, *_: Any) -> Any:
        return contextlib.nullcontext()

    def get_states(self) -> dict[str, Any]:
        return {"model-parallel-rng": RANDOM.clone()}

    def is_initialized(self) -> bool:
        return True


def answer() -> OnCpu:
    """Install the replacements; they end with the returned mode."""
    for name in ("synchronize", "set_device", "empty_cache"):
        setattr(torch.cuda, name, lambda *_, **__: None)
    for name in ("Stream", "Event"):
        setattr(torch.cuda, name, Nothing)
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]
    torch.cuda.current_stream = lambda *_, **__: Nothing()  # type: ignore[assignment]
    torch.cuda.get_rng_state = lambda *_, **__: RANDOM.clone()
    torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore[method-assign]
    torch.nn.Module.cuda = lambda self, *_, **__: self  # type: ignore[method-assign]
    mode = OnCpu()
    mode.__enter__()

    import megatron.core.dist_checkpointing.strategies.filesystem_async as filesystem_async
    import megatron.core.tensor_parallel.layers as layers
    import megatron.core.tensor_parallel.random as random
    import megatron.core.transformer.moe.moe_utils as moe

    random._CUDA_RNG_STATE_TRACKER = Tracker()
    random._CUDA_RNG_STATE_TRACKER_INITIALIZED = True
    layers.get_cuda_rng_tracker = lambda *_, **__: random._CUDA_RNG_STATE_TRACKER
    # Of a process that saves and waits: else one more is started for it, which imports torch anew.
    filesystem_async._results_queue = queue.Queue()
    moe.te_general_gemm = None  # 0.16.1 uses the name, which only Transformer Engine would define
    return mode


def for_fsdp() -> None:
    """Install the further replacements for Megatron-FSDP."""
    from torch.distributed.device_mesh import DeviceMesh

    own = DeviceMesh.from_group
    DeviceMesh.from_group = staticmethod(  # type: ignore[method-assign]
        lambda group, device_type, *args, **named: own(group, "cpu", *args, **named)
    )
    torch.cuda.stream = lambda *_, **__: contextlib.nullcontext()  # type: ignore[assignment]

    from megatron.core.distributed.fsdp import mcore_fsdp_adapter as adapter

    adapter.TELinear = type("TELinear", (), {})  # 0.16.1 uses the name, which only Transformer Engine would define
    adapter._get_rng_state_dict = dict
    adapter._load_rng_state_dict = lambda _: None


@contextlib.contextmanager
def types_of_cuda() -> Iterator[None]:
    """While Megatron sorts parameters by `tensor.type()`, which must name CUDA's types."""
    own = torch.Tensor.type

    def named(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        found = own(self, *args, **kwargs)
        is_own = isinstance(found, str) and "cuda" not in found
        return found.replace("torch.", "torch.cuda.") if is_own else found

    torch.Tensor.type = named  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        torch.Tensor.type = own  # type: ignore[method-assign]


MODE = answer()
