"""CRC-32 of a file from the CRCs of its pieces.

A CRC is linear: appending n bytes maps the CRC so far through a fixed 32 × 32 matrix over GF(2), the n-th power of the
matrix of one byte, and then adds (XOR) the CRC of the appended bytes. Powers of two of that matrix are kept as four
tables of 256 words, so that shifting many CRCs by many lengths is a few lookups for each bit of the lengths.

The polynomial and the conventions are zlib's, which zip uses. Not here: digesting bytes (zlib.crc32).
"""

from __future__ import annotations

from functools import cache, lru_cache

import numpy as np
import numpy.typing as npt

__all__ = ["combine", "combine_groups", "crc_of_comb", "crc_of_zeros", "overlay", "shift"]

_POLYNOMIAL = 0xEDB88320  # reflected
_BITS = 63  # of a length in bytes
_FEW = 16  # CRCs that numbers of Python shift sooner than columns do: most members of a checkpoint are read in a few pieces

U32 = npt.NDArray[np.uint32]


def combine(crcs: npt.ArrayLike, lengths: npt.ArrayLike) -> int:
    """CRC of concatenated pieces from their CRCs (u32) and lengths (i64).

    Lengths are in bytes; pieces are in order.


    >>> import zlib
    >>> combine([zlib.crc32(b"uni"), zlib.crc32(b"versal")], [3, 6]) == zlib.crc32(b"universal")
    True
    """
    pieces = np.asarray(crcs, dtype=np.uint32).reshape(-1)  # (pieces,)
    if not pieces.size:
        return 0
    sizes = np.asarray(lengths, dtype=np.int64).reshape(-1)
    behind = sizes.sum() - np.cumsum(sizes)  # (pieces,) bytes that follow each piece
    return int(np.bitwise_xor.reduce(shift(pieces, behind)))


def combine_groups(crcs: npt.ArrayLike, lengths: npt.ArrayLike, starts: npt.ArrayLike) -> U32:
    """Do `combine` for many files at once.

    Group g is the pieces from starts[g] up to starts[g + 1]. None may be empty.
    """
    pieces = np.asarray(crcs, dtype=np.uint32).reshape(-1)  # (pieces,)
    sizes = np.asarray(lengths, dtype=np.int64).reshape(-1)
    first = np.asarray(starts, dtype=np.int64).reshape(-1)  # (groups,)
    if not first.size:
        return np.zeros(0, np.uint32)
    totals = np.add.reduceat(sizes, first)  # (groups,)
    counts = np.diff(np.append(first, sizes.size))
    ends = np.cumsum(totals) + sizes[: first[0]].sum()
    behind = np.repeat(ends, counts) - np.cumsum(sizes)[first[0] :]
    return np.bitwise_xor.reduceat(shift(pieces[first[0] :], behind), first - first[0])


def shift(crcs: npt.ArrayLike, nbytes: npt.ArrayLike) -> U32:
    """Contribution of CRCs that `nbytes` further bytes follow.

    `crc(a + b) == shift(crc(a), len(b)) ^ crc(b)`.
    """
    moved = np.array(crcs, dtype=np.uint32, copy=True, ndmin=1)
    left = np.broadcast_to(np.asarray(nbytes, dtype=np.int64), moved.shape)
    if moved.size and left.min() < 0:
        raise ValueError("a length is negative")
    if moved.size <= _FEW:
        each = [_shifted(crc, n) for crc, n in zip(moved.reshape(-1).tolist(), left.reshape(-1).tolist(), strict=True)]
        return np.array(each, np.uint32).reshape(moved.shape)
    for bit in range(int(left.max()).bit_length() if moved.size else 0):
        chosen = np.flatnonzero((left >> bit) & 1)
        if chosen.size:
            moved[chosen] = _apply(_power(bit), moved[chosen])
    return moved


def overlay(crcs: npt.ArrayLike, lengths: npt.ArrayLike, behind: npt.ArrayLike, total: int) -> int:
    """CRC of `total` zero bytes with pieces laid over them.

    Each piece has `behind` bytes after it. If pieces meet the same bytes, these are added (XOR): pieces that interleave
    may each have zeros where the other has its bytes.


    >>> import zlib
    >>> overlay([zlib.crc32(b"uni"), zlib.crc32(b"versal")], [3, 6], [6, 0], 9) == zlib.crc32(b"universal")
    True
    """
    pieces = np.asarray(crcs, dtype=np.uint32).reshape(-1)
    bare = shift(np.full(len(pieces), 0xFFFFFFFF, np.uint32), lengths) ^ np.uint32(0xFFFFFFFF)
    return int(np.bitwise_xor.reduce(shift(pieces ^ bare, behind), initial=0)) ^ crc_of_zeros(total)


def crc_of_comb(crcs: npt.ArrayLike, size: int, step: int) -> int:
    """CRC of runs of `size` bytes, `step` bytes apart, with zeros between."""
    runs = np.asarray(crcs, dtype=np.uint32).reshape(-1) ^ np.uint32(crc_of_zeros(size))
    total = (len(runs) - 1) * step + size
    while len(runs) > 1:  # neighbours become one
        if len(runs) % 2:
            runs = np.append(np.uint32(0), runs)
        runs = _apply(_moved(step), runs[0::2]) ^ runs[1::2]
        step *= 2
    return int(runs[0]) ^ crc_of_zeros(total)


def _shifted(crc: int, nbytes: int) -> int:
    """As `shift`, of one."""
    bit = 0
    while nbytes:
        if nbytes & 1:
            first, second, third, fourth = _rows(bit)
            crc = first[crc & 0xFF] ^ second[crc >> 8 & 0xFF] ^ third[crc >> 16 & 0xFF] ^ fourth[crc >> 24]
        nbytes >>= 1
        bit += 1
    return crc


@lru_cache(maxsize=256)
def _moved(nbytes: int) -> U32:
    """The table of so many appended bytes: (4, 256) u32."""
    words = np.arange(256, dtype=np.uint32)
    return shift(np.stack([words << (8 * place) for place in range(4)]).reshape(-1), nbytes).reshape(4, 256)


@lru_cache(maxsize=4096)
def crc_of_zeros(nbytes: int) -> int:
    """The CRC of `nbytes` zero bytes, without making them."""
    return int(shift([0xFFFFFFFF], [nbytes])[0]) ^ 0xFFFFFFFF


def _apply(table: U32, crcs: U32) -> U32:
    """Multiply each word by a matrix, given as bytes' table (4, 256)."""
    found: U32 = table[0][crcs & 0xFF]
    found ^= table[1][(crcs >> 8) & 0xFF]
    found ^= table[2][(crcs >> 16) & 0xFF]
    found ^= table[3][crcs >> 24]
    return found


@cache
def _rows(bit: int) -> list[list[int]]:
    """`_power` as numbers of Python."""
    found: list[list[int]] = _power(bit).tolist()
    return found


@cache
def _power(bit: int) -> U32:
    """The table of 2^bit appended zero bytes: (4, 256) u32."""
    if bit > _BITS:
        raise ValueError("a length of more than 2^63 bytes")
    words = np.arange(256, dtype=np.uint32)
    places = np.stack([words << (8 * place) for place in range(4)])  # (4, 256): each byte at each place
    if bit:
        half = _power(bit - 1)
        return _apply(half, _apply(half, places))
    for _ in range(8):
        places = (places >> 1) ^ np.where(places & 1, np.uint32(_POLYNOMIAL), np.uint32(0))
    return places
