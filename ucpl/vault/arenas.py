"""An arena: what a rank saves, end to end, digested chunk by chunk while it is copied."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import xxhash

from ucpl.digests import crc32
from ucpl.records import frozen
from ucpl.remotes.vaults.records import CHUNK, File, Segment
from ucpl.runtime.disk import disk
from ucpl.runtime.failpoints import failpoint
from ucpl.vault.files import ToSave

__all__ = ["Written", "make_room", "write_arena"]

ALIGNMENT = 64  # bytes, of what is saved of a file
_BUFFERS = 512  # of one call


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
    storage: str = ""

    @property
    def size(self) -> int:
        return len(self.data) if isinstance(self.data, bytes) else self.data.numel() * self.data.element_size()


def _laid(files: Sequence[ToSave]) -> tuple[list[_Piece], list[list[Segment]], int]:
    """Pieces in order, what lies where of each file, and the arena's size."""
    pieces: list[_Piece] = []
    segments: list[list[Segment]] = []
    at = 0
    for number, file in enumerate(files):
        mine: list[Segment] = []
        some: list[tuple[int, bytes | torch.Tensor, str]] = [(p, data, "") for p, data in file.fixed]
        some += [(p, tensor, name) for p, name, tensor in file.tensors]
        for position, data, name in sorted(some, key=lambda one: one[0]):
            piece = _Piece(at, data, number, name)
            if mine and (mine[-1].begin + mine[-1].size, mine[-1].at + mine[-1].size) == (position, at):
                mine[-1] = Segment(mine[-1].begin, mine[-1].size + piece.size, mine[-1].at)
            else:
                mine.append(Segment(position, piece.size, at))
            pieces.append(piece)
            at += piece.size
        segments.append(mine)
        if (more := -at % ALIGNMENT) and number < len(files) - 1:
            pieces.append(_Piece(at, bytes(more), -1))
            at += more
    return pieces, segments, at


def _bytes_of(data: bytes | torch.Tensor) -> memoryview:
    """A piece's bytes as they lie in memory; what lies on another device, or with gaps, is brought here first."""
    if isinstance(data, bytes):
        return memoryview(data)
    near = data.detach().to("cpu").contiguous()
    found: memoryview = near.reshape(-1).view(torch.uint8).numpy().data
    return found


def make_room(fd: int, size: int) -> None:
    """Have memory for all of an arena, now: a page that is not there when it is written would kill the process.

    Raises: OSError, where there is none.
    """
    failpoint("vault-room")
    if os.fstat(fd).st_size < size:
        disk().allocate(fd, size)


def write_arena(path: Path, files: Sequence[ToSave]) -> Written:
    """Copy what is to be saved. Raises: OSError."""
    pieces, segments, size = _laid(files)
    crcs: list[dict[str, int]] = [{} for _ in files]
    chunks: list[int] = []
    fd = disk().open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)
    try:
        make_room(fd, size)
        for views in _chunks(pieces, crcs):
            digest = xxhash.xxh3_64()
            for view in views:
                digest.update(view)
            _write(fd, views, len(chunks) * CHUNK)
            chunks.append(digest.intdigest())
            failpoint("vault-chunk")
    finally:
        disk().close(fd)
    made = (File(file.name, file.size, tuple(segments[i]), crcs[i], file.late) for i, file in enumerate(files))
    return Written(size, tuple(chunks), tuple(made))


def _chunks(pieces: Sequence[_Piece], crcs: Sequence[dict[str, int]]) -> Iterator[list[memoryview]]:
    """The bytes of each chunk of an arena, as they lie in memory. CRCs of storages are told on the way."""
    views: list[memoryview] = []
    room = CHUNK
    for piece in pieces:
        left = _bytes_of(piece.data)
        while len(left):
            view, left = left[:room], left[room:]
            if piece.storage:
                crcs[piece.file][piece.storage] = crc32(view, crcs[piece.file].get(piece.storage, 0))
            views.append(view)
            room -= len(view)
            if not room:
                yield views
                views, room = [], CHUNK
    if views:
        yield views


def _write(fd: int, views: list[memoryview], position: int) -> None:
    """Raises: OSError."""
    for i in range(0, len(views), _BUFFERS):
        some = views[i : i + _BUFFERS]
        while some:
            count = os.pwritev(fd, some, position)
            position += count
            while some and count >= len(some[0]):
                count -= len(some.pop(0))
            if count:
                some[0] = some[0][count:]
