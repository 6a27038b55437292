"""Digests of bytes. CRC-32 is zip's and zlib's.

ISA-L's is ten times as fast, if its package has a build.

Both release the interpreter's lock. Not here: the CRC of joined pieces (`runtime/joined_crcs.py`).
"""

from __future__ import annotations

import zlib
from typing import Protocol, TypeAlias

__all__ = ["crc32"]

Bytes: TypeAlias = bytes | bytearray | memoryview


class _Crc32(Protocol):
    def __call__(self, data: Bytes, before: int = 0, /) -> int: ...


def _fastest() -> _Crc32:
    try:
        from isal.isal_zlib import crc32 as found
    except ImportError:  # no build for this machine: the same number, later
        return zlib.crc32
    return found


crc32 = _fastest()  # (data, before = 0): continues from the CRC `before` with `data`
