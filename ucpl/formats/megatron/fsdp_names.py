"""Names in Megatron-FSDP's folders, and the same tensors' names in modules."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from ucpl.formats.megatron.legacy_names import NameRules

__all__ = ["HALVES", "LEAD", "MODEL", "STATES", "gated", "halved", "in_folder", "in_modules"]

MODEL = "model."  # the dict of the state dict that has the module's tensors
LEAD = "module."  # prefix of names: the module that Megatron-FSDP wraps
STATES = "optimizer.state."
HALVES = ("_w", "_v")  # of a gated linear_fc1: the gate, and the up projection
_GROUPED = re.compile(
    r"(?P<lead>.*\.experts\.)(?P<linear>linear_fc[12])\.(?P<word>weight|bias)(?P<number>\d{1,9})", re.DOTALL
)
_APART = re.compile(
    r"(?P<lead>.*\.experts\.)local_experts\.(?P<number>\d{1,9})\.(?P<linear>linear_fc[12])\.(?P<word>weight|bias)",
    re.DOTALL,
)
_FC1 = re.compile(r".*\.mlp\.(?:.*\.)?linear_fc1\.(?:weight|bias)", re.DOTALL)


def in_modules(name: str) -> str:
    """A tensor's name in modules of single experts.

    `experts.linear_fc1.weight3` is of the fourth expert.
    """
    match = _GROUPED.fullmatch(name)
    if match is None:
        return name
    return f"{match['lead']}local_experts.{match['number']}.{match['linear']}.{match['word']}"


def in_folder(name: str, *, grouped: bool) -> str:
    """The same as a module has it. grouped: experts are TEGroupedMLP's."""
    match = _APART.fullmatch(name) if grouped else None
    return name if match is None else f"{match['lead']}{match['linear']}.{match['word']}{match['number']}"


def halved(name: str) -> tuple[str, int] | None:
    """(complete tensor, number of the half) of a file's name, or None."""
    for number, half in enumerate(HALVES):
        whole = name.removesuffix(half)
        if whole != name and _FC1.fullmatch(in_modules(whole)) is not None:
            return whole, number
    return None


def gated(names: Iterable[str], shapes: Mapping[str, tuple[int, ...]], place: str) -> frozenset[str]:
    """The tensors that are a gate and an up projection.

    Raises: UcplError E543.
    """
    dialect = NameRules(shapes, 1, {}, place)
    return frozenset(name for name in names if _FC1.fullmatch(name) is not None and dialect.gated(name))
