"""Source files: opened for reading by position, refused once they change.

A file is identified, so that another one in its place is noticed. Not here: the choice of bytes (reading).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from ucpl.errors import Label, fail
from ucpl.files.header_watch import Identity
from ucpl.runtime.descriptors import Descriptors
from ucpl.runtime.disk import Disk, disk
from ucpl.runtime.failpoints import failpoint
from ucpl.storage.reading import call_bytes, hint, identity_of, look_again, rebuilt_bytes, want

__all__ = ["SourceFiles"]


class SourceFiles:
    """Files by their name relative to `root`.

    Each is opened when it is first read.
    """

    def __init__(self, root: Path, files: Iterable[str], opened: Mapping[str, Identity] | None = None) -> None:
        """opened: paths of files whose headers were read, with their state then.

        Raises: UcplError E610, E611.
        """
        self.root = root
        self.files = tuple(dict.fromkeys(files))
        self.index = {file: i for i, file in enumerate(self.files)}
        self.identity: dict[str, Identity] = {}
        self._open = Descriptors()
        self.is_remote = False  # any of them
        self.call_bytes = (
            0  # bytes that could be read in the time of one more call, where that is not as of local files
        )
        for file in self.files:
            now = self._now(file)
            self.identity[file] = (opened or {}).get(str(self.path(file)), now)
            if now != self.identity[file]:
                self.changed(file, now)

    def want(self, ranges: Mapping[str, Sequence[tuple[int, int]]]) -> None:
        """Announce all bytes that will be read of remote files.

        Raises: UcplError E610, E611.
        """
        for file, some in ranges.items() if self.is_remote else ():
            want(self.descriptor(self.index[file]), some)

    def fetch(self, ranges: Mapping[str, Sequence[tuple[int, int]]]) -> None:
        """Fetch these bytes of remote files, several requests at a time.

        Raises: UcplError E610, E611, E685.
        """
        for file, some in ranges.items() if self.is_remote else ():
            index = self.index[file]
            self._hint(index, self.descriptor(index), list(some))

    def path(self, file: str) -> Path:
        return self.root / file if file else self.root

    def _status(self, file: str) -> os.stat_result:
        try:
            return os.stat(self.path(file))
        except OSError as error:
            self.lost(file, error)

    def _now(self, file: str) -> Identity:
        status = self._status(file)
        try:
            self.is_remote |= identity_of(status) is not None
            self.call_bytes = max(self.call_bytes, call_bytes(status))
            return Identity.of(status)
        except OSError as error:  # the file is gone at its place
            self.lost(file, error)

    def lost(self, file: str, error: OSError, at: int | None = None) -> NoReturn:
        where = f" at byte {at}" if at is not None else ""
        fail("E610", f"{file} cannot be read{where}: {error.strerror or error}", Label(str(self.path(file))))

    def changed(self, file: str, now: Identity) -> NoReturn:
        was = self.identity[file]
        what = ", ".join(
            f"{name} {old}, now {new}"
            for name, old, new in (
                ("size", was.size, now.size),
                ("time", was.mtime_ns, now.mtime_ns),
                ("inode", was.inode, now.inode),
                ("device", was.device, now.device),
            )
            if old != new
        )
        fail("E611", f"{file} changed while it was read: {what}", Label(str(self.path(file))))

    def descriptor(self, index: int) -> int:
        """A descriptor of this thread. Raises: UcplError E610, E611."""
        fd = self._open.get(index)
        if fd is not None:
            return fd
        file = self.files[index]
        try:
            fd = disk().open(self.path(file), os.O_RDONLY)
            now = Identity.of(os.fstat(fd))
        except OSError as error:
            self.lost(file, error)
        if now != self.identity[file]:
            disk().close(fd)
            self.changed(file, now)
        return self._open.keep(index, fd)

    def read_into(self, index: int, position: int, views: list[memoryview], size: int) -> None:
        """Fill `views` from one position of a file.

        They have `size` bytes together and are at most IOV_MAX. Raises: UcplError E610 on an error or a file that ends
        early, E611 if it is another file by now.
        """
        fd = self.descriptor(index)
        done = 0
        while True:
            try:
                failpoint("source-read")
                done += (got := disk().read(fd, views, position + done))
            except OSError as error:
                self.lost(self.files[index], error, position + done)
            if done == size:
                return
            if got == 0:
                file = self.files[index]
                fail(
                    "E610",
                    f"{file} ends at byte {position + done}, within the range to read; it had {self.identity[file].size} bytes",
                    Label(str(self.path(file))),
                )
            views = _after(views, got)

    def read_runs(self, index: int, position: int, step: int, views: Sequence[memoryview]) -> None:
        """Fill each view from its own position, `step` bytes after the last.

        Raises: UcplError E610, E611.
        """
        fd, there = self.descriptor(index), disk()
        read = there.read if self.is_remote or type(there) is not Disk else os.preadv  # in as few steps as possible
        if self.is_remote:
            self._hint(index, fd, [(position + i * step, position + i * step + len(v)) for i, v in enumerate(views)])
        for view in views:
            try:
                failpoint("source-read")
                got = read(fd, (view,), position)
            except OSError as error:
                self.lost(self.files[index], error, position)
            if got != len(view):
                self.read_into(index, position + got, [view[got:]], len(view) - got)
            position += step

    def _hint(self, index: int, fd: int, ranges: list[tuple[int, int]]) -> None:
        try:
            hint(fd, ranges, payload=True)
        except OSError as error:
            self.lost(self.files[index], error, ranges[0][0])

    @property
    def bytes_rebuilt(self) -> int:
        """Bytes of vault files that were computed from others since opening."""
        return rebuilt_bytes(map(self._status, self.files)) if self.is_remote else 0

    def check_unchanged(self) -> None:
        """Check that no file is gone or another one by now.

        Raises: UcplError E610, E611.
        """
        if self.is_remote:
            try:
                look_again(map(self._status, self.files))
            except OSError as error:
                self.lost(self.files[0], error)
        for file in self.files:
            now = self._now(file)
            if now != self.identity[file]:
                self.changed(file, now)

    def close(self) -> None:
        """Close all descriptors.

        No other thread may be reading. The bytes that were read are valid even if closing fails.
        """
        self._open.close(quietly=True)


def _after(views: list[memoryview], done: int) -> list[memoryview]:
    """The rest of `views` after the first `done` bytes."""
    rest = []
    for view in views:
        if done >= len(view):
            done -= len(view)
        else:
            rest.append(view[done:] if done else view)
            done = 0
    return rest
