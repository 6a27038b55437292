"""Megatron's folders among the fixtures, and the formula of their values.

It is `torch.randn`, seeded by names. An element's value is that of Megatron-Core's stacked tensor
(decoder.layers.mlp.linear_fc1.weight, all layers, all experts), so that no degree of any parallelism is in it. Masters
are the weights before rounding; a moment has its name in the seed, too.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any

import torch

FIXTURES = Path(__file__).parents[2] / "fixtures" / "megatron"
LEGACY = {"buckets": (2, 4), "vpp": (4, 4), "moe": (1, 4), "adam": (1, 4), "grouped": (1, 4)}  # layers, experts
_PLAIN = {"input_layernorm": "self_attention.linear_qkv.layer_norm", "pre_mlp_layernorm": "mlp.linear_fc1.layer_norm"}


def formula(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "little")
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def expected(fixture: str, name: str, shape: tuple[int, ...], state: str = "weight") -> torch.Tensor:
    """In fp32."""
    layers, experts = LEGACY[fixture]
    index: tuple[int, ...] = ()
    lead: tuple[int, ...] = ()
    layer = re.fullmatch(r"(decoder\.layers)\.(\d+)\.(.*)", name)
    if layer is not None:
        inner = layer[3]
        index, lead = (int(layer[2]),), (layers,)
        expert = re.fullmatch(r"(.*\.experts)\.local_experts\.(\d+)\.(.*)", inner)
        if expert is not None:
            inner = f"{expert[1]}.experts.{expert[3]}"
            index, lead = (*index, int(expert[2])), (*lead, experts)
        norm, _, word = inner.partition(".")
        name = f"{layer[1]}.{_PLAIN[norm]}_{word}" if norm in _PLAIN else f"{layer[1]}.{inner}"
    suffix = "" if state in ("weight", "fp32") else f".{state}"
    return formula(name + suffix, (*lead, *shape))[index]


def assert_exact(fixture: str, plain: Path, states: int = 3) -> dict[str, Any]:
    """Compare every value with the formula, and return the file."""
    value: dict[str, Any] = torch.load(plain, weights_only=True)
    for name, held in value["params"].items():
        step = held.pop("step", None)
        assert len(held) == 1 + states and (step is None or float(step) == 1.0) == (step is None or bool(states)), name
        for state, found in held.items():
            wanted = expected(fixture, name, tuple(found.shape), state).to(found.dtype)
            assert torch.equal(found, wanted), f"{state} of {name}"
    return value
