"""Publishing: a hidden folder, a lock, and one rename.

.NAME.ucpl-lock       held by the living process that writes NAME .NAME.ucpl-work/      journal (of rank 3: journal-3),
and tree/: the later NAME
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from ucpl.errors import Label, fail
from ucpl.files.header_watch import reading
from ucpl.owned import is_strangers
from ucpl.records import frozen
from ucpl.runtime.disk import LACKING, check_own, disk, sync_folder
from ucpl.runtime.failpoints import failpoint
from ucpl.runtime.journal import Journal
from ucpl.runtime.targets import cannot_write
from ucpl.storage.reading import identity_of

__all__ = ["Lock", "Workplace", "limit_modes"]


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

    def journal_of(self, rank: int) -> Path:
        """Path of a rank's journal; the first rank's is the run's."""
        return self.journal.with_name(f"journal-{rank}") if rank else self.journal

    @property
    def others(self) -> tuple[Path, ...]:
        """Journals of other ranks, of this run or those it resumes.

        Raises: OSError.
        """
        return tuple(sorted(self.folder.glob("journal-*[0-9]")))

    @property
    def aside(self) -> Path:
        return self.folder / "old"  # the replaced target, where names cannot be exchanged

    @property
    def parting(self) -> Path:
        return self.folder / "old-part"  # files that are already moved, if they are moved one by one

    def restore(self) -> None:
        """Put back a target that was moved aside, if nothing replaced it.

        Raises: UcplError E503.
        """
        if not self._is_own():
            return
        is_part = os.path.lexists(self.parting)
        if not is_part and (not os.path.lexists(self.aside) or os.path.lexists(self.target)):
            return
        try:
            if is_part:
                _move_apart(self.parting, self.target)
            else:
                disk().rename(self.aside, self.target)
            sync_folder(self.target.parent)
        except OSError as error:
            cannot_write(self.target, error, resumable=False)

    def _is_own(self) -> bool:
        """True if the folder exists and belongs to this user.

        In a folder that everybody can write, others can create it first.
        """
        try:
            check_own(self.folder)
        except OSError:
            return False
        return True

    def clear(self) -> None:
        """Remove it; files that were moved aside go back first.

        Raises: UcplError E503.
        """
        self.restore()
        try:
            if self.folder.is_dir() and not self.folder.is_symlink():
                disk().remove_tree(self.folder)
            elif os.path.lexists(self.folder):  # a link, or a FIFO, which would wait to be opened
                disk().remove(self.folder)
        except OSError as error:
            cannot_write(self.folder, error, resumable=False)

    def publish(self, thing: Path, journal: Journal, force: bool) -> None:
        """Rename `thing` to the target, in one step if possible.

        It is the tree, or the only file in it. Raises: UcplError E500, E503.
        """
        try:
            if force:
                self._like_before(thing)
            journal.publishing(*disk().identity(thing))
            failpoint("publish-before")
            if not force or not os.path.lexists(self.target):
                disk().rename_new(thing, self.target)
            elif not disk().exchange(thing, self.target):
                self._move_aside()
                failpoint("publish-between")
                disk().rename_new(thing, self.target)
            failpoint("publish-after")
            sync_folder(self.target.parent)
        except FileExistsError:
            fail("E500", f"{self.target} exists: it was made while this run was under way", Label(str(self.target)))
        except OSError as error:
            cannot_write(self.target, error)

    def _move_aside(self) -> None:
        """Raises: OSError."""
        try:
            disk().rename(self.target, self.aside)
        except OSError as error:
            if error.errno != errno.EXDEV or self.target.is_symlink() or not self.target.is_dir():
                raise
            _move_apart(self.target, self.parting)
            disk().rename(self.parting, self.aside)

    def _like_before(self, thing: Path) -> None:
        """Give it the owner and mode of its predecessor.

        A predecessor that a stranger made is ignored. Raises: OSError.
        """
        try:
            before = os.lstat(self.target)
        except FileNotFoundError:
            return
        if stat.S_ISLNK(before.st_mode) or is_strangers(self.target):
            return
        mode = stat.S_IMODE(before.st_mode)
        if stat.S_ISDIR(before.st_mode) != thing.is_dir():
            mode = mode & 0o666 if not thing.is_dir() else mode | (mode & 0o444) >> 2
        with suppress(PermissionError):  # it is somebody else's, or a file system without owners and modes
            if (before.st_uid, before.st_gid) != (os.geteuid(), os.getegid()):
                os.chown(thing, before.st_uid, before.st_gid)
        with suppress(PermissionError):
            os.chmod(thing, mode)


