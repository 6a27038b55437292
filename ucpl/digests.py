"""Digests of bytes. CRC-32 is zip's and zlib's; ISA-L's is ten times as fast as zlib's where its package has a build.

Both release the interpreter's lock. Not here: the CRC of a whole from those of its pieces (`runtime/crc.py`).
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import TypeAlias

__all__ = ["crc32"]

Bytes: TypeAlias = bytes | bytearray | memoryview
_Crc32: TypeAlias = Callable[[Bytes, int], int]


def _fastest() -> _Crc32:
    try:
        from isal.isal_zlib import crc32 as found
    except ImportError:  # no build for this machine: the same number, later
        return zlib.crc32
    return found


_crc32 = _fastest()


def crc32(data: Bytes, before: int = 0) -> int:
    """The CRC-32 of what has the CRC `before`, and then of `data`.

    >>> crc32(b"versal", crc32(b"uni")) == crc32(b"universal")
    True
    """
    return _crc32(data, before)
