"""Where a target grows and how it appears: a hidden folder beside it, a lock, and one rename at the end.

.NAME.ucpl-lock       held by the living process that writes NAME
.NAME.ucpl-work/      journal, and tree/: what becomes NAME
"""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path
from types import TracebackType

from ucpl.errors import Label, fail
from ucpl.records import frozen
from ucpl.runtime.disk import disk, sync_folder
from ucpl.runtime.failpoints import failpoint
from ucpl.runtime.journal import Journal
from ucpl.runtime.targets import cannot_write

__all__ = ["Lock", "Workplace"]


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
            disk().rename(self.aside, self.target)
            sync_folder(self.target.parent)
        except OSError as error:
            cannot_write(self.target, error, resumable=False)

    def clear(self) -> None:
        """Remove it; what was moved aside goes back first. Raises: UcplError E503."""
        self.restore()
        try:
            if self.folder.is_symlink():
                disk().remove(self.folder)
            elif self.folder.exists():
                disk().remove_tree(self.folder)
        except OSError as error:
            cannot_write(self.folder, error, resumable=False)

    def publish(self, thing: Path, journal: Journal, force: bool) -> None:
        """Rename `thing` (the tree, or the only file in it) to the target, in one step where the file system can.

        Raises: UcplError E500, E503.
        """
        try:
            journal.publishing(*disk().identity(thing))
            failpoint("publish-before")
            if not force or not os.path.lexists(self.target):
                disk().rename_new(thing, self.target)
            elif not disk().exchange(thing, self.target):
                disk().rename(self.target, self.aside)
                failpoint("publish-between")
                disk().rename_new(thing, self.target)
            failpoint("publish-after")
            sync_folder(self.target.parent)
        except FileExistsError:
            fail("E500", f"{self.target} exists: it was made while this run was under way", Label(str(self.target)))
        except OSError as error:
            cannot_write(self.target, error)


class Lock:
    """Held while a target is written. The file goes when its holder ends well; a killed holder's lock is free at once.

    `left` says so where the file could not be removed: it holds nobody up.
    """

    def __init__(self, target: Path) -> None:
        self.left = ""
        self.path = target.with_name(f".{target.name}.ucpl-lock")
        self._target = target
        self._fd = -1

    def __enter__(self) -> Lock:
        while True:
            try:
                fd = disk().open(self.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)
            except OSError as error:
                cannot_write(self.path, error, resumable=False)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                disk().close(fd)
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
            disk().close(fd)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            disk().remove(self.path)
        except OSError as error:
            self.left = f"{self.path} could not be removed ({error.strerror or error}); it locks nothing"
        disk().close(self._fd)
