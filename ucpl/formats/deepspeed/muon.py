"""Muon at ZeRO-1 and 2: `momentum_buffer` has complete tensors.

It has all tensors that the rank's part touches, end to end in the order of the flat buffer. They are equal on the ranks
that share a tensor: gradients of a split matrix are reduced to all of these (`muon_copy_ranks`). If a part ends within
a tensor, the buffer is neither read nor written: it is a group of its own on each rank (`state momentum_buffer of "0 on
1" = flat(each)  at dp[1]`), which changes with dp, alignment and round robin, and no layout has this form yet. With the
optimizer's states on the CPU, and at stage 3, it is cut like all others. Source: deepspeed 0.19.8,
runtime/zero/stage_1_and_2.py (`_muon_momentum_buffer`, `_get_flat_partition_unpadded`,
`_apply_muon_updates_cpu_offload`).
"""

from __future__ import annotations

from math import prod

from ucpl.errors import Label, fail
from ucpl.extents import FlatBuffer
from ucpl.formats.deepspeed.order import PlacedRun
from ucpl.formats.deepspeed.target import FileBuilder, StepWriter

STATE = "momentum_buffer"
_TRIED, _SHOWN = 64, 6  # degrees that are looked at for the remedy, and named


def check_whole_tensors(writer: StepWriter, file: FileBuilder, states: dict[int, dict[str, object]]) -> None:
    """Check that no part ends within a tensor that Muon trains.

    DeepSpeed would read its momentum differently. states: of each flat buffer. Raises: UcplError E471.
    """
    if _is_offloaded(writer.config):
        return
    for g, (flat, hyper) in enumerate(zip(writer.flats, writer.hypers, strict=True)):
        if hyper.get("use_muon") is not True or STATE not in states.get(g, {}):
            continue
        cut = _cut_within(flat, writer.dp)
        if cut is not None:
            fits = [str(dp) for dp in range(1, _TRIED) if _cut_within(flat, dp) is None][:_SHOWN]
            fail(
                "E471",
                f"dp = {writer.dp} cuts {cut}, which Muon trains: at ZeRO-1 and 2 DeepSpeed keeps its full momentum on each"
                " rank that has a part of it",
                Label(file.path, where=f"optimizer_state_dict/base_optimizer_state/state/{g}/{STATE}"),
                remedy=f"Choose zero3, or a dp that cuts no tensor of group {flat.group}: {', '.join(fits)}.",
            )


def _cut_within(flat: FlatBuffer, dp: int) -> str | None:
    """The first tensor that an end of a rank's part is within."""
    part = PlacedRun(flat.starts, flat.numel).part(dp)
    ends = {rank * part for rank in range(1, dp)}
    bounds = [
        *((start, start + prod(shape), name) for start, (name, shape) in zip(flat.starts, flat.members, strict=True))
    ]
    return next((name for low, high, name in bounds if any(low < end < high for end in ends)), None)


def _is_offloaded(config: dict[object, object]) -> bool:
    zero = config.get("zero_optimization")
    device = zero.get("offload_optimizer") if isinstance(zero, dict) else None
    return isinstance(device, dict) and device.get("device") == "cpu"
