"""Blocked paths, and work folders of running or dead processes."""

from __future__ import annotations

import errno
import fcntl
import os
import platform
import re
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from glob import escape
from pathlib import Path
from secrets import token_hex
from typing import NoReturn

from ucpl.errors import Label, fail
from ucpl.storage.vaults.lock_descriptors import open_unshared

__all__ = [
    "NO_ROOM", "report_not_written", "why_not_made", "DRILLS", "WORKS", "remove_stale", "work_dir", "open_work_dir",
    "work_dirs_of",
]  # fmt: skip

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM)
_KINDS = {
    stat.S_IFDIR: "folder", stat.S_IFREG: "file", stat.S_IFLNK: "link", stat.S_IFIFO: "pipe", stat.S_IFSOCK: "socket",
}  # fmt: skip


def why_not_made(folder: Path, error: OSError) -> str:
    """The reason why a folder could not be created or written.

    It names the object that is in the place of a folder.
    """
    for one in (folder, *folder.parents):
        try:
            if not one.is_dir() and (one.is_symlink() or one.exists()):
                return f"{one} is not a folder"
        except OSError:  # unreadable
            continue
    return error.strerror or str(error)


def report_not_written(folder: Path, error: OSError) -> NoReturn:
    """Report that a domain's folder or a file could not be written.

    Raises: UcplError E695, always.
    """
    path = Path(os.fsdecode(error.filename2 or error.filename or folder))  # of two, the one that the other was to be
    why, remedy = error.strerror or str(error), "remove the cause, and run the same command again"
    if (kind := _kind(path, folder)) not in ("", "folder" if path == folder else "file"):
        why, remedy = f"a {kind} is in its place", f"move {path} away, and run the same command again"
    elif error.errno in NO_ROOM:
        remedy = ""
    elif isinstance(error, PermissionError):
        remedy = "only the owner of a vault has access to it: run the command as this user"
    fail("E695", f"{path} cannot be written: {why}", Label(str(path)), remedy=remedy)


def _kind(path: Path, folder: Path) -> str:
    """The kind of the object at this path.

    Empty if there is none or it cannot be read.
    """
    try:
        return _KINDS.get(stat.S_IFMT(os.stat(path, follow_symlinks=path == folder).st_mode), "device")
    except OSError:
        return ""


# A generation during its write to a disk. The name has this host in it: on a shared disk the locks of another host may
# not be visible.
_HOST = re.sub("[^A-Za-z0-9-]", "-", platform.node()) or "host"
WORKS = f".*.{_HOST}.*.ucpl-vault"
DRILLS = "ucpl-drill-*"


def work_dir(target: Path) -> Path:
    """A unique name for the work folder of `target`."""
    return target.with_name(f".{target.name}.{_HOST}.{token_hex(4)}.ucpl-vault")


def work_dirs_of(target: Path) -> str:
    """The pattern of such names."""
    return f".{escape(target.name)}.{_HOST}.*.ucpl-vault"


@contextmanager
def open_work_dir(folder: Path) -> Iterator[None]:
    """Raises: OSError."""
    with open_unshared(folder, os.O_RDONLY | os.O_DIRECTORY) as fd:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield


def remove_stale(folder: Path, pattern: str) -> list[Path]:
    """Remove the folders of processes that ended; return them."""
    found = []
    for path in sorted(folder.glob(pattern)):
        try:
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:  # not a folder, or removed
            continue
        try:
            if os.fstat(fd).st_uid != os.geteuid():
                continue
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path)
            found.append(path)
        except OSError:  # somebody works there
            pass
        finally:
            os.close(fd)
    return found
