"""Lost and replayed bytes of a snapshot, by tensor.

They are known before any byte is read. Lost bytes were on failed domains; parity rebuilds them. Replayed bytes are computed
from saved gradients.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from ucpl.extents import STORED
from ucpl.storage.reading import remote_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ucpl.extents import Extent, Key
    from ucpl.files.checkpoint import Checkpoint
    from ucpl.planning.rebuilding import Losses, Replays
    from ucpl.storage.vaults.snapshot_folder import SnapshotFile

__all__ = ["losses_of", "replays_of"]


def _stored(checkpoint: Checkpoint) -> dict[str, SnapshotFile]:
    """Files of a vault, by name."""
    if not checkpoint.files or remote_of(os.stat(checkpoint.root / checkpoint.files[0])) is None:
        return {}
    from ucpl.storage.vaults.snapshot_folder import get_snapshot_file  # most checkpoints are in no vault

    names = {extent.file for extent in checkpoint.extents.values()}
    found = ((name, get_snapshot_file(checkpoint.root / name)) for name in sorted(names))
    return {name: stored for name, stored in found if stored is not None}


def losses_of(checkpoint: Checkpoint) -> Losses | None:
    """Bytes of stored tensors that were on lost domains.

    None: no byte is lost, or the checkpoint is not in a vault.
    """
    spans: dict[str, list[tuple[int, int, int]]] = {}
    others: dict[int, tuple[int, ...]] = {}
    scheme, times = "", 1
    for name, stored in _stored(checkpoint).items():
        spans[name], memory = stored.lost, stored.folder.memory.whole
        scheme = str(memory.job.protection)
        times = memory.job.protection.blocks(min(map(len, memory.sets)))[0]
        others |= {d: memory.others(d) for _, _, d in spans[name]}
    found: dict[tuple[str, Key], dict[int, int]] = {}
    for place, extent in checkpoint.extents.items():
        for size, (_, _, domain) in _within(extent, spans.get(extent.file, [])):
            mine = found.setdefault(place, {})
            mine[domain] = mine.get(domain, 0) + size
    if not found:
        return None
    from ucpl.planning.rebuilding import Losses

    return Losses(found, others, scheme, times)


def replays_of(checkpoint: Checkpoint) -> Replays | None:
    """Bytes of stored tensors that a replay computes.

    None: all bytes were saved, or the checkpoint is not in a vault.

    Raises: UcplError E698.
    """
    spans: dict[str, list[tuple[int, int, int]]] = {}
    steps = 0
    for name, stored in _stored(checkpoint).items():
        spans[name], steps = stored.replayed, stored.folder.memory.commit.depth
    found: dict[tuple[str, Key], tuple[int, int]] = {}
    for place, extent in checkpoint.extents.items():
        for size, (_, _, gradients) in _within(extent, spans.get(extent.file, [])):
            before = found.get(place, (0, 0))
            found[place] = before[0] + size, before[1] + gradients
    if not found:
        return None
    from ucpl.planning.rebuilding import Replays

    return Replays(found, steps, "AdamW")


def _within(extent: Extent, spans: list[tuple[int, int, int]]) -> Iterator[tuple[int, tuple[int, int, int]]]:
    """(bytes, span) of each span that overlaps a tensor; spans are ascending."""
    if not spans:
        return
    low, high = _span(extent)
    for span in spans:
        size = min(span[1], high) - max(span[0], low)
        if size > 0:
            yield size, span


def _span(extent: Extent) -> tuple[int, int]:
    """The byte range of a tensor in its file, without the end."""
    size = STORED[extent.dtype].itemsize
    low = extent.storage_start + extent.offset * size
    if 0 in extent.shape:
        return low, low
    return low, low + (1 + sum((n - 1) * s for n, s in zip(extent.shape, extent.stride, strict=True))) * size
