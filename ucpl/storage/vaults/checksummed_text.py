"""Small texts with a digest at their end.

A damaged or truncated text counts as missing.
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import xxhash

from ucpl.owned import open_new

__all__ = ["JsonObject", "json_text", "unseal", "read_sealed", "seal", "was_sealed", "write_whole"]

JsonObject = dict[str, object]
_MAX = 1 << 30
_MARK = 33  # a line of 32 digits
_END = re.compile(rb"\}\n[0-9a-f]{32}\n")


def seal(told: Mapping[str, object]) -> bytes:
    """A JSON text and, in a line behind it, its digest."""
    text = json_text(told).encode()
    return text + b"\n" + xxhash.xxh3_128_hexdigest(text).encode() + b"\n"


def json_text(told: object) -> str:
    """The same text for the same values."""
    return json.dumps(told, sort_keys=True, separators=(",", ":"))


def unseal(data: bytes) -> JsonObject | None:
    """The content of a checksummed text; None: it is damaged or none."""
    text = _inner(data)
    if text is None:
        return None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _inner(data: bytes) -> bytes | None:
    """The text before a correct digest."""
    text, mark = data[: -_MARK - 1], data[-_MARK:]
    return text if len(data) > _MARK and mark == xxhash.xxh3_128_hexdigest(text).encode() + b"\n" else None


def read_sealed(path: Path) -> bytes | None:
    """An intact checksummed text with its digest; None: there is none.

    Raises: OSError, if the file cannot be read.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO):
            return None
        raise
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or not 0 < status.st_size <= _MAX:
            return None
        with os.fdopen(os.dup(fd), "rb") as file:
            data = file.read(_MAX)
    finally:
        os.close(fd)
    return data if _inner(data) is not None else None


def was_sealed(path: Path) -> bool:
    """True if a file ends like a checksummed text, even damaged.

    Files of other programs do not. Raises: OSError.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        status = os.fstat(fd)
        end = os.pread(fd, _MARK + 2, max(0, status.st_size - _MARK - 2)) if stat.S_ISREG(status.st_mode) else b""
    finally:
        os.close(fd)
    return _END.fullmatch(end) is not None


def write_whole(path: Path, data: bytes) -> None:
    """Write a file, complete or not at all. Raises: OSError."""
    new = path.with_name(f"{path.name}.new")
    try:
        fd = open_new(new)
    except FileExistsError:  # of a process that was killed
        os.unlink(new)
        fd = open_new(new)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(data)
        os.rename(new, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(new)
        raise
