"""Positional reads of files, local or remote.

Reads of local files are the system's own calls. A remote file is a local sparse file that is recognized by its inode,
under any name and for any caller.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from ucpl.storage.cache_dirs import current_scope

__all__ = [
    "Remote",
    "call_bytes",
    "fetch_all",
    "hint",
    "identity_of",
    "has_latency",
    "is_within",
    "look_again",
    "computed_ranges",
    "pread",
    "preadv",
    "rebuilt_bytes",
    "sparse_file_registry",
    "remote_at",
    "remote_of",
    "want",
]

Range = tuple[int, int]  # first byte, and the one behind the last


class Listing(Protocol):
    """Remote files that were listed together."""

    def look_again(self) -> None:
        """Update the facts from the store. Raises: OSError."""
        ...


class Remote(Protocol):
    """A file whose bytes are elsewhere."""

    def read(self, fd: int, views: Sequence[memoryview], position: int) -> int:
        """Like os.preadv of the sparse file `fd`, after a fetch.

        Raises: OSError, UcplError E611.
        """
        ...

    def hint(self, ranges: Iterable[Range], *, payload: bool) -> None:
        """Fetch these ranges now, several in parallel; they are read soon.

        Raises: OSError, UcplError E611.
        """
        ...

    def want(self, ranges: Iterable[Range]) -> None:
        """Announce all ranges that will be read.

        Adjacent ones may be fetched together.
        """
        ...

    def identity(self) -> tuple[int, int, int, int]:
        """Size, time (ns), and the tag and URL as inode and device.

        Raises: OSError, if the object was removed.
        """
        ...

    @property
    def listed_by(self) -> Listing:
        """The listing that contains it."""
        ...


_REMOTES: dict[tuple[int, int], Remote] = {}  # device and inode of a sparse file -> its remote file


def sparse_file_registry() -> Callable[[os.stat_result, Remote], None]:
    """A function that registers sparse files for remote ones.

    The registration ends with the folder of the sparse files.
    """
    mine: list[tuple[tuple[int, int], Remote]] = []

    def register(status: os.stat_result, remote: Remote) -> None:
        at = status.st_dev, status.st_ino
        mine.append((at, remote))
        _REMOTES[at] = remote

    def forget() -> None:
        for at, remote in mine:
            if _REMOTES.get(at) is remote:  # else its file was removed, and another one has its inode
                del _REMOTES[at]

    current_scope().callback(forget)
    return register


def remote_of(status: os.stat_result) -> Remote | None:
    return _REMOTES.get((status.st_dev, status.st_ino))


def remote_at(fd: int) -> Remote | None:
    """The remote file of an open sparse file. Raises: OSError."""
    return remote_of(os.fstat(fd)) if _REMOTES else None


def pread(fd: int, size: int, position: int) -> bytes:
    """Bytes of a file; fewer at its end. Raises: OSError, UcplError E611."""
    remote = remote_at(fd)
    if remote is None:
        return os.pread(fd, size, position)
    room = bytearray(max(0, min(size, os.fstat(fd).st_size - position)))
    return bytes(memoryview(room)[: remote.read(fd, [memoryview(room)], position)]) if room else b""


def preadv(fd: int, views: Sequence[memoryview], position: int) -> int:
    """Read bytes into the views; return their number.

    It may be smaller than the views. Raises: OSError, UcplError E611.
    """
    remote = remote_at(fd)
    return os.preadv(fd, views, position) if remote is None else remote.read(fd, views, position)


def hint(fd: int, ranges: Iterable[Range], *, payload: bool = False) -> None:
    """Announce the next reads, in any order.

    payload: they may be large.
    Raises: OSError, UcplError E611.
    """
    if (remote := remote_at(fd)) is not None:
        remote.hint(ranges, payload=payload)


def want(fd: int, ranges: Iterable[Range]) -> None:
    """All that will be read of a file. Raises: OSError."""
    if (remote := remote_at(fd)) is not None:
        remote.want(ranges)


def fetch_all(fd: int) -> None:
    """Fetch a complete file for readers that do not use this module.

    Raises: OSError, UcplError E611.
    """
    if (remote := remote_at(fd)) is not None:
        remote.hint([(0, os.fstat(fd).st_size)], payload=False)


def identity_of(status: os.stat_result) -> tuple[int, int, int, int] | None:
    """The identity of a remote file; None: it is local.

    Raises: OSError, if it was removed.
    """
    remote = remote_of(status) if _REMOTES else None
    return None if remote is None else remote.identity()


def call_bytes(status: os.stat_result) -> int:
    """The number of bytes that could be read during one more call.

    0: the file is local.
    """
    return getattr(remote_of(status), "call_bytes", 0) if _REMOTES else 0


def has_latency(status: os.stat_result) -> bool:
    """True if reads have a latency, so that parallel reads are faster."""
    remote = remote_of(status) if _REMOTES else None
    return remote is not None and not getattr(remote, "call_bytes", 0)


def computed_ranges(fd: int) -> Sequence[Range]:
    """The ranges of a file that are computed during the read, ascending.

    A CRC that is stored for them is not the CRC of these bytes.
    """
    remote = remote_at(fd)
    return getattr(remote, "made", ()) if remote is not None else ()


def is_within(low: int, high: int, ranges: Sequence[Range]) -> bool:
    """True if the non-empty range [low, high) is inside one range.

    `ranges` is ascending.
    """
    at = bisect_right(ranges, (low, 1 << 62)) - 1
    return at >= 0 and low < high <= ranges[at][1]


def rebuilt_bytes(statuses: Iterable[os.stat_result]) -> int:
    """Bytes rebuilt so far in the listings of these files."""
    found = (remote_of(status) for status in statuses)
    listings = {id(one.listed_by): one.listed_by for one in found if one is not None}
    return sum(getattr(listing, "rebuilt", 0) for listing in listings.values())


def look_again(statuses: Iterable[os.stat_result]) -> None:
    """Update the facts of all remote files among these. Raises: OSError."""
    found = (remote_of(status) for status in statuses)
    for listing in {id(one.listed_by): one.listed_by for one in found if one is not None}.values():
        listing.look_again()
