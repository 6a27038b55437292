"""The values of NAMES, folders of tests/fixtures/megatron, by their formula.

Names are those of one process, `decoder.layers.3.mlp.linear_fc1.weight`; `stored` says the same under the keys of torch_dist.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import defaultdict
from functools import cache
from pathlib import Path
from typing import Any

import torch

FIXTURES = Path(__file__).parent / "fixtures" / "megatron"
NAMES = (  # those that tests.interop.megatron_fixtures wrote
    "dist_adam_of_torch",
    "dist_adam_tp2",
    "dist_dp_reshardable_tp2",
    "dist_stacked_moe_tp2_ep2",
    "dist_stacked_tp2_pp2_fully",
    "dist_tied_vpp2",
    "dist_unstacked_moe_ep2",
)

# Megatron's own keys: the norm before a linear layer has the name that the layer gives it where the two are one kernel
KEYS = {
    ".input_layernorm.": ".self_attention.linear_qkv.layer_norm_",
    ".pre_mlp_layernorm.": ".mlp.linear_fc1.layer_norm_",
    ".local_experts.": ".experts.",
}
State = dict[str, dict[str, Any]]  # {name: {state: tensor or number}}


@cache
def described(name: str) -> dict[str, Any]:
    """The record next to the folder: {"run", "ranks", "saved", "tensors"}."""
    found: dict[str, Any] = json.loads((FIXTURES / f"{name}.truth.json").read_text())
    return found


def value(name: str, state: str, shape: list[int], dtype: str) -> torch.Tensor:
    """One complete state. A weight is its master, rounded."""
    if dtype not in ("float32", "bfloat16"):
        raise AssertionError(f"{state} of {name}: there is no formula for {dtype}")
    drawn = "fp32" if state == "weight" else state
    seed = int.from_bytes(hashlib.sha256(f"{name}|{drawn}|0".encode()).digest()[:4], "little")
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(getattr(torch, dtype))


def truth(name: str) -> State:
    """{parameter or buffer: {"weight", "fp32", "exp_avg", "exp_avg_sq", "step", "lr", ...}}, complete."""
    out: State = {}
    for tensor, told in described(name)["tensors"].items():
        out[tensor] = {s: value(tensor, s, told["shape"], dtype) for s, dtype in told["states"].items()}
        out[tensor] |= {k: v for k, v in told.items() if k not in ("shape", "states")}
    return out


def stored(state: State, run: dict[str, Any], unstacked: bool) -> State:
    """The same under the keys of torch_dist.

    Layers and experts stacked, or one by one with separate halves of fc1.
    """
    parts: dict[str, dict[tuple[int, ...], dict[str, Any]]] = defaultdict(dict)
    for name, states in state.items():
        key, at = stored_key(name, stacks_layers=not (unstacked or run["dense_first"]), stacks_experts=not unstacked)
        if unstacked and run["swiglu"] and re.search(r"linear_fc1\.(weight|bias)$", key):
            for i, half in enumerate("wv"):
                cut = {s: v.chunk(2)[i] if torch.is_tensor(v) else v for s, v in states.items()}
                parts[f"{key}_{half}"][at] = cut
        else:
            parts[key][at] = states
    return {key: joined(found) for key, found in parts.items()}


def stored_key(name: str, stacks_layers: bool, stacks_experts: bool) -> tuple[str, tuple[int, ...]]:
    """The key, and the place in its stacked dims."""
    for own, key in KEYS.items():
        name = name.replace(own, key)
    at: tuple[int, ...] = ()
    if stacks_layers and (layer := re.match(r"decoder\.layers\.(\d+)\.", name)):
        name, at = f"decoder.layers.{name[layer.end() :]}", (int(layer[1]),)
    if stacks_experts and (expert := re.search(r"\.experts\.experts\.(\d+)\.", name)):
        name, at = f"{name[: expert.start()]}.experts.experts.{name[expert.end() :]}", (*at, int(expert[1]))
    return name, at


def joined(parts: dict[tuple[int, ...], dict[str, Any]]) -> dict[str, Any]:
    first = next(iter(parts.values()))
    if list(parts) == [()]:
        return first
    grid = tuple(max(at[axis] for at in parts) + 1 for axis in range(len(next(iter(parts)))))
    out: dict[str, Any] = {}
    for state, held in first.items():
        if torch.is_tensor(held):
            out[state] = torch.stack([parts[at][state] for at in sorted(parts)]).reshape(*grid, *held.shape)
        else:
            assert all(part[state] == held for part in parts.values()), state
            out[state] = held
    return out
