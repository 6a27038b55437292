"""Objects that block the creation of a folder or file."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import NoReturn

from ucpl.errors import Label, fail

__all__ = ["NO_ROOM", "report_not_written", "why_not_made"]

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
