"""What is lost of a checkpoint that lies in a vault, tensor by tensor: before anything of it is read."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from ucpl.extents import STORED
from ucpl.remotes.reading import remote_of
from ucpl.schedule.rebuilding import Losses

if TYPE_CHECKING:
    from ucpl.extents import Extent, Key
    from ucpl.stores.checkpoint import Checkpoint

__all__ = ["losses_of"]


def losses_of(checkpoint: Checkpoint) -> Losses | None:
    """Of the stored tensors that lay in domains that are gone. None: all is there, or it is no vault."""
    if not checkpoint.files or remote_of(os.stat(checkpoint.root / checkpoint.files[0])) is None:
        return None
    from ucpl.remotes.vaults.view import stored_at  # most checkpoints lie in no vault

    spans: dict[str, list[tuple[int, int, int]]] = {}
    others: dict[int, tuple[int, ...]] = {}
    scheme, times = "", 1
    found: dict[tuple[str, Key], dict[int, int]] = {}
    for place, extent in checkpoint.extents.items():
        if extent.file not in spans:
            stored = stored_at(checkpoint.root / extent.file)
            spans[extent.file] = stored.lost if stored is not None else []
            if stored is not None:
                memory = stored.view.memory
                scheme = str(memory.job.protection)
                times = memory.job.protection.blocks(min(map(len, memory.sets)))[0]
                others |= {d: memory.others(d) for _, _, d in spans[extent.file]}
        low, high = _span(extent)
        for begin, end, domain in spans[extent.file]:
            if max(begin, low) < min(end, high):
                mine = found.setdefault(place, {})
                mine[domain] = mine.get(domain, 0) + min(end, high) - max(begin, low)
    return Losses(found, others, scheme, times) if found else None


def _span(extent: Extent) -> tuple[int, int]:
    """From a tensor's first byte in its file to the one behind its last."""
    size = STORED[extent.dtype].itemsize
    low = extent.storage_start + extent.offset * size
    if 0 in extent.shape:
        return low, low
    return low, low + (1 + sum((n - 1) * s for n, s in zip(extent.shape, extent.stride, strict=True))) * size
