"""Journal: a header that identifies the run, then finished tiles.

header   one line of JSON (identity of the run: digests of plan, layout and source, sizes of tiles, its mark), one newline
record   48 bytes: kind, file, index or position, bytes, xxh3-64 of the tile, CRC-32, CRC-32 of the record

Runs of the source that were read are recorded, too. If one record covers several runs, the place of the xxh3 holds
their number and their distance.

A record is appended only after its bytes are on the disk, and the journal is synced after it. So a record that can be
read is true; at a torn or garbled tail the next run begins to append.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from attrs import field
from numpy.typing import NDArray

from ucpl.digests import crc32
from ucpl.records import frozen
from ucpl.runtime.disk import disk, make_file, read_regular, sync_data, write_all
from ucpl.runtime.failpoints import failpoint
from ucpl.runtime.reading import Fragments

__all__ = ["FORMAT", "DoneTile", "Journal", "Past", "joined", "read_journal"]

FORMAT = 4  # covers the cut of tiles, too: records are useless for another cut
TILE, FRAGMENT, PUBLISH = 1, 2, 3
_RECORD = np.dtype(
    [
        ("kind", "<u4"),
        ("file", "<u4"),
        ("at", "<u8"),
        ("size", "<u8"),
        ("xxh3", "<u8"),
        ("crc", "<u4"),
        ("check", "<u4"),
        ("pad", "<u8"),
    ]
)
_STEP_BITS = 40  # of the distance of runs; how many they are has the other 24: more than a tile has bytes
_STEP_MAX = (1 << _STEP_BITS) - 1
_PLACE_MAX = 1 << 62
_CHECKED = 36  # bytes of a record before its own CRC
assert _RECORD.itemsize == 48


@frozen(eq=False)
class Past:
    """Journal that was read: header, records by kind, valid bytes."""

    header: dict[str, object]
    tile: NDArray[np.int64]
    tile_crc: NDArray[np.uint32]
    tile_xxh3: NDArray[np.uint64]
    fragments: Fragments = field(repr=False)
    publishing: tuple[int, int] | None  # (inode, device) of the file or folder that a rename was about to publish
    size: int


def read_journal(path: Path) -> Past | None:
    """Read a journal; None if it or a complete header is missing.

    Raises: OSError.
    """
    try:
        raw = read_regular(path, _PLACE_MAX)
    except FileNotFoundError:
        return None
    end = raw.find(b"\n")
    if end < 0:
        return None
    try:
        header: object = json.loads(raw[:end])
    except (ValueError, RecursionError):
        return None
    if not isinstance(header, dict) or header.get("ucpl journal") != FORMAT:
        return None
    body = memoryview(raw)[end + 1 :]
    records = np.frombuffer(body[: len(body) // 48 * 48], _RECORD)
    good = len(records)
    for i in range(len(records)):
        if crc32(body[48 * i : 48 * i + _CHECKED]) != records["check"][i]:
            good = i
            break
    records = records[: _sane(records[:good])]
    tiles = records[records["kind"] == TILE]
    read = records[records["kind"] == FRAGMENT]
    fragments = Fragments()
    columns = (read[name].tolist() for name in ("file", "at", "size", "crc", "xxh3"))
    for file, at, size, crc, comb in zip(*columns, strict=True):
        fragments.add(file, at, size, crc, (comb >> _STEP_BITS, comb & _STEP_MAX) if comb else (1, 0))
    published = records[records["kind"] == PUBLISH]
    publishing = (int(published["at"][-1]), int(published["size"][-1])) if len(published) else None
    return Past(
        header, tiles["at"].astype(np.int64), tiles["crc"].copy(), tiles["xxh3"].copy(), fragments, publishing,
        end + 1 + 48 * len(records),
    )  # fmt: skip


def joined(pasts: Sequence[Past]) -> Past:
    """Join the journals of one run.

    Header, published inode and size are those of the first journal.
    """
    first = pasts[0]
    if len(pasts) == 1:
        return first
    fragments = Fragments()
    for past in pasts:
        fragments.extend(past.fragments)
    tile, crc, xxh3 = (np.concatenate(c) for c in zip(*((p.tile, p.tile_crc, p.tile_xxh3) for p in pasts), strict=True))
    return Past(first.header, tile, crc, xxh3, fragments, first.publishing, first.size)


def _sane(records: NDArray[np.void]) -> int:
    """Number of records before the first with an impossible place."""
    sane = (records["at"] < _PLACE_MAX) & (records["size"] < _PLACE_MAX)
    comb = records["xxh3"]
    runs = records["kind"] == FRAGMENT
    count, step = comb >> np.uint64(_STEP_BITS), comb & np.uint64(_STEP_MAX)
    is_comb = (count > 1) & (step >= records["size"]) & (count * step < _PLACE_MAX)  # runs that do not overlap
    sane &= ~runs | (comb == 0) | is_comb
    sane |= records["kind"] == PUBLISH  # an inode and a device: any numbers
    return len(records) if sane.all() else int(np.argmin(sane))


@frozen
class DoneTile:
    """Tile whose bytes are on the disk: index, size, digests."""

    index: int
    size: int
    crc: int
    xxh3: int


class Journal:
    """Appends records. The caller syncs the data that they speak of first."""

    def __init__(self, path: Path, size: int) -> None:
        self.path = path
        self._fd = disk().open(path, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW)
        try:
            disk().resize(self._fd, size)
        except BaseException:
            self.close()
            raise

    @staticmethod
    def begin(path: Path, header: Mapping[str, object]) -> Journal:
        """Start a journal: its header is durable before it gets its name.

        Raises: OSError.
        """
        fresh = path.with_name(path.name + ".new")
        line = json.dumps({"ucpl journal": FORMAT, **header}, separators=(",", ":")).encode() + b"\n"
        make_file(fresh, line)
        disk().rename(fresh, path)
        return Journal(path, len(line))

    def append(self, tiles: Sequence[DoneTile], fragments: Fragments) -> None:
        """Records of tiles and of source runs, then sync. Raises: OSError."""
        done = np.array([(t.index, t.size, t.crc) for t in tiles], np.int64).reshape(-1, 3).T
        xxh3 = np.array([t.xxh3 for t in tiles], np.uint64)
        f = [np.array(column, np.uint64) for column in fragments.columns]
        file, at, size, crc, count, step = (column[f[-1] <= _STEP_MAX] for column in f)  # others are read again
        comb = np.where(count > 1, count << np.uint64(_STEP_BITS) | step, 0)
        read = _records(FRAGMENT, file, at, size, comb, crc)
        self._write(_records(TILE, 0, done[0], done[1], xxh3, done[2]) + read)
        failpoint("journal-synced")

    def publishing(self, inode: int, device: int) -> None:
        """The next rename publishes this inode. Raises: OSError."""
        place = np.array([[inode], [device]], np.uint64)
        self._write(_records(PUBLISH, 0, place[0], place[1], 0, 0))

    def _write(self, data: bytes) -> None:
        write_all(self._fd, data, None)
        sync_data(self._fd)

    def close(self) -> None:
        disk().close(self._fd)


Column = NDArray[np.integer] | int


def _records(kind: int, file: Column, at: NDArray[np.integer], size: Column, xxh3: Column, crc: Column) -> bytes:
    """Records of one kind, each with its own CRC."""
    made = np.zeros(len(at), _RECORD)
    made["kind"], made["file"], made["at"], made["size"], made["xxh3"], made["crc"] = kind, file, at, size, xxh3, crc
    data = memoryview(made.tobytes())
    made["check"] = [crc32(data[i : i + _CHECKED]) for i in range(0, len(data), _RECORD.itemsize)]
    return made.tobytes()
