"""Folders and files in shared places: opened and created without races.

Descriptors, owner and mode are checked. /dev/shm and /tmp are writable for everybody, so another user may create a name first,
as a folder, a link or a pipe.
"""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress
from pathlib import Path

from ucpl.errors import Label, fail

__all__ = [
    "NotOwned", "demand_owned", "followed", "is_owned", "is_strangers", "make_owned", "open_new", "opened_as_is",
    "opened_folder", "stranger",
]  # fmt: skip

_FOLDER = os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_PASSED = _FOLDER | getattr(os, "O_PATH", os.O_RDONLY)  # a parent may be searchable and not readable
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_LINKS_MAX = 40


class NotOwned(PermissionError):
    """A folder that another user owns or may change."""

    def __init__(self, path: str, why: str) -> None:
        super().__init__(1, why, path)


def opened_folder(path: Path) -> int:
    """Open a folder that only this user and root can change.

    The same holds for all its parents.

    Symbolic links above it are resolved first, and then no component may be one. Raises: OSError; NotOwned.
    """
    path = Path(os.path.abspath(path))
    parts = (Path(os.path.realpath(path.parent)) / path.name).parts
    trusted = {0, os.geteuid(), os.stat("/").st_uid}
    at = os.open(parts[0], _PASSED)
    try:
        for number, part in enumerate(parts[1:], start=1):
            _check_parent(at, str(Path(*parts[:number])), trusted)
            at = _below(at, part, Path(*parts[: number + 1]), is_last=number == len(parts) - 1)
        _check_own(at, str(path))
    except BaseException:
        os.close(at)
        raise
    return at


def opened_as_is(path: Path) -> int:
    """Open a folder without symbolic links in its path.

    Any owner is allowed. Raises: OSError.
    """
    parts = Path(os.path.abspath(path)).parts
    at = os.open(parts[0], _PASSED)
    try:
        for number, part in enumerate(parts[1:], start=1):
            at = _below(at, part, Path(*parts[: number + 1]), is_last=number == len(parts) - 1)
    except BaseException:
        os.close(at)
        raise
    return at


def _below(fd: int, name: str, path: Path, *, is_last: bool) -> int:
    """Open a folder in another one, and close the other.

    Raises: OSError, and the other one stays open.
    """
    try:
        below = os.open(name, _FOLDER | os.O_RDONLY if is_last else _PASSED, dir_fd=fd)
    except OSError as error:
        error.filename = str(path)
        raise
    os.close(fd)
    return below


def _check_parent(fd: int, path: str, trusted: set[int]) -> None:
    """Check that nobody else can replace entries of a parent.

    Its owner can, and writers without the sticky bit. Raises: NotOwned.
    """
    status = os.fstat(fd)
    if status.st_uid not in trusted:
        raise NotOwned(path, f"its owner, user {status.st_uid}, can replace everything below it")
    if status.st_mode & _OTHERS_WRITE and not status.st_mode & stat.S_ISVTX:
        raise NotOwned(path, f"its mode, {stat.S_IMODE(status.st_mode):04o}, lets other users replace its files")


def _check_own(fd: int, path: str) -> None:
    """Raises: NotOwned."""
    status = os.fstat(fd)
    if status.st_uid != os.geteuid():
        raise NotOwned(path, f"it belongs to user {status.st_uid}, and this process is user {os.geteuid()}")
    if status.st_mode & _OTHERS_WRITE:
        raise NotOwned(path, f"its mode, {stat.S_IMODE(status.st_mode):04o}, lets other users write to it")


def is_owned(path: Path) -> bool:
    """Return True if `opened_folder` would open it."""
    try:
        os.close(opened_folder(path))
    except OSError:
        return False
    return True


def demand_owned(path: Path) -> None:
    """Check that no other user may change a folder. Raises: UcplError E686.

    OSError.
    """
    try:
        os.close(opened_folder(path))
    except NotOwned as error:
        where = os.fsdecode(error.filename)
        whose = "" if where == str(path) else f"{where}: "
        fail("E686", f"{path} is not safe from other users: {whose}{error.strerror}", Label(str(path), where=where))


def make_owned(path: Path) -> None:
    """Make a folder of mode 0700, with missing parents.

    An existing one stays. Raises: UcplError E686, OSError.
    """
    missing = [path] if not os.path.lexists(path) else []
    while missing and not os.path.lexists(missing[-1].parent):
        missing.append(missing[-1].parent)
    for one in reversed(missing):
        try:
            os.mkdir(one, 0o700)
        except FileExistsError:  # another process of this job, or another user: see below
            break
    demand_owned(path)


def is_strangers(path: Path) -> bool:
    """Return True if another user's file is in a shared folder.

    It is writable for everybody. Raises: OSError.
    """
    return _is_strangers(os.lstat(path), os.stat(path.parent))


def stranger(path: Path) -> str:
    """State who put a file into a folder of everybody.

    Empty if it is this user or the owner of the folder, or if the file is gone.
    """
    with suppress(OSError):
        status = os.lstat(path)
        if _is_strangers(status, os.stat(path.parent)):
            return f"user {status.st_uid} put it into {path.parent}, and everybody can write there"
    return ""


def _is_strangers(status: os.stat_result, folder: os.stat_result) -> bool:
    return bool(folder.st_mode & stat.S_IWOTH) and status.st_uid not in (os.geteuid(), folder.st_uid)


def followed(path: Path) -> Path:
    """The target of a path, which need not exist.

    As with fs.protected_symlinks, a link of another user in a folder that is writable for everybody is not followed.
    Raises: OSError; NotOwned.
    """
    missing, at, links = list(Path(os.path.abspath(path)).parts[1:]), Path("/"), 0
    while missing:
        here = at / missing.pop(0)
        if here.name == "..":
            at = at.parent
            continue
        try:
            status = os.lstat(here)
        except FileNotFoundError:
            return here.joinpath(*missing)
        if not stat.S_ISLNK(status.st_mode):
            at = here
            continue
        if _is_strangers(status, os.lstat(at)):
            raise NotOwned(str(here), f"user {status.st_uid} put a link there, and everybody can write to {at}")
        if (links := links + 1) > _LINKS_MAX:
            raise OSError(errno.ELOOP, "its links go round", str(path))
        to = Path(os.readlink(here))
        at = Path("/") if to.is_absolute() else at
        missing[:0] = [part for part in to.parts if part != "/"]
    return at


def open_new(path: Path) -> int:
    """Create a file for writing that nobody made before. Raises: OSError."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
