"""States of a new optimizer, without the work of a step.

torch makes them by a step with gradients of zeros. Here that step is made by a copy of the optimizer whose tensors have no
memory: nothing is computed, or cleared, that the checkpoint then replaces. Not here: their values.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable

import torch
from torch.distributed.fsdp import FullyShardedDataParallel

from ucpl.live.tensors import is_placed, part_of

__all__ = ["make_states"]

Stored = Callable[[torch.Tensor, str], bool]


def make_states(model: torch.nn.Module, optimizer: torch.optim.Optimizer, stored: Stored) -> bool:
    """Give an optimizer without a step its states, with any values.

    False, and nothing is made, if it has some, or if torch must make them: an optimizer that is not torch's, a state that
    is no tensor like its parameter, or one for which `stored` is not true.
    """
    params = [p for group in optimizer.param_groups for p in group["params"]]
    if optimizer.state or not type(optimizer).__module__.startswith("torch.optim.") or not all(map(_is_plain, params)):
        return False
    if FullyShardedDataParallel.fsdp_modules(model):  # its parameters are views of flat ones
        return False
    try:
        kinds, made = _stepped(optimizer)
    except (RuntimeError, TypeError, ValueError):  # it needs values, or a closure
        return False
    found: dict[torch.Tensor, dict[str, object]] = {}
    for param, shadow in kinds.items():
        for name, value in made.get(shadow, {}).items():
            if isinstance(value, torch.Tensor) and value.is_meta:
                if value.shape != shadow.shape or not stored(param, name):
                    return False
                state: object = torch.empty_like(param.detach(), dtype=value.dtype)
            else:
                state = copy.deepcopy(value)
            found.setdefault(param, {})[name] = state
    optimizer.state.update(found)
    return bool(found)


def _is_plain(param: torch.Tensor) -> bool:
    """True for a plain parameter or DTensor without a gradient."""
    mine = part_of(param) if is_placed(param) else param
    return type(mine) in (torch.Tensor, torch.nn.Parameter) and mine.layout == torch.strided and param.grad is None


def _stepped(
    optimizer: torch.optim.Optimizer,
) -> tuple[dict[torch.Tensor, torch.Tensor], dict[torch.Tensor, dict[str, object]]]:
    """Parameters without memory, and their states after a step.

    There is one for all parameters of a group that are alike. As in torch, all that are trained have gradients, and
    the rate is zero.
    """
    found: dict[torch.Tensor, torch.Tensor] = {}
    groups = []
    for group in optimizer.param_groups:
        kinds: dict[object, torch.Tensor] = {}
        for param in group["params"]:
            mine = part_of(param).detach()
            kind = (mine.shape, mine.stride(), mine.dtype, param.requires_grad)
            found[param] = kinds.setdefault(kind, torch.empty_like(mine, device="meta"))
            if param.requires_grad and found[param].grad is None:
                found[param].requires_grad_().grad = torch.empty_like(found[param])
        groups.append({**group, "params": list(kinds.values()), **_at_rest(group)})
    other = copy.copy(optimizer)  # by torch's own state: no hooks, and no schedule that counts steps
    other.state, other.param_groups = defaultdict(dict), groups
    other.step()
    return found, other.state


def _at_rest(group: dict[str, object]) -> dict[str, object]:
    return {"lr": torch.tensor(0.0) if isinstance(group["lr"], torch.Tensor) else 0.0} if "lr" in group else {}
