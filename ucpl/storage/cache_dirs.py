"""Temporary folders for fetched and staged files, and their lifetimes.

It is removed when the process ends. The folder of a killed process is removed by the next one. UCPL_REMOTE_DIR sets the
parent folder; the default is the folder for temporary files.
"""

from __future__ import annotations

import atexit
import fcntl
import os
import shutil
import tempfile
import time
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from contextvars import ContextVar
from functools import cache
from pathlib import Path

__all__ = ["fresh", "room", "staging", "Lifetime", "separate", "current_scope", "scoped", "owned_scope"]

_PREFIX = "ucpl-remote-"
HOUR = 3600.0  # seconds
CACHE_MAX = 8 << 30  # bytes of sources that are kept at most
STAGED_MAX = 4 << 30  # bytes of a target that grow here at once, but for a file that is larger


@cache
def _top(process: int) -> Path:
    """One for each process: a fork has its own."""
    above = Path(os.environ.get("UCPL_REMOTE_DIR") or tempfile.gettempdir()).resolve()
    _sweep(above)
    new = Path(tempfile.mkdtemp(prefix=f".{_PREFIX}", dir=above))
    lock = os.open(new / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)  # open until this process ends
    with suppress(OSError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    # It is locked before it gets its name: otherwise another process would remove it as a dead one's.
    made = above / new.name.removeprefix(".")
    os.rename(new, made)

    def clear() -> None:
        if os.getpid() == process:
            shutil.rmtree(made, ignore_errors=True)

    atexit.register(clear)
    return made


def _sweep(above: Path) -> None:
    """Remove our folders that no running process holds."""
    for old in (*above.glob(f"{_PREFIX}*"), *_left(above)):
        with suppress(OSError):
            if old.lstat().st_uid != os.geteuid() or old.is_symlink():
                continue
            lock = os.open(old / "lock", os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(old, ignore_errors=True)
            finally:
                os.close(lock)


def _left(above: Path) -> list[Path]:
    """Folders of killed processes that have no final name yet.

    They are older than an hour, which is longer than this state lasts.
    """
    with suppress(OSError):
        now = time.time()
        return [new for new in above.glob(f".{_PREFIX}*") if now - new.lstat().st_mtime > HOUR]
    return []


def fresh() -> Path:
    """A new empty folder, removed together with its owner. Raises: OSError."""
    made = tempfile.mkdtemp(dir=_top(os.getpid()))
    current_scope().callback(shutil.rmtree, made, ignore_errors=True)
    return Path(made)


@cache
def _limit(process: int, name: str, most: int) -> int:
    value = os.environ.get(name, "")
    if value.isdigit():
        return int(value)
    free = os.statvfs(_top(process))
    return min(most, free.f_bavail * free.f_frsize // 2)


def room() -> int:
    """The maximum number of fetched bytes that this process keeps.

    UCPL_REMOTE_CACHE, else 8 GiB and at most half of the free space.
    """
    return _limit(os.getpid(), "UCPL_REMOTE_CACHE", CACHE_MAX)


def staging() -> int:
    """The maximum number of target bytes that are staged at once.

    UCPL_REMOTE_STAGING, else 4 GiB and at most half of the free space.
    """
    return _limit(os.getpid(), "UCPL_REMOTE_STAGING", STAGED_MAX)


_process = ExitStack()  # never closed: the rest is removed with the folder of the process
_now: ContextVar[ExitStack] = ContextVar("ends", default=_process)


def current_scope() -> ExitStack:
    """The stack of callbacks for folders that are created from now on."""
    return _now.get()


class Lifetime:
    """Folders that were created in `separate`.

    They are released when this is closed or collected.
    """

    def __init__(self, mine: ExitStack) -> None:
        self._end = weakref.finalize(self, _end, mine, os.getpid())
        self._end.atexit = False

    def close(self) -> None:
        self._end()


@contextmanager
def scoped() -> Iterator[None]:
    """Release at the end all that is created in the block.

    As a decorator: at the end of each call.
    """
    with separate():
        yield


@contextmanager
def separate() -> Iterator[Lifetime]:
    """Bind all that is created in the block to the result.

    If the block raises, it is released at once.
    """
    stack = ExitStack()
    mine = Lifetime(stack)
    before = _now.set(stack)
    try:
        yield mine
    except BaseException:
        mine.close()
        raise
    finally:
        _now.reset(before)


@contextmanager
def owned_scope() -> Iterator[Lifetime | None]:
    """`separate` for results of a call that the caller keeps.

    None: an outer call releases them.
    """
    if _now.get() is not _process:
        yield None
        return
    with separate() as mine:
        yield mine


def _end(mine: ExitStack, process: int) -> None:
    if os.getpid() == process:  # a fork leaves the folders to its parent
        mine.close()
