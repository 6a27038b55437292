"""Reads of ranges in the arenas of one generation.

A chunk is compared with its digest at its first read, and counts as lost if it differs. Lost bytes are computed from
the other blocks of their group; only the required ranges of these are read.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from functools import cached_property, lru_cache
from itertools import accumulate
from pathlib import Path
from typing import NoReturn, Protocol, cast

import numpy as np
import xxhash
from attrs import field
from numpy.typing import NDArray

from ucpl.errors import Label, fail
from ucpl.records import define, frozen
from ucpl.storage.vaults.committed import get_commits, get_domain
from ucpl.storage.vaults.domains import AnyDomain, LocalDomain
from ucpl.storage.vaults.protection import BLOCK, ParityGroup, get_sets
from ucpl.storage.vaults.records import CHUNK, Commit, Job, Shard
from ucpl.storage.vaults.remote_domain import RemoteDomain

__all__ = ["LostBytes", "Memory", "ChunkedFile", "DomainData", "get_domain_data", "xor_into", "Codes", "codes_of"]

KIND = "isa_l_rs_cauchy"
UNIT = 64  # coded sizes are multiples of this many bytes


class _Driver(Protocol):
    """The interface of pyeclib that is used here."""

    def encode(self, data: bytes) -> list[bytes]: ...
    def reconstruct(self, fragments: list[bytes], missing: list[int]) -> list[bytes]: ...


class Codes:
    """`data` blocks and `codes` codes; any `data` of them give the rest."""

    def __init__(self, data: int, codes: int) -> None:
        """Raises: UcplError E690, if pyeclib is not installed."""
        try:
            from pyeclib.ec_iface import ECDriver
        except ImportError:
            what = "Reed-Solomon codes need the package pyeclib, which is not installed"
            fail("E690", what, Label("--protect", where=f"rs({data}, {codes})"), remedy="pip install 'ucpl[vault]'")
        self.data, self.codes = data, codes
        self._driver = cast(_Driver, ECDriver(k=data, m=codes, ec_type=KIND))
        self._heads: dict[int, tuple[bytes, ...]] = {}

    def code(self, blocks: Sequence[Bytes], which: int, out: Bytes) -> None:
        """One code of all data blocks, or of one range of each."""
        whole = _rounded(len(out))
        room = np.zeros((self.data, whole), np.uint8)
        for i, block in enumerate(blocks):
            room[i, : len(out)] = block
        made = self._driver.encode(room.tobytes())[self.data + which]
        out[:] = np.frombuffer(made, np.uint8)[len(made) - whole :][: len(out)]

    def rebuild(self, have: Mapping[int, Bytes], wanted: int, out: Bytes) -> None:
        """A lost block, from `data` others.

        `have`: their numbers; data blocks are first, codes follow.
        """
        whole = _rounded(len(out))
        heads = self._heads_of(whole)
        fill = bytes(whole - len(out))
        made = self._driver.reconstruct(
            [heads[i] + block.tobytes() + fill for i, block in sorted(have.items())], [wanted]
        )[0]
        out[:] = np.frombuffer(made, np.uint8)[len(made) - whole :][: len(out)]

    def _heads_of(self, whole: int) -> tuple[bytes, ...]:
        """The header that pyeclib writes before each fragment.

        It states the size and the number. A vault does not store it.
        """
        if whole not in self._heads:
            made = self._driver.encode(bytes(self.data * whole))
            self._heads[whole] = tuple(one[: len(one) - whole] for one in made)
        return self._heads[whole]


def _rounded(size: int) -> int:
    return -(-size // UNIT) * UNIT


@lru_cache
def codes_of(data: int, codes: int) -> Codes:
    """Raises: UcplError E690."""
    return Codes(data, codes)


Bytes = NDArray[np.uint8]
_CHUNK_BITS = CHUNK.bit_length() - 1
KEPT = 32  # rebuilt chunks: neighbouring tiles have chunks in common


class LostBytes(Exception):
    """Bytes that cannot be read, with their domain.

    It also names the domains that their group lacks.
    """

    def __init__(self, domain: int, lacking: Sequence[int]) -> None:
        super().__init__(domain, tuple(lacking))
        self.domain, self.lacking = domain, tuple(lacking)


@frozen
class DomainData:
    """The data of a domain: its ranks' arenas, end to end.

    Each arena starts at a multiple of BLOCK.
    """

    ranks: tuple[int, ...]
    starts: tuple[int, ...]  # of each, and behind the last
    sizes: tuple[int, ...]

    @classmethod
    def of(cls, ranks: Sequence[int], sizes: Sequence[int]) -> DomainData:
        starts = accumulate((-(-size // BLOCK) * BLOCK for size in sizes), initial=0)
        return cls(tuple(ranks), tuple(starts), tuple(sizes))

    @property
    def size(self) -> int:
        return self.starts[-1]


def get_domain_data(ranks: Sequence[int], shards: Sequence[Shard]) -> DomainData:
    """shards: of all ranks, by rank."""
    return DomainData.of(ranks, [shards[rank].size for rank in ranks])


def _chunks(low: int, high: int, size: int = CHUNK) -> Iterator[tuple[int, int]]:
    """[low, high) cut at multiples of `size`."""
    while low < high:
        end = min(high, (low // size + 1) * size)
        yield low, end
        low = end


def xor_into(into: Bytes, other: Bytes) -> None:
    """Eight bytes at a time."""
    whole = len(into) // 8 * 8
    a, b = into[:whole].view(np.uint64), other[:whole].view(np.uint64)
    np.bitwise_xor(a, b, out=a)
    np.bitwise_xor(into[whole:], other[whole:], out=into[whole:])


class _ThreadBuffers(threading.local):
    """Buffers of each thread.

    A new buffer of a chunk's size is expensive, because the kernel clears it.
    """

    def __init__(self) -> None:
        self.rooms = [np.empty(CHUNK, np.uint8) for _ in range(3)]


_scratch = _ThreadBuffers()


@define(eq=False)
class ChunkedFile:
    """A file of a vault with digests of its chunks.

    It is an arena, or the redundancy of a domain.
    """

    where: AnyDomain
    name: str  # in the domain's folder
    size: int
    chunks: tuple[int, ...]
    is_good: NDArray[np.bool_]  # (chunks,) compared with its digest and equal
    is_bad: NDArray[np.bool_]
    _is_sure: bytearray  # `is_good`, as is asked soonest
    _fd: int | None = None
    _lock: threading.Lock = field(factory=threading.Lock)

    @classmethod
    def of(cls, where: AnyDomain, name: str, size: int, chunks: tuple[int, ...]) -> ChunkedFile:
        kind = _RemoteChunkedFile if isinstance(where, RemoteDomain) else cls
        good, bad = np.zeros((2, len(chunks)), np.bool_)
        return kind(where, name, size, chunks, good, bad, bytearray(len(chunks)))

    @property
    def path(self) -> Path:
        assert isinstance(self.where, LocalDomain)
        return self.where.folder / self.name

    def _open(self) -> int:
        with self._lock:
            if self._fd is None:
                self._fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
            return self._fd

    def is_short(self) -> bool:
        """True if the file is missing or too short."""
        try:
            return self.where.size(self.name) < self.size
        except OSError:
            return True

    def read(self, low: int, out: Bytes) -> bool:
        """Fill `out` with bytes from `low`, all in one chunk.

        False: they are damaged. Raises nothing.
        """
        number = low // CHUNK
        begin, end = number * CHUNK, min(self.size, (number + 1) * CHUNK)
        if self.is_bad[number]:
            return False
        if self.is_good[number] and self._got(out, low):
            return True
        whole = out if (low, len(out)) == (begin, end - begin) else _scratch.rooms[0][: end - begin]
        if not self._got(whole, begin) or xxhash.xxh3_64_intdigest(whole.data) != self.chunks[number]:
            self.is_bad[number] = True
            return False
        self.is_good[number] = True
        self._is_sure[number] = 1
        if whole is not out:
            out[:] = whole[low - begin : low - begin + len(out)]
        return True

    def quick(self, position: int, into: memoryview) -> bool:
        """The same for a few bytes of a checked chunk.

        False: call `read`.
        """
        number = position >> _CHUNK_BITS
        if self._fd is None or number != (position + len(into) - 1) >> _CHUNK_BITS or not self._is_sure[number]:
            return False
        try:
            return os.preadv(self._fd, (into,), position) == len(into)
        except OSError:
            return False

    def raw(self, low: int, out: Bytes) -> bool:
        """Fill `out` with unchecked bytes from `low`, across chunks.

        False: the file is missing or known to be damaged.
        """
        if self.is_bad[low // CHUNK : -(-(low + len(out)) // CHUNK)].any():
            return False
        return self._got(out, low)

    def is_intact(self, low: int) -> bool:
        """True if the chunk that begins at `low` is undamaged."""
        return self.read(low, _scratch.rooms[1][: min(CHUNK, self.size - low)])

    def _got(self, out: Bytes, position: int) -> bool:
        try:
            return os.preadv(self._open(), [out.data], position) == len(out)
        except OSError:
            return False

    def mark_rewritten(self, number: int) -> None:
        """Note a rewritten chunk: check it again in the current file."""
        self.close()
        self.is_good[number] = self.is_bad[number] = False
        self._is_sure[number] = 0

    def close(self) -> None:
        with self._lock:
            if self._fd is not None:
                with suppress(OSError):
                    os.close(self._fd)
                self._fd = None


@define(eq=False)
class _RemoteChunkedFile(ChunkedFile):
    """A piece on another host: complete chunks are fetched and cached."""

    _came: dict[int, Bytes] = field(factory=dict)  # correct chunks, by their start

    def read(self, low: int, out: Bytes) -> bool:
        begin = low // CHUNK * CHUNK
        with self._lock:
            whole = self._came.get(begin)
        if whole is None:
            whole = np.empty(min(CHUNK, self.size - begin), np.uint8)
            if not super().read(begin, whole):
                return False
            with self._lock:
                while len(self._came) >= KEPT:
                    self._came.pop(next(iter(self._came)))
                self._came[begin] = whole
        out[:] = whole[low - begin : low - begin + len(out)]
        return True

    def _got(self, out: Bytes, position: int) -> bool:
        assert isinstance(self.where, RemoteDomain)
        try:
            return self.where.read(self.name, out.data, position) == len(out)
        except OSError:
            return False


@frozen
class _Part:
    """A range of a block that is computed from others.

    It belongs to a group and starts at `begin`.
    checked: compare the others with their digests.
    """

    group: ParityGroup
    missing: tuple[int, int]  # (place in the set, which of its blocks)
    among: Sequence[int]  # the set
    begin: int
    checked: bool


@define(eq=False)
class Memory:
    """One generation."""

    home: Path
    job: Job
    commit: Commit
    before: tuple[Memory, ...] = ()  # the generations that it is replayed from, the complete one first
    lost: frozenset[int] = frozenset()  # domains that are not read, even if they exist
    read: int = 0  # bytes that were read without rebuilding
    rebuilt: int = 0  # bytes that were rebuilt
    _arenas: dict[int, ChunkedFile] = field(factory=dict)
    _parity: dict[int, ChunkedFile] = field(factory=dict)
    _made: dict[tuple[int, int], Bytes] = field(factory=dict)  # the chunks that were rebuilt last, by (rank, number)
    _count: threading.Lock = field(factory=threading.Lock)

    @property
    def whole(self) -> Memory:
        """The complete generation: this one, or its base."""
        return self.before[0] if self.before else self

    @property
    def all_rebuilt(self) -> int:
        """Bytes that were rebuilt, in this generation and its bases."""
        return self.rebuilt + sum(one.rebuilt for one in self.before)

    @cached_property
    def sets(self) -> tuple[tuple[int, ...], ...]:
        return get_sets(len(self.job.domains), self.job.protection)

    @cached_property
    def stretches(self) -> tuple[DomainData, ...]:
        return tuple(get_domain_data(ranks, self.commit.shards) for ranks in self.job.domains)

    def arena(self, rank: int) -> ChunkedFile | None:
        """The arena of a rank; None: its domain is lost."""
        domain = self.job.domain_of(rank)
        if domain is None or domain in self.lost:
            return None
        with self._count:
            if rank not in self._arenas:
                shard = self.commit.shards[rank]
                where = get_domain(self.home, domain)
                self._arenas[rank] = ChunkedFile.of(where, f"r{rank}.s{shard.slot}", shard.size, shard.chunks)
            return self._arenas[rank]

    def is_lost(self, rank: int) -> bool:
        """True if the arena of a rank is missing or too short.

        Damage is detected when it is read.
        """
        piece = self.arena(rank)
        return piece is None or piece.is_short()

    def others(self, domain: int) -> tuple[int, ...]:
        """The domains of a lost domain's set that have all their arenas."""
        among = next(some for some in self.sets if domain in some)
        return tuple(d for d in among if d != domain and not any(map(self.is_lost, self.job.domains[d])))

    def parity(self, domain: int) -> ChunkedFile | None:
        if domain in self.lost:
            return None
        with self._count:
            if domain not in self._parity:
                found = self.commit.parity[domain]
                where = get_domain(self.home, domain)
                self._parity[domain] = ChunkedFile.of(where, f"p.s{found.slot}", found.size, found.chunks)
            return self._parity[domain]

    # ---- reading ------------------------------------------------------------------------------------------------------

    def fill(self, rank: int, into: memoryview, position: int) -> None:
        """Bytes of a rank's arena from `position` on. Raises: UcplError E691."""
        known = self._arenas.get(rank)
        if known is not None and known.quick(position, into):
            self.read += len(into)
            return
        out = np.frombuffer(into, np.uint8)
        piece = self.arena(rank)
        for low, high in _chunks(position, position + len(out)):
            some = out[low - position : high - position]
            if piece is not None and piece.read(low, some):
                self._counted(high - low)
                continue
            try:
                self.made(rank, low, some)
            except LostBytes as lost:
                self._refuse(rank, lost)

    def made(self, rank: int, low: int, out: Bytes) -> None:
        """Rebuild bytes of one chunk of an arena, and check the chunk.

        Raises: LostBytes.
        """
        shard = self.commit.shards[rank]
        number = low // CHUNK
        begin, end = number * CHUNK, min(shard.size, (number + 1) * CHUNK)
        room = self._made.get((rank, number))
        if room is None:
            domain = self.job.domain_of(rank)
            assert domain is not None
            stretch = self.stretches[domain]
            start = stretch.starts[stretch.ranks.index(rank)]
            whole = (low, len(out)) == (begin, end - begin)
            room = out if whole else np.empty(end - begin, np.uint8)
            self._rebuilt_sure(domain, start + begin, room, shard.chunks[number])
            with self._count:
                self.rebuilt += end - begin
                if not whole:
                    while len(self._made) >= KEPT:
                        self._made.pop(next(iter(self._made)))
                    self._made[rank, number] = room
        if room is not out:
            out[:] = room[low - begin : low - begin + len(out)]

    def _rebuilt_sure(self, domain: int, low: int, out: Bytes, digest: int) -> None:
        """Rebuild bytes of a domain's data that have this digest.

        The result is compared with the digest, so the inputs need no check. Only if the result differs, the inputs are
        checked and damaged ones are replaced. Raises: LostBytes.
        """
        for checked in (False, True):
            with suppress(LostBytes) if not checked else nullcontext():
                self._rebuilt(domain, low, out, checked)
                if xxhash.xxh3_64_intdigest(out.data) == digest:
                    return
        raise LostBytes(domain, (domain,))

    def _rebuilt(self, domain: int, low: int, out: Bytes, checked: bool) -> None:
        """Rebuild bytes of a domain's data from its set. Raises: LostBytes."""
        among = next(some for some in self.sets if domain in some)
        groups = self.job.protection.groups(len(among))
        if not groups:
            raise LostBytes(domain, (domain,))
        place = among.index(domain)
        block = self.commit.parity[domain].block
        for at, end in _chunks(low, low + len(out), block):
            number = at // block
            group = next(g for g in groups if (place, number) in g.data)
            part = _Part(group, (place, number), among, at % block, checked)
            self._of_group(part, out[at - low : end - low])

    def _of_group(self, part: _Part, out: Bytes) -> None:
        """Compute a range of one block from the others of its group.

        Their number is that of the data blocks. Raises: LostBytes.
        """
        if self.job.protection.name == "rs":
            self._of_codes(part, out)
            return
        group, missing, among = part.group, part.missing, part.among
        lacking = []
        for place, slot in group.parity:
            if self._parity_bytes(among[place], slot, part, out):
                break
            lacking.append(among[place])
        else:
            raise LostBytes(among[missing[0]], lacking)
        room = _scratch.rooms[2][: len(out)]
        for place, number in group.data:
            if (place, number) == missing:
                continue
            if not self.data_bytes(among[place], number, part.begin, room, part.checked):
                raise LostBytes(among[missing[0]], (among[place],))
            xor_into(out, room)

    def _of_codes(self, part: _Part, out: Bytes) -> None:
        """The same under `rs`. Raises: LostBytes, UcplError E690."""
        group, missing, among = part.group, part.missing, part.among
        count, lacking = len(group.data), []
        have: dict[int, Bytes] = {}
        for i, (place, number) in enumerate((*group.data, *group.parity)):
            if (i < count and (place, number) == missing) or len(have) == count:
                continue
            room = np.empty(len(out), np.uint8)
            if (
                self.data_bytes(among[place], number, part.begin, room, part.checked)
                if i < count
                else self._parity_bytes(among[place], number, part, room)
            ):
                have[i] = room
            else:
                lacking.append(among[place])
        if len(have) < count:
            raise LostBytes(among[missing[0]], lacking)
        codes_of(count, len(group.parity)).rebuild(have, group.data.index(missing), out)

    def _parity_bytes(self, domain: int, slot: int, part: _Part, out: Bytes) -> bool:
        piece = self.parity(domain)
        at = slot * self.commit.parity[domain].block + part.begin
        return piece is not None and self._gathered(piece, at, out, part.checked)

    def data_bytes(self, domain: int, number: int, begin: int, out: Bytes, checked: bool = True) -> bool:
        """Bytes of a domain's block.

        Bytes after its data and between arenas are zeros, without a read.
        checked: compare the bytes with their digests. False: they are missing.
        """
        stretch = self.stretches[domain]
        low = number * self.commit.parity[domain].block + begin
        high = low + len(out)
        done = low
        for rank, start, size in zip(stretch.ranks, stretch.starts, stretch.sizes, strict=False):
            a, b = max(low, start), min(high, start + size)
            if a < b:
                piece = self.arena(rank)
                if piece is None or not self._gathered(piece, a - start, out[a - low : b - low], checked):
                    return False
                out[done - low : a - low] = 0
                done = b
        out[done - low :] = 0
        return True

    def parity_made(self, domain: int, low: int, out: Bytes) -> None:
        """Bytes of one chunk of a domain's redundancy. Raises: LostBytes.

        They are computed from the data of the other domains.
        """
        self.make_parity(domain, low, out)
        if xxhash.xxh3_64_intdigest(out.data) != self.commit.parity[domain].chunks[low // CHUNK]:
            raise LostBytes(domain, (domain,))

    def make_parity(self, domain: int, low: int, out: Bytes) -> None:
        """Compute a domain's redundancy from `low`. Raises: LostBytes."""
        among = next(some for some in self.sets if domain in some)
        place, block = among.index(domain), self.commit.parity[domain].block
        groups = self.job.protection.groups(len(among))
        room = _scratch.rooms[2]
        for at, end in _chunks(low, low + len(out), block):
            group = next(g for g in groups if (place, at // block) in g.parity)
            into = out[at - low : end - low]
            if self.job.protection.name == "rs":
                self._code(group, (place, at // block), among, at % block, into)
                continue
            for i, (other, number) in enumerate(group.data):
                some = into if i == 0 else room[: len(into)]
                if not self.data_bytes(among[other], number, at % block, some):
                    raise LostBytes(domain, (among[other],))
                if i:
                    xor_into(into, some)

    def _code(self, group: ParityGroup, which: tuple[int, int], among: Sequence[int], begin: int, out: Bytes) -> None:
        """Raises: LostBytes, UcplError E690."""
        blocks = []
        for other, number in group.data:
            blocks.append(np.empty(len(out), np.uint8))
            if not self.data_bytes(among[other], number, begin, blocks[-1]):
                raise LostBytes(among[which[0]], (among[other],))
        codes_of(len(blocks), len(group.parity)).code(blocks, group.parity.index(which), out)

    def _gathered(self, piece: ChunkedFile, low: int, out: Bytes, checked: bool) -> bool:
        if not checked:
            if not piece.raw(low, out):
                return False
        elif not all(piece.read(at, out[at - low : end - low]) for at, end in _chunks(low, low + len(out))):
            return False
        self._counted(len(out))
        return True

    def _counted(self, read: int) -> None:
        with self._count:
            self.read += read

    def _refuse(self, rank: int, lost: LostBytes) -> NoReturn:
        lost_in = sorted({lost.domain, *lost.lacking})
        names = ", ".join(f"d{d}" for d in lost_in)
        verb = "is" if len(lost_in) == 1 else "are"
        files = [file.name for file in self.commit.shards[rank].files]
        shown = ", ".join(files[:3]) + (f" and {len(files) - 3} more" if len(files) > 3 else "")
        fail(
            "E691",
            f"{self.home}: generation {self.commit.generation} cannot be rebuilt: {names} {verb} lost or damaged"
            f", {self.job.protection} does not restore the data of rank {rank}",
            Label(str(self.home), f"rank {rank} saved {shown}", where=names),
            remedy=self._alternatives(),
        )

    def _alternatives(self) -> str:
        """Readable alternatives to this generation."""
        older = [one.generation for one in get_commits(self.home, self.job) if one.generation < self.commit.generation]
        before = (
            f"vault:{self.home}@{older[0]} is the previous generation"
            if older
            else "no earlier generation is committed"
        )
        return (
            f"{before}; `ucpl vault restore` restores the newest readable one,"
            " and with --else FOLDER also a checkpoint of `serve --into FOLDER`"
        )

    def close(self) -> None:
        for piece in (*self._arenas.values(), *self._parity.values()):
            piece.close()
        for one in self.before:
            one.close()
