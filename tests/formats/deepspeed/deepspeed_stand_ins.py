"""Classes of DeepSpeed's shards, under its own names.

Tests change shards with torch even if DeepSpeed is not installed. ucpl reads and writes these classes inert; only tests
that damage a file by hand unpickle it.
"""

from __future__ import annotations

import enum
import importlib.util
import sys
import types


class _Plain:
    """An object that is its attributes."""

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and self.__dict__ == other.__dict__

    __hash__ = None  # type: ignore[assignment]


class _Stage(enum.IntEnum):
    disabled, optimizer_states, gradients, weights = range(4)


_CLASSES: dict[str, dict[str, type]] = {
    "deepspeed.runtime.fp16.loss_scaler": {
        "LossScaler": type("LossScaler", (_Plain,), {}),
        "DynamicLossScaler": type("DynamicLossScaler", (_Plain,), {}),
    },
    "deepspeed.runtime.zero.config": {"ZeroStageEnum": _Stage},
    "deepspeed.utils.tensor_fragment": {"fragment_address": type("fragment_address", (_Plain,), {})},
}


def install() -> None:
    """Put them where pickle looks, unless DeepSpeed itself is there."""
    if "deepspeed" in sys.modules or importlib.util.find_spec("deepspeed") is not None:
        return
    for name, classes in _CLASSES.items():
        parts = name.split(".")
        for i in range(1, len(parts) + 1):
            sys.modules.setdefault(".".join(parts[:i]), types.ModuleType(".".join(parts[:i])))
        for attribute, cls in classes.items():
            cls.__module__, cls.__qualname__ = name, attribute
            cls.__name__ = attribute
            setattr(sys.modules[name], attribute, cls)


install()
