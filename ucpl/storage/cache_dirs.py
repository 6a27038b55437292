"""The temporary folder of this process for fetched and staged files.

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
from contextlib import suppress
from functools import cache
from pathlib import Path

from ucpl.storage.lifetimes import current_scope

__all__ = ["fresh", "room", "staging"]

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
