"""An arena: what a rank saves, one piece behind the other, digested chunk by chunk while it is copied."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
import xxhash

from ucpl.digests import crc32
from ucpl.records import frozen
from ucpl.remotes.vaults.records import CHUNK, File, Segment
from ucpl.runtime.disk import disk
from ucpl.runtime.failpoints import failpoint
from ucpl.vault.files import ToSave
from ucpl.vault.staging import Stages

__all__ = ["Arenas", "Written", "make_room", "places_of"]


@frozen
class Written:
    """What lies in an arena."""

    size: int
    chunks: tuple[int, ...]
    files: tuple[File, ...]


@frozen(eq=False)
class _Piece:
    """Bytes of a file, and what they are of."""

    at: int  # in the arena
    data: bytes | torch.Tensor
    file: int
    storage: str

    @property
    def size(self) -> int:
        return len(self.data) if isinstance(self.data, bytes) else self.data.numel() * self.data.element_size()


@frozen
class _Named:
    """Of which file, and which of its storages; "": of none."""

    file: int
    storage: str


def _laid(files: Sequence[ToSave]) -> tuple[list[_Piece], list[list[Segment]], int]:
    """Pieces in order, what lies where of each file, and the arena's size.

    Tensors come first, and what is between them in files last: a checkpoint is opened by reading no more than that, and large
    tensors lie on whole chunks, which are read straight to where they go.
    """
    tensors = [(number, at, t, name) for number, file in enumerate(files) for at, name, t in file.tensors]
    known = sorted((number, at, data) for number, file in enumerate(files) for at, data in file.fixed)
    pieces: list[_Piece] = []
    segments: list[list[Segment]] = [[] for _ in files]
    at = 0

    def add(number: int, position: int, size: int) -> None:
        nonlocal at
        mine = segments[number]
        if mine and (mine[-1].begin + mine[-1].size, mine[-1].at + mine[-1].size) == (position, at):
            mine[-1] = Segment(mine[-1].begin, mine[-1].size + size, mine[-1].at)
        else:
            mine.append(Segment(position, size, at))
        at += size

    for number, position, tensor, name in sorted(tensors, key=lambda one: one[:2]):
        pieces.append(_Piece(at, tensor, number, name))
        add(number, position, pieces[-1].size)
    if known:  # small, and several for each tensor: copied at once
        pieces.append(_Piece(at, b"".join(data for _, _, data in known), 0, ""))
    for number, position, data in known:
        add(number, position, len(data))
    return pieces, segments, at


def places_of(files: Sequence[ToSave]) -> tuple[list[tuple[int, str, int]], int]:
    """(file, storage, byte in the arena) of each tensor that will be saved, and the arena's size."""
    pieces, _, size = _laid(files)
    return [(p.file, p.storage, p.at) for p in pieces if p.storage], size


def make_room(fd: int, size: int) -> None:
    """Have memory for all of an arena, now: a page that is not there when it is written would kill the process.

    Raises: OSError, where there is none.
    """
    failpoint("vault-room")
    if os.fstat(fd).st_size < size:
        disk().allocate(fd, size)


class Arenas:
    """A rank's slots, as they lie in memory: mapped once, written over and over.

    What is mapped is the rank's own file, of which all pages are there before one is written (`make_room`).
    """

    def __init__(self, stages: Stages | None = None) -> None:
        self._stages = stages or Stages()
        self._mapped: dict[Path, tuple[int, mmap.mmap]] = {}  # the file's inode, and its bytes

    def _room(self, path: Path, size: int) -> memoryview:
        """Raises: OSError."""
        fd = disk().open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            make_room(fd, size)
            known, inode = self._mapped.get(path), os.fstat(fd).st_ino
            if known is None or known[0] != inode or len(known[1]) < size:  # the first time, or another file by now
                self._mapped.pop(path, None)
                known = self._mapped[path] = (
                    inode,
                    mmap.mmap(fd, max(size, 1), flags=mmap.MAP_SHARED | mmap.MAP_POPULATE),
                )
        finally:
            disk().close(fd)
        return memoryview(known[1])[:size]

    def write(self, path: Path, files: Sequence[ToSave]) -> Written:
        """Copy what is to be saved, and digest it while it is in the cache. Raises: OSError."""
        pieces, segments, size = _laid(files)
        crcs: list[dict[str, int]] = [{} for _ in files]
        room = self._room(path, size) if size else memoryview(b"")
        copied = ((piece, len(left)) for piece, left in _copied(pieces, room, self._stages))
        return _written(files, segments, room, crcs, tuple(_digested(copied, room, crcs)))

    def copy(self, path: Path, files: Sequence[ToSave]) -> tuple[int, Callable[[], Written]]:
        """Copy what is to be saved and no more: its bytes, and what digests it afterwards. Raises: OSError."""
        pieces, segments, size = _laid(files)
        room = self._room(path, size) if size else memoryview(b"")
        names = [(_Named(piece.file, piece.storage), piece.size) for piece in pieces]
        for _ in _copied(pieces, room, self._stages):
            pass

        def told() -> Written:
            crcs: list[dict[str, int]] = [{} for _ in files]
            return _written(files, segments, room, crcs, tuple(_digested(iter(names), room, crcs)))

        return size, told

    def close(self) -> None:
        self._mapped.clear()


def _copied(pieces: Sequence[_Piece], room: memoryview, stages: Stages) -> Iterator[tuple[_Named, memoryview]]:
    """What was copied last, of no more than one chunk of the arena."""
    done = 0
    for number, left in stages.staged([piece.data for piece in pieces]):
        named = _Named(pieces[number].file, pieces[number].storage)
        while len(left):
            count = min(len(left), CHUNK - done % CHUNK)
            room[done : done + count] = left[:count]
            yield named, left[:count]
            left, done = left[count:], done + count


def _digested(copied: Iterator[tuple[_Named, int]], room: memoryview, crcs: Sequence[dict[str, int]]) -> Iterator[int]:
    """Digests of an arena's chunks, as they are copied. CRCs of storages are told on the way, while bytes are in the cache."""
    done = 0
    for named, size in copied:
        while size:
            count = min(size, CHUNK - done % CHUNK)
            if named.storage:
                of = crcs[named.file]
                of[named.storage] = crc32(room[done : done + count], of.get(named.storage, 0))
            size, done = size - count, done + count
            if not done % CHUNK:
                yield xxhash.xxh3_64_intdigest(room[done - CHUNK : done])
                failpoint("vault-chunk")
    if done % CHUNK:
        yield xxhash.xxh3_64_intdigest(room[done - done % CHUNK : done])
        failpoint("vault-chunk")


def _written(
    files: Sequence[ToSave],
    segments: Sequence[Sequence[Segment]],
    room: memoryview,
    crcs: Sequence[dict[str, int]],
    chunks: tuple[int, ...],
) -> Written:
    made = (
        File(file.name, file.size, tuple(segments[i]), crcs[i], file.late, file.named) for i, file in enumerate(files)
    )
    return Written(len(room), chunks, tuple(made))
