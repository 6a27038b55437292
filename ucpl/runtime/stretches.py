"""Stretches: small neighbours in a file of the target, moved at once.

For a tensor of a few bytes, calls take longer than its bytes. The tiles of a stretch are complete tensors, each a run of the
source. They are read at once where they are neighbours in the source, too, and written at once, with the known bytes between
them. Tiles stay the unit of digests and of the journal.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import xxhash
from attrs import field
from numpy.typing import NDArray

from ucpl.digests import crc32
from ucpl.records import frozen
from ucpl.runtime.assemble import Assembler
from ucpl.runtime.batches import Batch
from ucpl.runtime.buffers import Workspace
from ucpl.runtime.failpoints import failpoint
from ucpl.runtime.journal import DoneTile
from ucpl.runtime.reading import Reader
from ucpl.runtime.targets import MANY, NEAR, TargetFiles
from ucpl.runtime.tiles import Tiles, Unit

__all__ = ["Stretches"]

SMALL = 4096  # bytes of a tensor: of larger ones, calls take less than a tenth of the time

I64 = NDArray[np.int64]


@frozen(eq=False)
class Stretches:
    """The small tiles of a run."""

    tiles: Tiles
    files: TargetFiles
    small: NDArray[np.bool_]  # (tiles,) complete tensors of a few bytes, each one run of the source
    source: I64  # (tiles,) of small ones, the file and the byte of the source
    position: I64
    has_crc: NDArray[np.bool_]  # (tiles,) the source states a CRC, which needs evidence
    _stop: I64 = field(init=False)

    @_stop.default
    def _stops(self) -> I64:
        return self.tiles.position + self.tiles.size

    @classmethod
    def of(cls, a: Assembler, units: Sequence[Unit], tiles: Tiles, files: TargetFiles) -> Stretches:
        rows, fills = a.rows, a.fills
        target = np.array([unit.target for unit in units], np.int64)[tiles.unit]
        itemsize = np.array([place.itemsize for place in a.targets] or [1], np.int64)[target]
        first = rows.starts[target]
        small = (tiles.size <= SMALL) & (rows.starts[target + 1] - first == 1)
        small &= fills.starts[target] == fills.starts[target + 1]
        row = np.where(small, first, 0)
        begin = tiles.low - (rows.low[row] if len(rows.low) else 0) * itemsize  # within the row
        if len(rows.low):
            small &= rows.run[row] & (begin >= 0) & (rows.high[row] * itemsize >= tiles.low + tiles.size)
        source = rows.source[row] if len(rows.low) else row
        has_crc = np.array([p.extent is None or p.extent.crc is not None for p in a.sources] or [True])
        position = rows.position[row] + begin if len(rows.low) else begin
        return cls(tiles, files, small, np.array([*a.file_of, 0], np.int64)[source], position, has_crc[source])

    def joined(self, groups: Sequence[Batch], most: int) -> list[Batch]:
        """Join groups of single small tiles with their neighbours.

        A stretch has `most` bytes.
        """
        file, position, stop = (c.tolist() for c in (self.tiles.file, self.tiles.position, self._stop))
        found: list[Batch] = []
        some: list[Batch] = []
        first = last = -1

        def close() -> None:
            found.extend(some if len(some) < MANY else [Batch(((first, last + 1),), is_stretch=True)])
            some.clear()

        small = self.small.tolist()
        for group in groups:
            i, end = group.bands[0]
            is_single = small[i] and end == i + 1 and len(group.bands) == 1 and not group.windows
            if some and not (
                is_single and i == last + 1 and file[i] == file[last]
                and position[i] - stop[last] <= NEAR and stop[i] - position[first] <= most
            ):  # fmt: skip
                close()
            if is_single:
                first = first if some else i
                last = i
                some.append(group)
            else:
                found.append(group)
        close()
        return found

    def move(self, first: int, end: int, reader: Reader, space: Workspace) -> list[DoneTile]:
        """Move the tiles [first, end) of one stretch.

        Raises: UcplError E503, E610, E611.
        """
        cut = slice(first, end)
        file, begin = int(self.tiles.file[first]), int(self.tiles.position[first])
        whole = space.tile_view[: int(self._stop[end - 1]) - begin]
        if (self.tiles.position[cut][1:] > self._stop[cut][:-1]).any():
            got = self.files.read(file, whole, begin)
            whole[got:] = bytes(len(whole) - got)
        views = self._read(first, end, reader, space)
        done: list[DoneTile] = []
        offsets = (self.tiles.position[cut] - begin).tolist()
        sources = zip(self.source[cut].tolist(), self.position[cut].tolist(), self.has_crc[cut].tolist(), strict=True)
        for i, at, view, (source, position, has_crc) in zip(range(first, end), offsets, views, sources, strict=True):
            size, crc = len(view), crc32(view)
            whole[at : at + size] = view
            done.append(DoneTile(i, size, crc, xxhash.xxh3_64_intdigest(view)))
            if has_crc:
                reader.fragments.add(source, position, size, crc)
        self.files.write(file, whole, begin)
        for _ in done:
            failpoint("tile-written")
        return done

    def _read(self, first: int, end: int, reader: Reader, space: Workspace) -> Iterator[memoryview]:
        """The bytes of each tile.

        Neighbours in the source are read at once, and no byte that is not needed. A view is valid until the next one is taken.
        """
        room = space.staging.data
        file, low = self.source[first:end].tolist(), self.position[first:end].tolist()
        stop = (self.position[first:end] + self.tiles.size[first:end]).tolist()
        head = 0
        for i in range(1, len(low) + 1):
            if i < len(low) and (file[i] == file[head] and low[i] == stop[i - 1] and stop[i] - low[head] <= len(room)):
                continue
            span = stop[i - 1] - low[head]
            reader.sources.read_into(file[head], low[head], [room[:span]], span)
            reader.bytes_read += span
            for n in range(head, i):
                yield room[low[n] - low[head] : stop[n] - low[head]]
            head = i
