"""Arenas of one generation, read by range: as they lie there, against their digests; rebuilt from others where they do not.

A chunk is held against its digest when something of it is read for the first time, and is as good as lost where it has
another. What is lost is made of the blocks of its group, of which only the bytes that are asked for are read.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import NoReturn

import numpy as np
import xxhash
from attrs import field
from numpy.typing import NDArray

from ucpl.errors import Label, fail
from ucpl.records import define, frozen
from ucpl.remotes.vaults.codes import BLOCK, Group, sets_of
from ucpl.remotes.vaults.places import Domain
from ucpl.remotes.vaults.records import CHUNK, Commit, Job, Shard

__all__ = ["Lost", "Memory", "Piece", "Stretch", "stretch_of", "xor_into"]

Bytes = NDArray[np.uint8]
KEPT = 32  # rebuilt chunks: neighbouring tiles have chunks in common


class Lost(Exception):
    """What cannot be had: of which domain, and which others its group lacks."""

    def __init__(self, domain: int, lacking: Sequence[int]) -> None:
        super().__init__(domain, tuple(lacking))
        self.domain, self.lacking = domain, tuple(lacking)


@frozen
class Stretch:
    """The data of a domain: arenas of its ranks, end to end, each begun at a multiple of BLOCK."""

    ranks: tuple[int, ...]
    starts: tuple[int, ...]  # of each, and behind the last
    sizes: tuple[int, ...]

    @property
    def size(self) -> int:
        return self.starts[-1]


def stretch_of(ranks: Sequence[int], shards: Sequence[Shard]) -> Stretch:
    """shards: of all ranks, by rank."""
    sizes = tuple(shards[rank].size for rank in ranks)
    starts = tuple(accumulate((-(-size // BLOCK) * BLOCK for size in sizes), initial=0))
    return Stretch(tuple(ranks), starts, sizes)


def xor_into(into: Bytes, other: Bytes) -> None:
    """Eight bytes at a time."""
    whole = len(into) // 8 * 8
    a, b = into[:whole].view(np.uint64), other[:whole].view(np.uint64)
    np.bitwise_xor(a, b, out=a)
    np.bitwise_xor(into[whole:], other[whole:], out=into[whole:])


@define(eq=False)
class Piece:
    """A file of a vault with digests of its chunks: an arena, or what a domain holds for others."""

    path: Path
    size: int
    chunks: tuple[int, ...]
    is_good: NDArray[np.bool_]  # (chunks,) was looked at, and is what was written
    is_bad: NDArray[np.bool_]
    _fd: int | None = None
    _lock: threading.Lock = field(factory=threading.Lock)

    @classmethod
    def of(cls, path: Path, size: int, chunks: tuple[int, ...]) -> Piece:
        return cls(path, size, chunks, np.zeros(len(chunks), np.bool_), np.zeros(len(chunks), np.bool_))

    def _open(self) -> int:
        with self._lock:
            if self._fd is None:
                self._fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
            return self._fd

    def read(self, low: int, high: int) -> Bytes | None:
        """Bytes of one chunk, [low, high); None: they are not what was written. Raises nothing."""
        number = low // CHUNK
        begin, end = number * CHUNK, min(self.size, (number + 1) * CHUNK)
        if self.is_bad[number]:
            return None
        if self.is_good[number]:
            begin, end = low, high
        room = np.empty(end - begin, np.uint8)
        try:
            got = os.preadv(self._open(), [room.data], begin)
        except OSError:
            got = -1
        if got != end - begin:
            self.is_bad[number] = True
            return None
        if not self.is_good[number]:
            if xxhash.xxh3_64_intdigest(room.data) != self.chunks[number]:
                self.is_bad[number] = True
                return None
            self.is_good[number] = True
        return room[low - begin : high - begin]

    def mended(self, number: int) -> None:
        """A chunk was written once more: it is looked at again, in the file that has this name now."""
        self.close()
        self.is_good[number] = self.is_bad[number] = False

    def close(self) -> None:
        with self._lock:
            if self._fd is not None:
                with suppress(OSError):
                    os.close(self._fd)
                self._fd = None


@define(eq=False)
class Memory:
    """One generation."""

    home: Path
    job: Job
    commit: Commit
    lost: frozenset[int] = frozenset()  # domains to do without, whether they are there or not
    read: int = 0  # bytes that were read where they lie
    rebuilt: int = 0  # bytes that were made of others
    _arenas: dict[int, Piece] = field(factory=dict)
    _parity: dict[int, Piece] = field(factory=dict)
    _made: dict[tuple[int, int], Bytes] = field(factory=dict)  # the chunks that were rebuilt last, by (rank, number)
    _count: threading.Lock = field(factory=threading.Lock)

    @cached_property
    def sets(self) -> tuple[tuple[int, ...], ...]:
        return sets_of(len(self.job.domains), self.job.protection)

    @cached_property
    def stretches(self) -> tuple[Stretch, ...]:
        return tuple(stretch_of(ranks, self.commit.shards) for ranks in self.job.domains)

    def arena(self, rank: int) -> Piece | None:
        """What a rank saved; None: its domain is lost."""
        domain = self.job.domain_of(rank)
        if domain is None or domain in self.lost:
            return None
        with self._count:
            if rank not in self._arenas:
                shard = self.commit.shards[rank]
                path = Domain(self.home, domain).arena(rank, shard.slot)
                self._arenas[rank] = Piece.of(path, shard.size, shard.chunks)
            return self._arenas[rank]

    def parity(self, domain: int) -> Piece | None:
        if domain in self.lost:
            return None
        with self._count:
            if domain not in self._parity:
                found = self.commit.parity[domain]
                self._parity[domain] = Piece.of(Domain(self.home, domain).parity(found.slot), found.size, found.chunks)
            return self._parity[domain]

    # ---- reading ------------------------------------------------------------------------------------------------------

    def fill(self, rank: int, into: memoryview, position: int) -> None:
        """Bytes of a rank's arena from `position` on. Raises: UcplError E691."""
        done, size = 0, len(into)
        while done < size:
            low = position + done
            high = min(position + size, (low // CHUNK + 1) * CHUNK)
            into[done : done + high - low] = self._some(rank, low, high).data
            done += high - low

    def _some(self, rank: int, low: int, high: int) -> Bytes:
        """Within a chunk. Raises: UcplError E691."""
        piece = self.arena(rank)
        found = piece.read(low, high) if piece is not None else None
        if found is not None:
            self._counted(high - low)
            return found
        try:
            return self.made(rank, low, high)
        except Lost as lost:
            self._refuse(rank, lost)

    def made(self, rank: int, low: int, high: int) -> Bytes:
        """Bytes of one chunk of an arena, of others' alone, held against the chunk's digest. Raises: Lost."""
        shard = self.commit.shards[rank]
        number = low // CHUNK
        begin, end = number * CHUNK, min(shard.size, (number + 1) * CHUNK)
        room = self._made.get((rank, number))
        if room is None:
            domain = self.job.domain_of(rank)
            assert domain is not None
            stretch = self.stretches[domain]
            start = stretch.starts[stretch.ranks.index(rank)]
            room = self._rebuilt(domain, start + begin, start + end)
            if xxhash.xxh3_64_intdigest(room.data) != shard.chunks[number]:
                raise Lost(domain, (domain,))
            with self._count:
                self.rebuilt += end - begin
                while len(self._made) >= KEPT:
                    self._made.pop(next(iter(self._made)))
                self._made[rank, number] = room
        return room[low - begin : high - begin]

    def _rebuilt(self, domain: int, low: int, high: int) -> Bytes:
        """Bytes of a domain's data, of what the others of its set hold. Raises: Lost."""
        among = next(some for some in self.sets if domain in some)
        protection = self.job.protection
        groups = protection.groups(len(among))
        if not groups:
            raise Lost(domain, (domain,))
        place = among.index(domain)
        block = self.commit.parity[domain].block
        out = np.empty(high - low, np.uint8)
        at = low
        while at < high:
            number, inner = divmod(at, block)
            end = min(high, (number + 1) * block)
            group = next(g for g in groups if (place, number) in g.data)
            out[at - low : end - low] = self._of_group(group, (place, number), among, (inner, inner + end - at))
            at = end
        return out

    def _of_group(self, group: Group, missing: tuple[int, int], among: Sequence[int], span: tuple[int, int]) -> Bytes:
        """Bytes of one block, of the others of its group: all others and one block of parity. Raises: Lost."""
        out: Bytes | None = None
        lacking = []
        for place, slot in group.parity:
            found = self._parity_bytes(among[place], slot, span)
            if found is not None:
                out = found
                break
            lacking.append(among[place])
        if out is None:
            raise Lost(among[missing[0]], lacking)
        for place, number in group.data:
            if (place, number) == missing:
                continue
            found = self.data_bytes(among[place], number, span)
            if found is None:
                raise Lost(among[missing[0]], (among[place],))
            xor_into(out, found)
        return out

    def _parity_bytes(self, domain: int, slot: int, span: tuple[int, int]) -> Bytes | None:
        piece = self.parity(domain)
        begin = slot * self.commit.parity[domain].block
        return None if piece is None else self._gathered(piece, begin + span[0], begin + span[1])

    def data_bytes(self, domain: int, number: int, span: tuple[int, int]) -> Bytes | None:
        """Bytes of a block of a domain that is there: zeros behind the end of its data, and between arenas."""
        if domain in self.lost:
            return None
        stretch = self.stretches[domain]
        block = self.commit.parity[domain].block
        low, high = number * block + span[0], number * block + span[1]
        out = np.zeros(high - low, np.uint8)
        for rank, start, size in zip(stretch.ranks, stretch.starts, stretch.sizes, strict=False):
            begin, end = max(low, start), min(high, start + size)
            if begin < end:
                piece = self.arena(rank)
                found = self._gathered(piece, begin - start, end - start) if piece is not None else None
                if found is None:
                    return None
                out[begin - low : end - low] = found
        return out

    def parity_made(self, domain: int, low: int, high: int) -> Bytes:
        """Bytes of a chunk of what a domain holds for others, of their data. Raises: Lost."""
        among = next(some for some in self.sets if domain in some)
        place, block = among.index(domain), self.commit.parity[domain].block
        out = np.zeros(high - low, np.uint8)
        at = low
        while at < high:
            slot, inner = divmod(at, block)
            end = min(high, (slot + 1) * block)
            group = next(g for g in self.job.protection.groups(len(among)) if (place, slot) in g.parity)
            for other, number in group.data:
                found = self.data_bytes(among[other], number, (inner, inner + end - at))
                if found is None:
                    raise Lost(domain, (among[other],))
                xor_into(out[at - low : end - low], found)
            at = end
        if xxhash.xxh3_64_intdigest(out.data) != self.commit.parity[domain].chunks[low // CHUNK]:
            raise Lost(domain, (domain,))
        return out

    def _gathered(self, piece: Piece, low: int, high: int) -> Bytes | None:
        out = np.empty(high - low, np.uint8)
        at = low
        while at < high:
            end = min(high, (at // CHUNK + 1) * CHUNK)
            found = piece.read(at, end)
            if found is None:
                return None
            out[at - low : end - low] = found
            at = end
        self._counted(high - low)
        return out

    def _counted(self, read: int) -> None:
        with self._count:
            self.read += read

    def _refuse(self, rank: int, lost: Lost) -> NoReturn:
        gone = sorted({lost.domain, *lost.lacking})
        names = ", ".join(f"d{d}" for d in gone)
        files = [file.name for file in self.commit.shards[rank].files]
        shown = ", ".join(files[:3]) + (f" and {len(files) - 3} more" if len(files) > 3 else "")
        fail(
            "E691",
            f"{self.home}: generation {self.commit.generation} cannot be rebuilt: {names} {'is' if len(gone) == 1 else 'are'}"
            f" lost or damaged, {self.job.protection} does not bring back what rank {rank} saved",
            Label(str(self.home), f"rank {rank} saved {shown}", where=names),
        )

    def close(self) -> None:
        for piece in (*self._arenas.values(), *self._parity.values()):
            piece.close()
