"""What whoever loads a target must do, where a plain `load_checkpoint` is not enough."""

from __future__ import annotations

from ucpl.extents import Structure
from ucpl.stores.checkpoint import Checkpoint

WARM = (
    "the source has no optimizer state: engine.load_checkpoint(..., load_optimizer_states=False,"
    " load_lr_scheduler_states=False) takes the weights and masters, and moments start at zero"
)


def advice(source: Checkpoint, structure: Structure) -> tuple[str, ...]:
    """Of a target made of weights alone: its groups have neither moments nor hyper-parameters that an engine could take."""
    has_hypers = any(group.hyper for group in source.envelope.groups)
    has_moments = any(set(tensor.states) - {"weight", "fp32"} for tensor in structure.tensors)
    return () if has_hypers or has_moments else (WARM,)
