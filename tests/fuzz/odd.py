"""Things in place of a file that are no files."""

from __future__ import annotations

import os
import shutil
from pathlib import Path


def a_folder(path: Path) -> None:
    path.mkdir(parents=True)


def a_pipe(path: Path) -> None:
    os.mkfifo(path)


def a_link_outside(path: Path) -> None:
    path.symlink_to("/etc/hostname")


def a_link_to_nothing(path: Path) -> None:
    path.symlink_to("/nowhere/at/all")


def a_link_to_itself(path: Path) -> None:
    path.symlink_to(path.name)


def gone(path: Path) -> None:
    """Nothing is there."""


ODD = (a_folder, a_pipe, a_link_outside, a_link_to_nothing, a_link_to_itself, gone)


def clear(*paths: Path) -> None:
    """Take things away, whatever they are."""
    for path in paths:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
