"""Modes of a target's files: none is readable or writable for users who could not read or write its source."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from ucpl.remotes.reading import identity_of

__all__ = ["limit_modes"]

_OTHERS = stat.S_IRWXG | stat.S_IRWXO


def limit_modes(top: Path, names: Iterable[str], root: Path, sources: Iterable[str]) -> None:
    """Take permissions of other users from files below `top`.

    A file of the same name below `root` limits a copy of it; the strictest of all source files limits the others. Files that
    stand for objects in a store have no modes. Raises: OSError.
    """
    strictest = _OTHERS
    for name in sources:
        strictest &= _allowed(root / name if name else root)
    for name in names:
        allowed = _allowed(root / name) if name and (root / name).is_file() else strictest
        path = top / name if name else top
        mode = stat.S_IMODE(path.stat().st_mode)
        if mode & _OTHERS & ~allowed:
            with suppress(PermissionError):  # a file system without modes
                os.chmod(path, mode & (allowed | ~_OTHERS))


def _allowed(path: Path) -> int:
    try:
        status = os.stat(path)
    except OSError:
        return _OTHERS
    return _OTHERS if identity_of(status) is not None else stat.S_IMODE(status.st_mode) & _OTHERS
