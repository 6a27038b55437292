"""Which settings a `framework` statement can have: what its store reads of them. Data, and the refusal of any other."""

from __future__ import annotations

from typing import NoReturn

from ucpl.errors import fail
from ucpl.layout.near import nearest
from ucpl.layout.scope import at
from ucpl.syntax import nodes

__all__ = ["SETTINGS", "demand_settings"]

_DEGREES = ("dp", "tp", "pp", "ep", "edp")
SETTINGS: dict[str, tuple[str, ...]] = {
    "universal": ("stage", "files", "bf16", "fp16", "weights", "shaped"),
    "deepspeed": (
        *("stage", *_DEGREES, "bf16", "fp16", "bf16_optimizer", "masters", "fused"),
        *("round_robin", "alignment", "elastic", "sub_group_size"),
    ),
    "plain": ("file", "has_masters"),
    "huggingface": ("shard",),
    "torch": ("tracker", "step"),
}
_ELSEWHERE = {"hf": "huggingface", "transformers": "huggingface", "safetensors": "huggingface", "pytorch": "torch"}


def demand_settings(item: nodes.Framework) -> None:
    """Raises: UcplError E436 for a framework that there is not, E159 for a setting without a name, E192 for an unknown one."""
    name = item.call.name
    if name not in SETTINGS:
        close = _ELSEWHERE.get(name.lower()) or nearest(name, SETTINGS)
        fail(
            "E436",
            f"no framework is called `{name}`",
            at(item.span),
            remedy=(f"did you mean `{close}`? " if close else "")
            + f"one of {', '.join(SETTINGS)}; `framework torch()` writes files that the spec alone describes",
        )
    for argument in item.call.arguments:
        if argument.name is None:
            fail("E159", "settings of a framework have names", at(argument.span))
        if argument.name not in SETTINGS[name]:
            _refuse(name, argument)


def _refuse(framework: str, argument: nodes.Argument) -> NoReturn:
    known = SETTINGS[framework]
    said = argument.name or ""
    close = nearest(said, known)
    others = [other for other, settings in SETTINGS.items() if said in settings]
    whose = f"it is one of {' and '.join(others)}; " if others else ""
    fail(
        "E192",
        f"framework {framework}() has no setting `{said}`",
        at(argument.span),
        remedy=f"did you mean `{close}`?" if close else f"{whose}the settings of {framework}() are {', '.join(known)}",
    )
