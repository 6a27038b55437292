"""What was written, once more from the disk: every tile against its digest, and every byte that is no payload as it is."""

from __future__ import annotations

import threading
import zlib
from collections.abc import Sequence

import numpy as np
import xxhash
from attrs import frozen
from numpy.typing import NDArray

from ucpl.errors import Label, fail
from ucpl.runtime.assemble import Assembler
from ucpl.runtime.buffers import Workspace
from ucpl.runtime.crew import Queue, run_crew
from ucpl.runtime.manifest import storage_crcs
from ucpl.runtime.moving import Known, tile_of
from ucpl.runtime.options import DataPlane
from ucpl.runtime.reading import Reader
from ucpl.runtime.sources import SourceFiles
from ucpl.runtime.targets import TargetFiles, TargetPlan
from ucpl.runtime.tiles import Tiles

__all__ = ["Made", "is_same", "patches_of", "read_back"]

Parts = Sequence[tuple[int, bytes]]  # (byte position, bytes) of one file


@frozen(eq=False)
class Made:
    """What tiles are made of, and by whom."""

    assembler: Assembler
    sources: SourceFiles


def read_back(files: TargetFiles, known: Known, beside: Sequence[Parts], plane: DataPlane) -> None:
    """`beside[f]` are the bytes of file f that are no payload. Raises: UcplError E505."""
    tiles = known.tiles
    queue = Queue(len(tiles))

    def work(stop: threading.Event) -> None:
        with Workspace(plane.share, plane.budget) as space:
            while not stop.is_set() and (i := queue.take()) is not None:
                size, file, position = int(tiles.size[i]), int(tiles.file[i]), int(tiles.position[i])
                view = space.tile_view[:size]
                if files.read(file, view, position) != size or xxhash.xxh3_64_intdigest(view) != int(known.xxh3[i]):
                    _differs(files, file, position, size)
                if known.told[i] and zlib.crc32(view) != int(known.crc[i]):  # the CRC that readers will hold it against
                    _differs(files, file, position, size)
                plane.counters.add(read_back=size)

    run_crew(plane.workers, work)
    for file, parts in enumerate(beside):
        for position, data in parts:
            if not _holds(files, file, position, data):
                _differs(files, file, position, len(data))
            plane.counters.add(read_back=len(data))


def _holds(files: TargetFiles, file: int, position: int, data: bytes) -> bool:
    found = bytearray(len(data))
    return files.read(file, memoryview(found), position) == len(data) and found == data


def _differs(files: TargetFiles, file: int, position: int, size: int) -> None:
    path = files.path(file)
    fail("E505", f"{path}: bytes {position} to {position + size} are not what was written", Label(str(path)))


def patches_of(layout: TargetPlan, unit_crc: NDArray[np.uint32]) -> list[tuple[tuple[int, bytes], ...]]:
    """For each file, the bytes that depend on the CRCs of its payload."""
    crcs: list[dict[str, int]] = [{} for _ in layout.files]
    for unit, crc in zip(layout.units, unit_crc.tolist(), strict=True):
        crcs[unit.file][unit.storage] = crc
    return [file.plan.finish(crcs[i]) for i, file in enumerate(layout.files)]


def is_same(files: TargetFiles, layout: TargetPlan, tiles: Tiles, made: Made, plane: DataPlane) -> bool:
    """Whether files that exist are, byte for byte, what would be written: all is read, nothing is.

    For a target that says nothing of itself (a single file).
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
        if not all(_holds(files, i, position, data) for position, data in file.plan.fixed):
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
                crc[i], wanted = zlib.crc32(view), xxhash.xxh3_128_digest(view)
                if files.read(tile.file, view, tile.position) != tile.size or xxhash.xxh3_128_digest(view) != wanted:
                    other.set()

    run_crew(plane.workers, work)
    if other.is_set():
        return False
    patches = patches_of(layout, storage_crcs(layout, tiles, crc))
    return all(_holds(files, i, *part) for i, parts in enumerate(patches) for part in parts)
