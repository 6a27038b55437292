"""Folders of work that ends with its process: who works in one holds it, and what nobody holds is removed."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["DRILLS", "WORKS", "sweep", "worked_in"]

WORKS = ".*.ucpl-vault"  # a generation while it is written to a disk
DRILLS = "ucpl-drill-*"


@contextmanager
def worked_in(folder: Path) -> Iterator[None]:
    """Raises: OSError."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def sweep(folder: Path, pattern: str) -> list[Path]:
    """Remove what is left of processes that are gone. Returns which."""
    found = []
    for path in sorted(folder.glob(pattern)):
        try:
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:  # it is no folder, or gone
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path)
            found.append(path)
        except OSError:  # somebody works there, or it is another's
            pass
        finally:
            os.close(fd)
    return found
