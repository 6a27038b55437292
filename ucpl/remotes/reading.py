"""Positional reads of files that may be shadows of remote objects. Of local files they are the system's own calls.

A shadow is known by its inode, so it does not matter who opened it, or by which name.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from ucpl.remotes.standing import ends

__all__ = [
    "Remote",
    "call_bytes",
    "fetch_all",
    "hint",
    "identity_of",
    "is_waited_for",
    "is_within",
    "look_again",
    "made_in",
    "pread",
    "preadv",
    "rebuilt_of",
    "registry",
    "remote_at",
    "remote_of",
    "want",
]

Range = tuple[int, int]  # first byte, and the one behind the last


class Listing(Protocol):
    """Remote files that were listed together."""

    def look_again(self) -> None:
        """Ask the store what is there by now. Raises: OSError."""
        ...


class Remote(Protocol):
    """A file whose bytes are elsewhere."""

    def read(self, fd: int, views: Sequence[memoryview], position: int) -> int:
        """As os.preadv of the shadow `fd`, once the bytes are had. Raises: OSError, UcplError E611."""
        ...

    def hint(self, ranges: Iterable[Range], *, payload: bool) -> None:
        """These will be read: have them at once, several at a time. Raises: OSError, UcplError E611."""
        ...

    def want(self, ranges: Iterable[Range]) -> None:
        """All of these bytes will be read, sooner or later, and no others: neighbours may come with one another."""
        ...

    def identity(self) -> tuple[int, int, int, int]:
        """Size, time (ns), and what stands for inode and device: the object's tag and its URL. Raises: OSError, where gone."""
        ...

    @property
    def listed_by(self) -> Listing:
        """What was listed together with it."""
        ...


_REMOTES: dict[tuple[int, int], Remote] = {}  # device and inode of a shadow -> what it stands for


def registry() -> Callable[[os.stat_result, Remote], None]:
    """What lets inodes stand for remote files, for as long as their folder stands for what it does."""
    mine: list[tuple[tuple[int, int], Remote]] = []

    def register(status: os.stat_result, remote: Remote) -> None:
        at = status.st_dev, status.st_ino
        mine.append((at, remote))
        _REMOTES[at] = remote

    def forget() -> None:
        for at, remote in mine:
            if _REMOTES.get(at) is remote:  # else its file is gone, and another one has its place
                del _REMOTES[at]

    ends().callback(forget)
    return register


def remote_of(status: os.stat_result) -> Remote | None:
    return _REMOTES.get((status.st_dev, status.st_ino))


def remote_at(fd: int) -> Remote | None:
    """What an open file is a shadow of. Raises: OSError."""
    return remote_of(os.fstat(fd)) if _REMOTES else None


def pread(fd: int, size: int, position: int) -> bytes:
    """Bytes of a file; fewer where it ends. Raises: OSError, UcplError E611."""
    remote = remote_at(fd)
    if remote is None:
        return os.pread(fd, size, position)
    room = bytearray(max(0, min(size, os.fstat(fd).st_size - position)))
    return bytes(memoryview(room)[: remote.read(fd, [memoryview(room)], position)]) if room else b""


def preadv(fd: int, views: Sequence[memoryview], position: int) -> int:
    """Bytes that were read into the views, perhaps fewer than they have room for. Raises: OSError, UcplError E611."""
    remote = remote_at(fd)
    return os.preadv(fd, views, position) if remote is None else remote.read(fd, views, position)


def hint(fd: int, ranges: Iterable[Range], *, payload: bool = False) -> None:
    """What will be read next, in whatever order. payload: it may be much. Raises: OSError, UcplError E611."""
    if (remote := remote_at(fd)) is not None:
        remote.hint(ranges, payload=payload)


def want(fd: int, ranges: Iterable[Range]) -> None:
    """All that will be read of a file. Raises: OSError."""
    if (remote := remote_at(fd)) is not None:
        remote.want(ranges)


def fetch_all(fd: int) -> None:
    """Have all of a file here, for whoever reads it by other means. Raises: OSError, UcplError E611."""
    if (remote := remote_at(fd)) is not None:
        remote.hint([(0, os.fstat(fd).st_size)], payload=False)


def identity_of(status: os.stat_result) -> tuple[int, int, int, int] | None:
    """What tells a remote file from any other; None: it is a local one. Raises: OSError, where it is gone."""
    remote = remote_of(status) if _REMOTES else None
    return None if remote is None else remote.identity()


def call_bytes(status: os.stat_result) -> int:
    """How many bytes could be read in the time of one more call; 0: as of a local file."""
    return getattr(remote_of(status), "call_bytes", 0) if _REMOTES else 0


def is_waited_for(status: os.stat_result) -> bool:
    """Whether a file's bytes come from afar, where several are had in the time of one."""
    remote = remote_of(status) if _REMOTES else None
    return remote is not None and not getattr(remote, "call_bytes", 0)


def made_in(fd: int) -> Sequence[Range]:
    """Which bytes of a file are made as they are read, ascending: whatever states a CRC of them does not state theirs."""
    remote = remote_at(fd)
    return getattr(remote, "made", ()) if remote is not None else ()


def is_within(low: int, high: int, ranges: Sequence[Range]) -> bool:
    """Whether [low, high), of a byte or more, lies in one of the ranges, which ascend."""
    at = bisect_right(ranges, (low, 1 << 62)) - 1
    return at >= 0 and low < high <= ranges[at][1]


def rebuilt_of(statuses: Iterable[os.stat_result]) -> int:
    """How many bytes were made of others so far, of all that was listed together with these."""
    found = (remote_of(status) for status in statuses)
    listings = {id(one.listed_by): one.listed_by for one in found if one is not None}
    return sum(getattr(listing, "rebuilt", 0) for listing in listings.values())


def look_again(statuses: Iterable[os.stat_result]) -> None:
    """Ask what is there by now, of all remote files among these. Raises: OSError."""
    found = (remote_of(status) for status in statuses)
    for listing in {id(one.listed_by): one.listed_by for one in found if one is not None}.values():
        listing.look_again()
