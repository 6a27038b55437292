"""The one seam between the runtime and the disk.

Every call that opens, reads, writes, syncs or renames goes through it. A test puts a recorder in its place, which logs
the order of calls, cuts reads and writes short, and replays the state after a crash. Loops over short reads and writes
are here, too.

Not here: the list of files (sources, targets), and the safety of renames (publish).
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import stat
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from ucpl.runtime import linux
from ucpl.storage.reading import preadv

__all__ = [
    "LACKING",
    "Disk",
    "at_once",
    "check_own",
    "disk",
    "forget",
    "make_file",
    "make_folders",
    "read_regular",
    "read_upto",
    "sync_data",
    "sync_folder",
    "sync_folders",
    "use_disk",
    "write_all",
]


T = TypeVar("T")
_TOGETHER = 8  # threads that wait for the disk

# A file system says so of a call that it does not know, in one of these ways.
LACKING = (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.EBADF, errno.ENOLCK, errno.ESPIPE)


class Disk:
    """System calls as they are. Each raises OSError."""

    def open(self, path: Path, flags: int, mode: int = 0o666) -> int:
        return os.open(path, flags | os.O_CLOEXEC, mode)

    def close(self, fd: int) -> None:
        os.close(fd)

    def read(self, fd: int, views: Sequence[memoryview], position: int) -> int:
        """Read into the views, one after another.

        Returns the bytes that were read, perhaps fewer than the views have room for.
        """
        return preadv(fd, views, position)

    def write(self, fd: int, view: memoryview, position: int | None) -> int:
        """Write; returns the bytes written, perhaps fewer than there are.

        Without a position: at the end of a file opened to append.
        """
        return os.write(fd, view) if position is None else os.pwrite(fd, view, position)

    def start_writing(self, fd: int, position: int, size: int) -> None:
        """Start writing bytes to the disk; a later sync waits for them."""
        linux.start_writing(fd, position, size)

    def sync(self, fd: int, *, data_only: bool = False) -> None:
        if data_only:
            os.fdatasync(fd)
        else:
            os.fsync(fd)

    def forget(self, fd: int, position: int, size: int) -> None:
        """Drop pages of a file from the page cache, if possible.

        No size: up to the end.
        """
        os.posix_fadvise(fd, position, size, os.POSIX_FADV_DONTNEED)

    def lock_file(self, fd: int) -> None:
        """Lock a file for this open file until it is closed.

        Raises: BlockingIOError, PermissionError if another has it.
        """
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def lock_range(self, fd: int) -> None:
        """The same for this process, as network file systems know it."""
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def resize(self, fd: int, size: int) -> None:
        os.ftruncate(fd, size)

    def allocate(self, fd: int, size: int) -> None:
        linux.allocate(fd, size)

    def clone(self, source: tuple[int, int], target: tuple[int, int], size: int) -> None:
        """Share a range of one file with another.

        Each: (descriptor, position), complete blocks.
        """
        linux.clone_range(source, target, size)

    def rename(self, source: Path, target: Path) -> None:
        os.rename(source, target)

    def rename_new(self, source: Path, target: Path) -> None:
        """To a name that must be free. Raises: FileExistsError, too."""
        linux.rename_new(source, target)

    def exchange(self, one: Path, other: Path) -> bool:
        """Swap two names at once; False where the file system cannot."""
        return linux.exchange(one, other)

    def make_folder(self, path: Path, *, fresh: bool = False) -> None:
        """Make one folder, which may exist unless it must be fresh.

        Raises: FileExistsError, too.
        """
        path.mkdir(exist_ok=not fresh)

    def remove_folder(self, path: Path) -> None:
        """One that is empty."""
        os.rmdir(path)

    def remove(self, path: Path) -> None:
        os.unlink(path)

    def remove_tree(self, path: Path) -> None:
        shutil.rmtree(path)

    def identity(self, path: Path) -> tuple[int, int]:
        """Inode and device."""
        status = os.stat(path)
        return status.st_ino, status.st_dev


_current = Disk()


def disk() -> Disk:
    return _current


def use_disk(other: Disk) -> Disk:
    """Replace the disk, for tests; returns the one before."""
    global _current
    before, _current = _current, other
    return before


def write_all(fd: int, data: bytes | memoryview, position: int | None) -> None:
    """Raises: OSError."""
    view, done = memoryview(data), 0
    while done < len(view):
        done += _current.write(fd, view[done:], None if position is None else position + done)


def read_upto(fd: int, view: memoryview, position: int) -> int:
    """Fill a buffer, or a part of it if the file ends.

    Raises: OSError.
    """
    done = 0
    while done < len(view):
        got = _current.read(fd, [view[done:]], position + done)
        if not got:
            break
        done += got
    return done


def read_regular(path: Path, most: int) -> bytes:
    """All bytes of a regular file of at most `most` bytes.

    For files that a run left. A FIFO would be waited for, and a link may lead anywhere. Raises: OSError, ValueError if
    it has more bytes.
    """
    fd = _current.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
    try:
        state = os.fstat(fd)
        if not stat.S_ISREG(state.st_mode):
            raise OSError(errno.EINVAL, "it is no regular file")
        if state.st_size > most:
            raise ValueError(f"it has {state.st_size} bytes")
        made = bytearray(state.st_size)
        return bytes(memoryview(made)[: read_upto(fd, memoryview(made), 0)])
    finally:
        _current.close(fd)


def make_folders(top: Path, below: Path) -> None:
    """Make the folder `below`, and all between it and `top`, which exists.

    Raises: OSError, also if one is a link.
    """
    missing = [below, *below.parents]
    for folder in reversed(missing[: missing.index(top)]):
        _current.make_folder(folder)
        if not stat.S_ISDIR(os.lstat(folder).st_mode):
            raise OSError(errno.ENOTDIR, "it is a link, or no folder", str(folder))


def check_own(folder: Path) -> None:
    """Close a folder of ours to other users.

    They could read it or put a link where we write. Raises: OSError.
    """
    state = os.lstat(folder)
    if not stat.S_ISDIR(state.st_mode):
        raise OSError(errno.ENOTDIR, "it is a link, or no folder", str(folder))
    if state.st_uid != os.geteuid():
        raise OSError(errno.EPERM, "it belongs to another user", str(folder))
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        state = os.fstat(fd)
        if state.st_uid != os.geteuid():
            raise OSError(errno.EPERM, "it belongs to another user", str(folder))
        with suppress(PermissionError):  # a file system without modes
            os.fchmod(fd, 0o700 | state.st_mode & stat.S_ISGID)  # files below keep the group of a shared folder
    finally:
        os.close(fd)


def make_file(path: Path, data: bytes) -> None:
    """Make a durable file of this content.

    Its name is durable once its folder is synced. Raises: OSError, also if a FIFO has its name: nobody waits for its
    reader.
    """
    fd = _current.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        write_all(fd, data, 0)
        _current.sync(fd)
    finally:
        _current.close(fd)


def forget(fd: int, position: int, size: int) -> bool:
    """Drop pages, where that can be asked for. Raises: OSError."""
    try:
        _current.forget(fd, position, size)
    except OSError as error:
        if error.errno not in LACKING:
            raise
        return False
    return True


def sync_data(fd: int) -> None:
    """Make bytes and size of a file durable.

    If the file system does not know the difference, all of the file is synced. Raises: OSError.
    """
    try:
        _current.sync(fd, data_only=True)
    except OSError as error:
        if error.errno not in LACKING:
            raise
        _current.sync(fd)


def sync_folder(path: Path) -> None:
    """Make names in a folder durable, if folders can be synced.

    On other systems names are durable when they are made. Raises: OSError.
    """
    fd = _current.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        _current.sync(fd)
    except OSError as error:
        if error.errno not in LACKING:
            raise
    finally:
        _current.close(fd)


def sync_folders(top: Path) -> None:
    """Sync all folders below and including `top`, at once.

    Raises: OSError, also if one cannot be listed.
    """
    folders = [folder for folder, _, _ in os.walk(top, topdown=False, onerror=_raised)]
    at_once(lambda folder: sync_folder(Path(folder)), folders)


def at_once(sync: Callable[[T], None], things: Sequence[T]) -> None:
    """Sync things in a few threads.

    A file system makes them durable together: one after another, each waits for the disk. Raises: an error of `sync`.
    """
    count = min(_TOGETHER, len(things))

    def share(first: int) -> None:
        for thing in things[first::count]:
            sync(thing)

    if count < 2:
        return share(0) if count else None
    with ThreadPoolExecutor(count, thread_name_prefix="ucpl") as pool:
        for ended in [pool.submit(share, first) for first in range(count)]:
            ended.result()
    return None


def _raised(error: OSError) -> None:
    raise error
