"""A folder moved aside that no rename moves: one of a lower layer of overlayfs, as every image of a container has.

Its files are moved one by one into folders that are made as theirs are.
"""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path

from ucpl.runtime.disk import disk, sync_folder

__all__ = ["move_apart"]


def move_apart(source: Path, target: Path) -> None:
    """Move all files of a folder into another, which may have some of them by now, and remove the first. Raises: OSError."""
    before = os.lstat(source)
    disk().make_folder(target)
    with suppress(PermissionError):
        os.chown(target, before.st_uid, before.st_gid)
        os.chmod(target, stat.S_IMODE(before.st_mode))
    with os.scandir(source) as entries:
        held = sorted((entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries)
    for name, is_folder in held:
        if is_folder:
            move_apart(source / name, target / name)
        else:
            disk().rename(source / name, target / name)
    sync_folder(target)
    disk().remove_folder(source)