class Lock:
    """Lock that is held while a target is written.

    Its file is removed when the holder ends normally; the lock of a killed holder is free at once. `left` is a remark
    if the file could not be removed: it blocks nobody. `lacking` is a remark if the file system has no locks.
    """

    def __init__(self, target: Path) -> None:
        self.left = self.lacking = ""
        self.path = target.with_name(f".{target.name}.ucpl-lock")
        self._target = target
        self._fd = -1

    def __enter__(self) -> Lock:
        """Raises: UcplError E502, E503."""
        try:
            while not self._is_had():
                """Its holder removed the file between our open and our lock."""
        except OSError as error:
            cannot_write(self.path, error, resumable=False)
        return self

    def _is_had(self) -> bool:
        fd = disk().open(self.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)
        try:
            self._take(fd)
            if not _is_at(fd, self.path):
                return False
            self._fd, fd = fd, -1
            return True
        finally:
            if fd >= 0:
                disk().close(fd)

    def _take(self, fd: int) -> None:
        """Lock by the open file, else by the process, or not.

        A missing lock is reported.
        """
        for lock in (disk().lock_file, disk().lock_range):
            try:
                return lock(fd)
            except OSError as error:
                if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                    owner = os.fstat(fd).st_uid
                    whose = (
                        "this lock is held" if owner == os.geteuid() else f"this lock is held, and user {owner} made it"
                    )
                    fail("E502", f"another ucpl is writing {self._target}", Label(str(self.path), whose))
                if error.errno not in LACKING:
                    raise
        self.lacking = f"no lock is to be had next to {self._target}: a second run is not kept away from it"

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            disk().remove(self.path)
        except OSError as error:
            self.left = f"{self.path} could not be removed ({error.strerror or error}); it locks nothing"
        with suppress(OSError):
            disk().close(self._fd)


def _is_at(fd: int, path: Path) -> bool:
    """True if a path still leads to an open file."""
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path))
    except FileNotFoundError:
        return False


# --- Folders that no rename moves: lower layers of overlayfs, as in images of containers ----------------------------
# Its files are moved one by one into folders that are made as theirs are.


def _move_apart(source: Path, target: Path) -> None:
    """Move all files of a folder into another, and remove the first.

    The other may have some of them already. Raises: OSError.
    """
    before = os.lstat(source)
    disk().make_folder(target)
    with suppress(PermissionError):
        os.chown(target, before.st_uid, before.st_gid)
        os.chmod(target, stat.S_IMODE(before.st_mode))
    with os.scandir(source) as entries:
        held = sorted((entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries)
    for name, is_folder in held:
        if is_folder:
            _move_apart(source / name, target / name)
        else:
            disk().rename(source / name, target / name)
    sync_folder(target)
    disk().remove_folder(source)


# --- Permissions of a target's files --------------------------------------------------------------------------------

_OTHERS = stat.S_IRWXG | stat.S_IRWXO


def limit_modes(top: Path, names: Iterable[str], root: Path, sources: Iterable[str]) -> None:
    """Take permissions of other users from files below `top`.

    A file of the same name below `root` limits a copy of it; the strictest of all source files limits the others. Files that
    stand for objects in a store have no modes. Raises: OSError of the target, UcplError E400 of a source.
    """
    strictest = _OTHERS
    for name in sources:
        known = _allowed(root / name if name else root)
        strictest &= _OTHERS if known is None else known
    for name in names:
        known = _allowed(root / name) if name else None
        allowed = strictest if known is None else known
        path = top / name if name else top
        mode = stat.S_IMODE(path.stat().st_mode)
        if mode & _OTHERS & ~allowed:
            with suppress(PermissionError):  # a file system without modes
                os.chmod(path, mode & (allowed | ~_OTHERS))


def _allowed(path: Path) -> int | None:
    """Other users' permissions of a file, or None without one.

    Raises: UcplError E400.
    """
    with reading(path):
        try:
            status = os.stat(path)
        except (FileNotFoundError, NotADirectoryError):
            return None
    if not stat.S_ISREG(status.st_mode):
        return None
    return _OTHERS if identity_of(status) is not None else stat.S_IMODE(status.st_mode) & _OTHERS
