"""Replay of one AdamW step by the optimizer itself, bit for bit.

Each element is updated independently, so a tensor that is updated alone gets the same bits as among others. The other
facts that the bits depend on are saved with the gradients (`environment`).
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping

import torch

from ucpl.live.tensors import memory_of, tensor_of
from ucpl.records import frozen

__all__ = ["MOMENTS", "NUMBERS", "Raw", "flushes_denormals", "environment", "replay_step"]

# The values of a parameter group that a step needs.
NUMBERS = (
    "lr", "betas", "eps", "weight_decay", "amsgrad", "maximize", "foreach", "capturable", "differentiable", "fused",
    "decoupled_weight_decay",
)  # fmt: skip

MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")  # of a parameter, the last under amsgrad alone


@frozen(eq=False)
class Raw:
    """The bytes of a tensor.

    The user of the tensor may overwrite them.
    """

    data: bytearray | memoryview
    dtype: str  # torch's word
    shape: tuple[int, ...]

    def tensor(self) -> torch.Tensor:
        """A tensor over the same memory.

        Raises: ValueError, TypeError, RuntimeError, if the bytes do not fit such a tensor.
        """
        dtype = getattr(torch, self.dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"{self.dtype!a} is no dtype")
        return tensor_of(self.data, dtype, self.shape)


def environment(device: str) -> dict[str, str]:
    """The environment that the bits of a step depend on.

    It is the build of torch and the device.
    """
    found = {"torch": torch.__version__, "device": device, "denormals": "flushed" if flushes_denormals() else "kept"}
    if device == "cpu":
        return {**found, "runs on": torch.backends.cpu.get_cpu_capability()}
    if device == "cuda" and torch.cuda.is_available():
        return {**found, "runs on": torch.cuda.get_device_name()}
    return found


def flushes_denormals() -> bool:
    """True if this thread flushes denormal numbers to zero.

    Other threads of a step may differ.
    """
    # independent of the caller's default
    return not bool(torch.tensor([1e-40], dtype=torch.float32, device="cpu") * 1.0)


def replay_step(group: Mapping[str, object], device: str, had: Mapping[str, Raw], grad: Raw) -> dict[str, memoryview]:
    """The parameter and its optimizer state after a step, as bytes.

    They reuse the memory of the old values if possible.
    group: the numbers of its parameter group at the step.
    had: `weight`, `step` and MOMENTS before the step.
    Raises: all errors of torch for numbers that no optimizer has.
    """
    weight = torch.nn.Parameter(had["weight"].tensor().to(device))
    weight.grad = grad.tensor().to(device)
    optimizer = torch.optim.AdamW([weight])
    optimizer.param_groups[0].update({k: tuple(v) if isinstance(v, list) else v for k, v in group.items()})
    # As torch keeps it: on the CPU, except if the complete step runs on a device.
    far = bool(group.get("capturable")) or bool(group.get("fused"))
    optimizer.state[weight] = {
        name: raw.tensor().to(device if name != "step" or far else "cpu")
        for name, raw in had.items()
        if name != "weight"
    }
    # Without hooks: those of all optimizers of this process are none of this step's.
    with torch.no_grad():
        inspect.unwrap(torch.optim.AdamW.step)(optimizer)
    made = {"weight": weight.detach(), **optimizer.state[weight]}
    return {name: memory_of(made[name]) for name in had}
