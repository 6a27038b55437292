"""Where a target grows and how it appears: a hidden folder beside it, a lock, and one rename at the end.

.NAME.ucpl-lock       held by the living process that writes NAME
.NAME.ucpl-work/      journal, and tree/: what becomes NAME
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from pathlib import Path
from types import TracebackType

from attrs import frozen

from ucpl.errors import Label, fail
from ucpl.runtime import linux
from ucpl.runtime.failpoints import failpoint
from ucpl.runtime.journal import Journal
from ucpl.runtime.targets import cannot_write

__all__ = ["Lock", "Workplace", "sync_folder", "sync_folders"]


@frozen
class Workplace:
    """The hidden folder of a target."""

    target: Path

    @property
    def folder(self) -> Path:
        return self.target.with_name(f".{self.target.name}.ucpl-work")

    @property
    def tree(self) -> Path:
        return self.folder / "tree"

    @property
    def journal(self) -> Path:
        return self.folder / "journal"

    @property
    def aside(self) -> Path:
        return self.folder / "old"  # the replaced target, where names cannot be exchanged

    def restore(self) -> None:
        """Put back a target that was moved aside and not yet replaced. Raises: UcplError E503."""
        if not os.path.lexists(self.aside) or os.path.lexists(self.target):
            return
        try:
            os.rename(self.aside, self.target)
            sync_folder(self.target.parent)
        except OSError as error:
            cannot_write(self.target, error, resumable=False)

    def clear(self) -> None:
        """Remove it; what was moved aside goes back first. Raises: UcplError E503."""
        self.restore()
        try:
            if self.folder.is_symlink():
                self.folder.unlink()
            elif self.folder.exists():
                shutil.rmtree(self.folder)
        except OSError as error:
            cannot_write(self.folder, error, resumable=False)

    def publish(self, thing: Path, journal: Journal, force: bool) -> None:
        """Rename `thing` (the tree, or the only file in it) to the target, in one step where the file system can.

        Raises: UcplError E500, E503.
        """
        try:
            status = os.stat(thing)
            journal.publishing(status.st_ino, status.st_dev)
            failpoint("publish-before")
            if not force or not os.path.lexists(self.target):
                linux.rename_new(thing, self.target)
            elif not linux.exchange(thing, self.target):
                os.rename(self.target, self.aside)
                failpoint("publish-between")
                linux.rename_new(thing, self.target)
            failpoint("publish-after")
            sync_folder(self.target.parent)
        except FileExistsError:
            fail("E500", f"{self.target} exists: it was made while this run was under way", Label(str(self.target)))
        except OSError as error:
            cannot_write(self.target, error)


class Lock:
    """Held while a target is written. The file goes when its holder ends well; a killed holder's lock is free at once."""

    def __init__(self, target: Path) -> None:
        self.path = target.with_name(f".{target.name}.ucpl-lock")
        self._target = target
        self._fd = -1

    def __enter__(self) -> Lock:
        while True:
            try:
                fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
            except OSError as error:
                cannot_write(self.path, error, resumable=False)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                os.close(fd)
                if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                    fail("E502", f"another ucpl is writing {self._target}", Label(str(self.path), "this lock is held"))
                cannot_write(self.path, error, resumable=False)
            # Its holder may have removed the file between our open and our lock.
            try:
                same = os.path.samestat(os.fstat(fd), os.stat(self.path))
            except FileNotFoundError:
                same = False
            if same:
                self._fd = fd
                return self
            os.close(fd)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            os.unlink(self.path)
        except OSError:
            pass
        os.close(self._fd)


def sync_folder(path: Path) -> None:
    """Make names in a folder durable. Raises: OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def sync_folders(top: Path) -> None:
    """All folders below and including `top`, the deepest first. Raises: OSError."""
    for folder, _, _ in os.walk(top, topdown=False):
        sync_folder(Path(folder))
