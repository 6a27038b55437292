"""Work folders that are valid only while their process runs.

The process holds a lock on its folder. A folder without a lock is removed.
"""

from __future__ import annotations

import fcntl
import os
import platform
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from glob import escape
from pathlib import Path
from secrets import token_hex

from ucpl.storage.vaults.lock_descriptors import open_unshared

__all__ = ["DRILLS", "WORKS", "remove_stale", "work_dir", "open_work_dir", "work_dirs_of"]

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
