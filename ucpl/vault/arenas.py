"""The arena of a rank: its saved files, end to end.

They are digested during the copy.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
import xxhash
from attrs import field

from ucpl.digests import crc32
from ucpl.live.tensors import tensor_of
from ucpl.records import define, frozen
from ucpl.runtime.disk import disk
from ucpl.runtime.failpoints import failpoint
from ucpl.runtime.linux import kind_of
from ucpl.storage.vaults.records import CHUNK, SavedFile, Segment
from ucpl.vault.files import ToSave
from ucpl.vault.staging import DeviceLane, Stages

__all__ = ["Arenas", "Written", "allocate", "get_places"]


@frozen
class Written:
    """The content of an arena."""

    size: int
    chunks: tuple[int, ...]
    files: tuple[SavedFile, ...]


@frozen(eq=False)
class _Piece:
    """Bytes of a file, and the tensor that they belong to."""

    at: int  # in the arena
    data: bytes | torch.Tensor
    file: int
    storage: str

    @property
    def size(self) -> int:
        return len(self.data) if isinstance(self.data, bytes) else self.data.numel() * self.data.element_size()


@frozen
class _Named:
    """The file and the storage of a piece; "" for no storage."""

    file: int
    storage: str


def _laid(files: Sequence[ToSave]) -> tuple[list[_Piece], list[list[Segment]], int]:
    """The pieces in order, each file's segments, and the arena's size.

    Tensors come first; the other bytes of the files come last. A reader opens a checkpoint from these last bytes alone.
    Large tensors start on chunk boundaries, so that a reader can read them directly into their destination.
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


def get_places(files: Sequence[ToSave]) -> tuple[list[tuple[int, str, int]], int]:
    """(file, storage, byte in the arena) of each tensor; the size."""
    pieces, _, size = _laid(files)
    return [(p.file, p.storage, p.at) for p in pieces if p.storage], size


def allocate(fd: int, size: int) -> None:
    """Allocate all memory of an arena.

    Raises: OSError, if there is not enough.

    Without this, a write to a page that cannot be allocated would kill the process.
    """
    failpoint("vault-room")
    if os.fstat(fd).st_size < size:
        disk().allocate(fd, size)


@define(eq=False)
class _Mapped:
    """A slot in memory."""

    inode: int
    room: mmap.mmap
    memory: torch.Tensor = field(init=False)  # the same bytes
    is_tried: bool = False
    lane: DeviceLane | None = None  # devices write into the arena through it

    def __attrs_post_init__(self) -> None:
        self.memory = tensor_of(memoryview(self.room), torch.uint8, (len(self.room),))

    def pin(self, lane: DeviceLane) -> None:
        self.lane = lane if lane.pin(self.memory) else None

    def unpin(self) -> None:
        if self.lane is not None:
            self.lane.unpin(self.memory)
            self.lane = None


class Arenas:
    """The slots of a rank, mapped into memory once.

    Each save uses the same mapping again.

    The mapping is the rank's own file. All its pages are allocated before the first write (`allocate`). If the saved
    tensors are on a GPU, the driver pins the pages once, and the GPU writes into them directly.
    """

    def __init__(self, stages: Stages | None = None, kind_of: Callable[[Path], str] = kind_of) -> None:
        self._stages, self._kind_of = stages or Stages(), kind_of
        self._mapped: dict[Path, _Mapped] = {}

    def _room(self, path: Path, size: int) -> _Mapped:
        """Raises: OSError."""
        fd = disk().open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            allocate(fd, size)
            known, inode = self._mapped.get(path), os.fstat(fd).st_ino
            if (
                known is None or known.inode != inode or len(known.room) < size
            ):  # the first time, or the file was replaced
                if known is not None:
                    self._mapped.pop(path).unpin()
                room = mmap.mmap(fd, max(size, 1), flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
                known = self._mapped[path] = _Mapped(inode, room)
        finally:
            disk().close(fd)
        return known

    def _pinned(self, path: Path, mapped: _Mapped, size: int, pieces: Sequence[_Piece]) -> torch.Tensor | None:
        """The bytes of an arena that devices write into directly.

        Pages of a file on a disk are not pinned, because the file system does not notice writes of a device.
        """
        lane = next((one for piece in pieces if (one := self._stages.lane(piece.data)) is not None), None)
        if lane is None:
            return None
        if not mapped.is_tried:
            mapped.is_tried = True
            if self._kind_of(path) == "tmpfs":
                mapped.pin(lane)
        if mapped.lane is not None and not mapped.lane.reaches(mapped.memory[:size]):
            mapped.unpin()
            mapped.pin(lane)
        return mapped.memory[:size] if mapped.lane is not None else None

    def _copied(
        self, path: Path, pieces: Sequence[_Piece], size: int
    ) -> tuple[memoryview, Iterator[tuple[_Named, int]]]:
        """The bytes of an arena, and the iterator that copies them.

        Raises: OSError.
        """
        if not size:
            return memoryview(b""), iter(())
        mapped = self._room(path, size)
        room, data = memoryview(mapped.room)[:size], [piece.data for piece in pieces]
        into = self._pinned(path, mapped, size, pieces)
        staged = self._stages.staged(data) if into is None else self._stages.placed(data, into)
        return room, _copied(pieces, room, staged)

    def write(self, path: Path, files: Sequence[ToSave]) -> Written:
        """Copy the files and digest them while they are in the cache.

        Raises: OSError.
        """
        pieces, segments, size = _laid(files)
        crcs: list[dict[str, int]] = [{} for _ in files]
        room, copied = self._copied(path, pieces, size)
        return _written(files, segments, room, crcs, tuple(_digested(copied, room, crcs)))

    def copy(self, path: Path, files: Sequence[ToSave]) -> tuple[int, Callable[[], Written]]:
        """Copy the files.

        Return their size and a function that digests them. Raises: OSError.
        """
        pieces, segments, size = _laid(files)
        names = [(_Named(piece.file, piece.storage), piece.size) for piece in pieces]
        room, copied = self._copied(path, pieces, size)
        for _ in copied:
            pass

        def told() -> Written:
            crcs: list[dict[str, int]] = [{} for _ in files]
            return _written(files, segments, room, crcs, tuple(_digested(iter(names), room, crcs)))

        return size, told

    def close(self) -> None:
        for one in self._mapped.values():
            one.unpin()
        self._mapped.clear()


def _copied(
    pieces: Sequence[_Piece], room: memoryview, staged: Iterator[tuple[int, memoryview | int]]
) -> Iterator[tuple[_Named, int]]:
    """Each piece after it was copied, and its size.

    staged: bytes to copy, or the number of bytes that a device has written.
    """
    done = 0
    for number, some in staged:
        named = _Named(pieces[number].file, pieces[number].storage)
        if isinstance(some, int):
            done += some
            yield named, some
            continue
        while len(some):
            count = min(len(some), CHUNK - done % CHUNK)
            room[done : done + count] = some[:count]
            yield named, count
            some, done = some[count:], done + count


def _digested(copied: Iterator[tuple[_Named, int]], room: memoryview, crcs: Sequence[dict[str, int]]) -> Iterator[int]:
    """Digest the arena's chunks, and CRCs of storages, during the copy."""
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
        SavedFile(file.name, file.size, tuple(segments[i]), crcs[i], file.late, file.named)
        for i, file in enumerate(files)
    )
    return Written(len(room), chunks, tuple(made))
