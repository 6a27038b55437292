"""Up-to-date files, and bytes of a file that depend on its payload."""

from __future__ import annotations

import threading

import numpy as np
import xxhash
from numpy.typing import NDArray

from ucpl.digests import crc32
from ucpl.records import frozen
from ucpl.runtime.assemble import Assembler
from ucpl.runtime.buffers import Workspace
from ucpl.runtime.manifest import storage_crcs
from ucpl.runtime.moving import tile_of
from ucpl.runtime.options import DataPlane
from ucpl.runtime.read_back import holds
from ucpl.runtime.reading import Reader
from ucpl.runtime.sources import SourceFiles
from ucpl.runtime.targets import TargetFiles, TargetPlan
from ucpl.runtime.tiles import Tiles
from ucpl.runtime.worker_pool import Queue, run_through

__all__ = ["Made", "is_same", "patches_of"]


def patches_of(
    layout: TargetPlan, unit_crc: NDArray[np.uint32], files: range | None = None
) -> list[tuple[tuple[int, bytes], ...]]:
    """Bytes of each file that depend on the CRCs of its payload.

    `files` limits them to some files.
    """
    crcs: list[dict[str, int]] = [{} for _ in layout.files]
    for unit, crc in zip(layout.units, unit_crc.tolist(), strict=True):
        crcs[unit.file][unit.storage] = crc
    return [layout.files[i].plan.finish(crcs[i]) for i in files or range(len(layout.files))]


@frozen(eq=False)
class Made:
    """Sources of tiles, and the assembler."""

    assembler: Assembler
    sources: SourceFiles


def is_same(files: TargetFiles, layout: TargetPlan, tiles: Tiles, made: Made, plane: DataPlane) -> bool:
    """True if existing files equal this run's, byte for byte.

    All is read, nothing is written. For a target that has no manifest (a single file).
    """
    return _begins_alike(files, layout) and _goes_on_alike(files, layout, tiles, made, plane)


def _begins_alike(files: TargetFiles, layout: TargetPlan) -> bool:
    """Sizes, and all bytes that are known before data moves."""
    for i, file in enumerate(layout.files):
        try:
            if files.path(i).stat().st_size != file.plan.size:
                return False
        except OSError:
            return False
        if not all(holds(files, i, position, data) for position, data in file.plan.fixed):
            return False
    return True


def _goes_on_alike(files: TargetFiles, layout: TargetPlan, tiles: Tiles, made: Made, plane: DataPlane) -> bool:
    crc = np.zeros(len(tiles), np.uint32)
    queue = Queue(len(tiles))
    other = threading.Event()

    def work(stop: threading.Event) -> None:
        with Workspace(plane.share, plane.budget) as space:
            reader = Reader(made.sources)
            while not stop.is_set() and not other.is_set() and (i := queue.take()) is not None:
                tile = tile_of(layout, tiles, i)
                made.assembler.assemble(tile.target, tile.low, tile.high, reader, space)
                reader.fragments.clear()
                view = space.tile_view[: tile.size]
                crc[i], wanted = crc32(view), xxhash.xxh3_128_digest(view)
                if files.read(tile.file, view, tile.position) != tile.size or xxhash.xxh3_128_digest(view) != wanted:
                    other.set()

    run_through(queue, work, plane.workers)
    if other.is_set():
        return False
    patches = patches_of(layout, storage_crcs(layout, tiles, crc))
    return all(holds(files, i, *part) for i, parts in enumerate(patches) for part in parts)
