"""Compare weights with the fp32 masters that they are rounded from.

All of them here; a sample of each before a run (same_step).

Files of two steps in one folder have equal keys and shapes. The optimizer's counters show most of these cases; for an
optimizer
without counters, and for files of weights, only values show it. They change everywhere with a step, so a sample is
enough.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
from attrs import evolve

from ucpl.errors import Diagnostic
from ucpl.extents import DTYPES, Extent, key_text
from ucpl.graph import build
from ucpl.graph.side import DtypeOf
from ucpl.layout import Derivation
from ucpl.placement import Placement
from ucpl.planning import Plan, order
from ucpl.registry import format_named
from ucpl.verification.elements import Elements, counted, only, pairs_of

if TYPE_CHECKING:  # planning does not import the runtime
    from ucpl.files.checkpoint import Checkpoint
    from ucpl.runtime.compare import Comparison, Unequal

__all__ = ["dtype_of", "elements_of", "masters_of", "weights_against_masters", "master_shift", "shifted_masters_report"]


def weights_against_masters(
    checkpoint: Checkpoint, placement: Placement, memory: int, workers: int
) -> tuple[Comparison | None, list[Diagnostic]]:
    """Compare every stored weight with its stored master.

    None: not both are stored. Findings are E701.
    """
    from ucpl.verification.target_check import compare_target

    plan = masters_of(placement, dtype_of(checkpoint))
    if plan is None:
        return None, []
    compared = compare_target(plan, checkpoint, checkpoint, memory=memory, workers=workers)
    weights = Elements(_weights(placement))
    return compared, [_found(u, weights, checkpoint) for u in compared]


def _found(unequal: Unequal, weights: Elements, checkpoint: Checkpoint) -> Diagnostic:
    said = weights.finding("E701", unequal, "the weight is not its master, rounded")
    notes, remedy = shifted_masters_report(unequal, checkpoint)
    return evolve(said, notes=notes, remedy=remedy or said.remedy)


def masters_of(placement: Placement, dtypes: DtypeOf | None, without: frozenset[str] = frozenset()) -> Plan | None:
    """Moves from stored masters to stored weights, if both are stored.

    Without: tensors whose masters are not read.
    """
    both = _both(placement) - without
    if not both:
        return None
    masters = only(placement, {(path, "fp32") for path in both})
    masters = evolve(masters, layout=evolve(masters.layout, derived=(Derivation("weight", "fp32"),)))
    weights = counted(only(placement, {(path, "weight") for path in both}))
    return order(build(masters, weights, dtype_of=dtypes), name="masters")


def elements_of(placement: Placement) -> Callable[[Unequal], str]:
    """A function that names an element of such a plan's target."""
    return Elements(_weights(placement)).of


def _weights(placement: Placement) -> Placement:
    return counted(only(placement, {(path, "weight") for path in _both(placement)}))


def _both(placement: Placement) -> set[str]:
    pairs = pairs_of(placement)
    return {path for path, state in pairs if state == "weight" and (path, "fp32") in pairs}


def dtype_of(checkpoint: Checkpoint) -> DtypeOf:
    """The dtype that a checkpoint has at a place."""
    return checkpoint.dtype_of


# ---- shifted masters: a bug of Megatron-Core -------------------------------------------------------------------------


LOOKED_AT = 1 << 20  # elements of a chunk, at most
_TOLD = 8  # of them that must agree


def shifted_masters_report(unequal: Unequal, checkpoint: Checkpoint) -> tuple[tuple[str, ...], str]:
    """Notes and a remedy for a shifted master.

    Empty if it is not shifted.
    """
    if not format_named(checkpoint.format).has_shifted_masters:
        return (), ""
    weight = _extent(checkpoint, unequal.file, unequal.key)
    master = _extent(checkpoint, unequal.source_file, unequal.source_key)
    moved = master_shift(checkpoint, weight, master) if weight is not None and master is not None else 0
    if not moved:
        return (), ""
    return (
        f"the master is the weight from element {moved} on: Megatron-Core up to 0.19.2 saves tensors behind the padding of"
        f" a bucket so; {moved} elements of the master and of each moment are in no file, and the weight is complete",
    ), (
        f"convert with --freeze '{_name_of(unequal.key)}' to keep its weight, and all states of the other tensors; a later"
        " --train gives it new ones"
    )


def master_shift(checkpoint: Checkpoint, weight: Extent, master: Extent) -> int:
    """The number of elements by which a chunk's master is shifted.

    0 if it is another's.
    """
    from ucpl.runtime.values import decode, encode

    if weight.shape != master.shape or not (weight.is_contiguous and master.is_contiguous):
        return 0
    count = min(weight.numel, LOOKED_AT)
    width = DTYPES[weight.dtype].itemsize
    mine = _read(checkpoint, weight, count).reshape(-1, width)
    made = encode(decode(_read(checkpoint, master, count), master.dtype), weight.dtype).reshape(-1, width)
    equal = np.flatnonzero((mine == made[0]).all(axis=1))
    for by in equal[(equal > 0) & (equal <= count - _TOLD)]:
        if np.array_equal(mine[by:], made[: count - by]):
            return int(by)
    return 0


def _read(checkpoint: Checkpoint, extent: Extent, count: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    from ucpl.files.zips import open_file, read_exactly

    width = DTYPES[extent.dtype].itemsize
    fd = open_file(checkpoint.root / extent.file, extent.file)
    try:
        raw = read_exactly(fd, extent.storage_start + extent.offset * width, count * width, extent.file)
    finally:
        os.close(fd)
    return np.frombuffer(raw, dtype=np.uint8)


def _extent(checkpoint: Checkpoint, file: str, key: str) -> Extent | None:
    found = (e for e in checkpoint.extents.values() if e.file == file and key_text(e.key) == key)
    return next(found, None)


def _name_of(key: str) -> str:
    """The tensor's name, without where its chunk begins."""
    return key.split("/", 1)[0]
