"""The choice among copies of a tied module's tensor.

The copy that gradients reach is used. Only the weights named by tied_weight_attr are synchronised on all stages that
hold a tied module; its other tensors diverge on stages without a gradient. Moments that are zero throughout identify
such a copy.
"""

from __future__ import annotations

import re
from math import prod
from pathlib import Path

from ucpl.extents import DTYPES, Extent
from ucpl.extents.pipeline import Pipeline
from ucpl.formats.deepspeed.gathered import Gathered
from ucpl.storage.reading import pread

_BLOCK_BYTES = 1 << 20


def trusted(root: Path, pipeline: Pipeline, gathered: Gathered, tp: int = 1) -> dict[str, int]:
    """Tensors of tied modules with a gradient on some stages only.

    Returns the first stage with a gradient for each. If no stage moves it, the first is used. There is no such evidence
    before the first step, or if the optimizer keeps no moments: then copies must be equal. `tp`: the number of ranks
    that hold parts of it; all of them are checked.
    """
    out: dict[str, int] = {}
    for tensor, places in pipeline.places().items():
        stages = sorted({s for s, _, _ in places})
        if len(stages) < 2 or tensor not in gathered.states:
            continue
        moments = [name for name in gathered.states[tensor] if name != "fp32"]
        moving = []
        for s in stages:
            mine = [(mp, tp) for mp in range(s * tp, s * tp + tp)]
            extents = [x for name in moments for at in mine for x in _parts(gathered, tensor, at, name)]
            if any(not is_zero(root, *part) for part in extents):
                moving.append(s)
        if moments and len(moving) < len(stages):
            out[tensor] = moving[0] if moving else stages[0]
    return out


def _parts(gathered: Gathered, tensor: str, at: tuple[int, int], state: str) -> list[tuple[Extent, int, int]]:
    """A tensor's state in the shards of one model-parallel rank.

    (flat part, first element, end) for each data-parallel rank.
    """
    mp, tp = at
    here = {"pp": mp // tp, "tp": mp % tp}
    flat = next(
        (
            f
            for f in gathered.stated
            if all(here.get(a, v) == v for a, v in f.coordinates.items()) and any(n == tensor for n, _ in f.members)
        ),
        None,
    )
    if flat is None:
        return _of_number(gathered, tensor, f"mp_rank_{mp:02d}_model_states.pt", state)
    start = next(b for b, (n, _) in zip(flat.starts, flat.members, strict=True) if n == tensor)
    stop = start + next(prod(shape) for n, shape in flat.members if n == tensor)
    out, position = [], 0
    wanted = [
        (file, extent)
        for (file, key), extent in gathered.payload.items()
        if ("base_optimizer_state" in key or key[0] == "optimizer")
        and key[-2:] == (flat.bucket, state)
        and f"mp_rank_{mp:02d}_" in file
    ]
    for _, extent in sorted(wanted, key=lambda x: _dp_rank(x[0])):
        low, high = max(start - position, 0), min(stop - position, extent.numel)
        if low < high:
            out.append((extent, low, high))
        position += extent.numel
    return out


def _of_number(gathered: Gathered, tensor: str, file: str, state: str) -> list[tuple[Extent, int, int]]:
    """A state of a tensor that an optimizer without ZeRO numbers."""
    number = gathered.numbers.get((file, tensor))
    found = (x for (at, key), x in gathered.payload.items() if at == file and key[-2:] == (number, state))
    return [(extent, 0, extent.numel) for extent in found if number is not None]


def _dp_rank(file: str) -> int:
    found = re.search(r"zero_pp_rank_(\d+)_", file)
    return int(found[1]) if found else 0


def is_zero(root: Path, extent: Extent, low: int, high: int) -> bool:
    """Test whether elements low..high are all 0, of either sign."""
    import numpy as np

    if not extent.is_contiguous:
        return False
    itemsize = DTYPES[extent.dtype].itemsize
    start = extent.storage_start + (extent.offset + low) * itemsize
    stop = start + (high - low) * itemsize
    with (root / extent.file).open("rb") as file:
        while start < stop:
            block = pread(file.fileno(), min(stop - start, _BLOCK_BYTES), start)
            block = block[: len(block) // itemsize * itemsize]
            if not block:
                return False
            words = np.frombuffer(block, "u1").reshape(-1, itemsize).copy()
            words[:, -1] &= 0x7F  # the sign of a little-endian float
            if words.any():
                return False
            start += len(block)
    return True
