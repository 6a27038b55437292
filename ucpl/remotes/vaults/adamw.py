"""A step of AdamW made once more, by the optimizer itself, of what it was made of: bit for bit what it was.

Each element is stepped by itself, so a tensor that is stepped alone comes out as it did among others. What else its bits hang
on is said beside the gradients (`made_by`).
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping

import torch

from ucpl.live.tensors import memory_of, tensor_of
from ucpl.records import frozen

__all__ = ["MOMENTS", "NUMBERS", "Raw", "flushes", "made_by", "stepped"]

# Of a parameter group all that a step asks for.
NUMBERS = (
    "lr", "betas", "eps", "weight_decay", "amsgrad", "maximize", "foreach", "capturable", "differentiable", "fused",
    "decoupled_weight_decay",
)  # fmt: skip

MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")  # of a parameter, the last under amsgrad alone


@frozen(eq=False)
class Raw:
    """A tensor as bytes, which whoever asks for the tensor may write over."""

    data: bytearray | memoryview
    dtype: str  # torch's word
    shape: tuple[int, ...]

    def tensor(self) -> torch.Tensor:
        """The same memory. Raises: ValueError, TypeError, RuntimeError, where the bytes are none of such a tensor's."""
        dtype = getattr(torch, self.dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"{self.dtype!a} is no dtype")
        return tensor_of(self.data, dtype, self.shape)


def made_by(device: str) -> dict[str, str]:
    """What the bits of a step hang on, beside its numbers: how torch was built, and what it runs on."""
    found = {"torch": torch.__version__, "device": device, "denormals": "flushed" if flushes() else "kept"}
    if device == "cpu":
        return {**found, "runs on": torch.backends.cpu.get_cpu_capability()}
    if device == "cuda" and torch.cuda.is_available():
        return {**found, "runs on": torch.cuda.get_device_name()}
    return found


def flushes() -> bool:
    """Whether this thread takes the smallest numbers for zero: which threads of a step do is not said."""
    return not bool(torch.tensor([1e-40], dtype=torch.float32, device="cpu") * 1.0)  # whatever is the caller's default


def stepped(group: Mapping[str, object], device: str, had: Mapping[str, Raw], grad: Raw) -> dict[str, memoryview]:
    """A parameter and its optimizer's state after a step, as bytes: in the memory of what they were before, where that may be.

    group: the numbers of its parameter group, as the step had them. had: `weight`, `step` and MOMENTS, before the step.
    Raises: whatever torch says of numbers that no optimizer has.
    """
    weight = torch.nn.Parameter(had["weight"].tensor().to(device))
    weight.grad = grad.tensor().to(device)
    optimizer = torch.optim.AdamW([weight])
    optimizer.param_groups[0].update({k: tuple(v) if isinstance(v, list) else v for k, v in group.items()})
    # As torch keeps it: on the CPU, but where the step is made on a device as a whole.
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
