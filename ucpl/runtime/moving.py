"""Movement of tiles: assembled, digested, written and journalled by threads.

The threads share one queue of tiles, or of bands of them, in the order of the target's files. The thread that waits for
them syncs the written files and journals the tiles; one more reads them back from the disk meanwhile (read_back), and
so do those that have no more to move. Not here: the contents of a tile (assemble), and the steps before and after
(execute).
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack

import numpy as np
import xxhash
from attrs import field

from ucpl.digests import crc32
from ucpl.errors import UcplError
from ucpl.records import define, frozen
from ucpl.runtime.assemble import Assembler
from ucpl.runtime.batches import Batch, cut_bands, group_bands
from ucpl.runtime.buffers import Workspace
from ucpl.runtime.disk import disk
from ucpl.runtime.failpoints import failpoint
from ucpl.runtime.journal import DoneTile, Journal
from ucpl.runtime.options import DataPlane, Progress
from ucpl.runtime.process_group import ProcessGroup
from ucpl.runtime.rank_protocol import share_of_done, share_of_groups
from ucpl.runtime.read_back import ReadBack
from ucpl.runtime.reading import Fragments, Reader
from ucpl.runtime.rows import rows_of, wanted
from ucpl.runtime.source_checks import Inspection, damage_of, members_of
from ucpl.runtime.sources import SourceFiles
from ucpl.runtime.stretches import Stretches
from ucpl.runtime.targets import TargetFiles, TargetPlan, cannot_write
from ucpl.runtime.tiles import DoneTiles, Tiles
from ucpl.runtime.worker_pool import Queue, run_workers
from ucpl.tables import each

__all__ = ["Mover", "TileRange", "tile_of", "CLONE_MIN", "Clones"]

CLONE_MIN = 1 << 16  # bytes below which a call costs more than writing
_NEVER_HERE = (errno.EOPNOTSUPP, errno.ENOTTY, errno.ENOSYS, errno.EXDEV)


class Clones:
    """Shared blocks between the files of a source and of a target.

    All threads of a run use it.
    """

    def __init__(self, sources: SourceFiles, files: TargetFiles) -> None:
        self._sources, self._files = sources, files
        self._refused: set[tuple[int, int]] = set()
        self._never = False
        try:
            status = os.statvfs(files.root)
            self._block = max(status.f_bsize, status.f_frsize, 512)
        except OSError:
            self._never = True

    def put(self, origin: tuple[int, int], file: int, view: memoryview, position: int) -> int:
        """Share as much of a run as possible and write the rest.

        Returns the bytes that are shared, or 0. origin: (index of the source's file, byte position) of the same bytes.
        Raises: UcplError E503.
        """
        source, at = origin
        head = -position % self._block if not self._never else 0
        size = (len(view) - head) // self._block * self._block if not self._never else 0
        if size < CLONE_MIN or (at - position) % self._block or (source, file) in self._refused:
            return 0
        if not self._shared((source, at + head), (file, position + head), size):
            return 0
        if head:
            self._files.write(file, view[:head], position)
        if head + size < len(view):
            self._files.write(file, view[head + size :], position + head + size)
        return size

    def _shared(self, here: tuple[int, int], there: tuple[int, int], size: int) -> bool:
        source, goal = self._sources.descriptor(here[0]), self._files.descriptor(there[0])
        try:
            disk().clone((source, here[1]), (goal, there[1]), size)
        except OSError as error:
            self._refused.add((here[0], there[0]))
            self._never |= error.errno in _NEVER_HERE
            return False
        return True


SYNC_BYTES = 32 << 20  # written bytes after which they are synced and journalled, at the latest
SYNC_SECONDS = 1.0
_OF_VALUES = ("E605", "E607", "E613")  # errors that a damaged source makes likely


@frozen
class TileRange:
    """One tile as numbers.

    Elements [low, high) of a target, `size` bytes at `position` of a file.
    """

    target: int
    low: int
    high: int
    file: int
    position: int
    size: int


def tile_of(layout: TargetPlan, tiles: Tiles, i: int) -> TileRange:
    target = layout.units[int(tiles.unit[i])].target
    itemsize = layout.places[target].itemsize
    low, size = int(tiles.low[i]), int(tiles.size[i])
    return TileRange(
        target, low // itemsize, (low + size) // itemsize, int(tiles.file[i]), int(tiles.position[i]), size
    )  # fmt: skip


@define(eq=False)
class Mover:
    """Mover of every tile that is not done yet.

    `fragments` are the runs of the source whose tiles are journalled.
    """

    plane: DataPlane
    layout: TargetPlan
    assembler: Assembler
    sources: SourceFiles
    files: TargetFiles
    journal: Journal
    known: DoneTiles
    fragments: Fragments
    progress: Progress | None
    read_back: ReadBack | None
    clones: Clones | None
    team: ProcessGroup
    _lock: threading.Lock = field(factory=threading.Lock)
    _finished: list[DoneTile] = field(factory=list)  # not journalled yet
    _fresh: Fragments = field(factory=Fragments)
    _done_bytes: int = 0
    _flushed_bytes: int = 0
    _flushed_at: float = 0.0
    _movers: int = 0  # threads that still move
    _moved: threading.Event = field(factory=threading.Event)  # and all that they moved is durable
    _look: threading.Event = field(factory=threading.Event)  # there is something to sync
    _phase: ExitStack = field(factory=ExitStack)

    def move(self) -> None:
        """Assemble, digest and write all tiles.

        Raises: errors of tiles; tiles that were finished are journalled. Counts two phases: `move` ends when all is
        durable, and reading back after that is `read-back`.
        """
        tiles, known = self.known.tiles, self.known
        self._done_bytes = self._flushed_bytes = int(tiles.size[known.done].sum())
        self._flushed_at = time.monotonic()
        share = self.plane.share
        bands = cut_bands(tiles, share.band // share.tile, known.done)
        a = self.assembler
        assembled = (a.rows, a.sources, a.file_of, a.targets)
        room = share.band - share.tile
        groups = group_bands(assembled, self.layout.units, tiles, bands, room, shared=self.team.size > 1)
        groups = share_of_groups(self.team, groups, tiles, self._made_of)
        if self.sources.is_remote:
            self.sources.want(wanted(a.rows, a.sources, rows_of(a.rows, self._spans(groups))))
        stretches = Stretches.of(a, self.layout.units, tiles, self.files)
        groups = stretches.joined(groups, share.tile)
        queue = Queue(len(groups))
        self._movers = self.plane.workers

        again = self.read_back

        def work(stop: threading.Event) -> None:
            with Workspace(self.plane.share, self.plane.budget) as space:
                reader = Reader(self.sources)
                while not stop.is_set() and (i := queue.take()) is not None:
                    self._band(groups[i], reader, space, stretches)
                with self._lock:
                    self._movers -= 1
                self._look.set()
                if again is not None:
                    again.read_along(stop, self._moved, space)

        def read(stop: threading.Event) -> None:
            assert again is not None
            with Workspace(self.plane.share, self.plane.budget) as space:
                again.read_along(stop, self._moved, space)

        works = [work] * self.plane.workers
        if again is not None:
            again.durable(np.flatnonzero(share_of_done(self.team, known)).tolist())
            works.append(read)
        with self._phase:
            self._phase.enter_context(self.plane.counters.phase("move"))
            try:
                run_workers(works, self._meanwhile, self._look)
            finally:
                self._flush()
        self._report_progress()

    def _spans(self, groups: list[Batch]) -> Iterator[tuple[int, int, int]]:
        """Results of groups: (target, its first element, the one behind the last)."""
        tiles = self.known.tiles
        for first, end in (band for group in groups for band in group.bands):
            unit = self.layout.units[int(tiles.unit[first])]
            itemsize = self.layout.places[unit.target].itemsize
            high = int(tiles.low[end - 1] + tiles.size[end - 1])
            yield unit.target, int(tiles.low[first]) // itemsize, high // itemsize

    def _made_of(self, group: Batch) -> dict[str, int]:
        """Approximate bytes of each source file, by path, that a group needs.

        The number is not exact for boxes that are used in part.
        """
        a, found = self.assembler, dict[str, int]()
        for target, low, high in self._spans([group]):
            mine = slice(int(a.rows.starts[target]), int(a.rows.starts[target + 1]))
            part = np.minimum(a.rows.high[mine], high) - np.maximum(a.rows.low[mine], low)
            for source, count in zip(a.rows.source[mine][part > 0].tolist(), part[part > 0].tolist(), strict=True):
                file = str(self.sources.path(self.sources.files[a.file_of[source]]))
                found[file] = found.get(file, 0) + count * a.sources[source].itemsize
        return found

    def _band(self, group: Batch, reader: Reader, space: Workspace, stretches: Stretches) -> None:
        """Move one band, or several that share windows of the source.

        They are reported at once, with the runs that were read for them: a journal that has a tile has its runs of the
        source.
        """
        if group.is_stretch:
            done = stretches.move(*group.bands[0], reader, space)
            self.plane.counters.add(written=sum(tile.size for tile in done))
        else:
            done = self._bands(group, reader, space)
        self.plane.counters.add(read=reader.bytes_read, digest=reader.digest)
        with self._lock:
            self._finished.extend(done)
            self._fresh.extend(reader.fragments)
            self._done_bytes += sum(tile.size for tile in done)
            if self._done_bytes - self._flushed_bytes >= SYNC_BYTES:
                self._look.set()
        reader.fragments.clear()
        reader.bytes_read, reader.digest = 0, 0.0

    def _bands(self, group: Batch, reader: Reader, space: Workspace) -> list[DoneTile]:
        bands = [[tile_of(self.layout, self.known.tiles, i) for i in range(*band)] for band in group.bands]
        front = max(sum(tile.size for tile in tiles) for tiles in bands)
        space.hold(front + group.held)
        reader.hold(group.windows, space.tile[front:])
        done: list[DoneTile] = []
        for (first, _), tiles in zip(group.bands, bands, strict=True):
            done += self._tiles(first, tiles, reader, space)
        return done

    def _tiles(self, first: int, tiles: list[TileRange], reader: Reader, space: Workspace) -> list[DoneTile]:
        """Assemble tiles of one unit together; digest and write each."""
        try:
            crc = self.assembler.assemble(tiles[0].target, tiles[0].low, tiles[-1].high, reader, space)
        except UcplError as error:
            raise self._cause(error, tiles, space) from None
        read, start = reader.fragments, 0
        run = (read.file[-1], read.position[-1], crc) if crc is not None and len(tiles) == 1 else None
        done: list[DoneTile] = []
        for i, tile in enumerate(tiles, first):
            done.append(self._one(i, tile, space.tile_view[start : start + tile.size], run))
            start += tile.size
        return done

    def _one(self, i: int, tile: TileRange, view: memoryview, run: tuple[int, int, int] | None) -> DoneTile:
        """Finish one tile.

        run: the place (file, byte) of a tile that is one run of a source, and its CRC.
        """
        begin = time.perf_counter()
        crc = crc32(view) if run is None else run[2]
        xxh3 = xxhash.xxh3_64_intdigest(view)
        digest = time.perf_counter() - begin
        shared = self.clones.put(run[:2], tile.file, view, tile.position) if run is not None and self.clones else 0
        if not shared:
            self.files.write(tile.file, view, tile.position)
        failpoint("tile-written")
        self.plane.counters.add(written=tile.size - shared, cloned=shared, digest=digest)
        return DoneTile(i, tile.size, crc, xxh3)

    def _cause(self, error: UcplError, tiles: list[TileRange], space: Workspace) -> UcplError:
        """Damaged source members of a band whose values fail; else the error."""
        if error.diagnostics[0].code not in _OF_VALUES:
            return error
        rows, places = self.assembler.rows, self.assembler.sources
        within = rows.within(tiles[0].target, tiles[0].low, tiles[-1].high)
        used = each(rows.source[within.start : within.stop])
        how = Inspection(self.sources, space.tile, self.plane.counters)
        found = damage_of(members_of((places[s] for s in used), self.sources), how)
        return UcplError(*found) if found else error

    def _meanwhile(self) -> None:
        self._report_progress()
        self.team.look()
        late = time.monotonic() - self._flushed_at >= SYNC_SECONDS
        is_end = not self._movers and not self._moved.is_set()
        if is_end or late or self._done_bytes - self._flushed_bytes >= SYNC_BYTES:
            self._flush()
        if is_end:
            self._moved.set()
            self._phase.close()
            if self.read_back is not None:
                self._phase.enter_context(self.plane.counters.phase("read-back"))
                self.read_back.look()

    def _report_progress(self) -> None:
        if self.progress is not None:
            self.progress(self._done_bytes, int(self.known.tiles.size.sum()))

    def _flush(self) -> None:
        """Make written files durable, then journal the tiles. Raises: UcplError E503."""
        with self._lock:
            records, runs = self._finished, self._fresh
            self._finished, self._fresh = [], Fragments()
        self._flushed_at, self._flushed_bytes = time.monotonic(), self._done_bytes
        if not records:
            return
        indexes = [tile.index for tile in records]
        self.files.sync(each(self.known.tiles.file[indexes]))
        failpoint("journal-before")
        try:
            self.journal.append(records, runs)
        except OSError as error:
            cannot_write(self.journal.path, error)
        self.known.add(records)
        self.fragments.extend(runs)
        if self.read_back is not None:
            self.read_back.durable(indexes)
