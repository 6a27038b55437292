"""Shifted masters: a bug of Megatron-Core up to 0.19.2 with padded buckets.

Gathering a bucket it leaves the padding at its end out, and cuts parameters of later buckets out as if it were there:
such a
parameter loses its first elements, in its master and moments alike, and as many zeros follow its last.
"""

from __future__ import annotations

import os

import numpy as np

from ucpl.extents import DTYPES, Extent, key_text
from ucpl.files.checkpoint import Checkpoint
from ucpl.files.zips import open_file, read_exactly
from ucpl.registry import format_named
from ucpl.runtime.compare import Unequal
from ucpl.runtime.values import decode, encode

__all__ = ["master_shift", "shifted_masters_report"]

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
