"""The step's folder of a path.

A save folder names it in `latest`.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from ucpl.errors import Label, fail, plural
from ucpl.files.texts import read_name
from ucpl.formats.deepspeed.names import LATEST, list_files


def step_folder(path: Path) -> tuple[Path, str]:
    """(the step's folder, its tag).

    Raises: UcplError E450 where there is no checkpoint, E451 where `latest` does not lead to one.
    """
    if not path.exists():
        fail("E450", f"{path} does not exist", Label(str(path)))
    if not path.is_dir():
        fail("E450", f"{path} is a file; a DeepSpeed checkpoint is a folder", Label(str(path)))
    if not list_files(path).is_empty:
        return path, path.resolve().name
    latest = path / LATEST
    if not latest.exists():
        steps = _steps(path)
        if steps:
            fail(
                "E451",
                f"{path} has {plural(len(steps), 'step')} but no `latest` that names one",
                Label(str(path)),
                remedy=_other_step(path),
            )
        fail("E450", f"{path} holds no DeepSpeed checkpoint", Label(str(path)))
    tag = read_name(latest)
    if tag is None:
        fail("E451", f"{latest} does not hold the name of a step", Label(str(latest)), remedy=_other_step(path))
    root = path / tag
    if not Path(os.path.realpath(root)).is_relative_to(os.path.realpath(path)):  # links that go round lead nowhere
        fail(
            "E451",
            f"{latest} names {tag!r}, which is outside the folder",
            Label(str(latest), tag),
            remedy=_other_step(path),
        )
    if not os.path.isdir(root):  # os.path.isdir is False for impossible names, too
        fail(
            "E451",
            f"{latest} names {tag!r}, but there is no such folder",
            Label(str(latest), tag),
            Label(str(root), "not there"),
            remedy=_other_step(path),
        )
    if list_files(root).is_empty:
        what = f"{root} holds no file of a DeepSpeed checkpoint"
        fail("E450", what, Label(str(latest), tag), Label(str(root)), remedy=_other_step(path))
    return root, tag


def _steps(path: Path) -> list[str]:
    """Folders of steps without empty files, in the order of their numbers."""
    found = []
    for child in path.iterdir():
        if child.is_dir() and not list_files(child).is_empty and all(f.stat().st_size for f in child.glob("*.pt")):
            found.append(child.name)
    return sorted(found, key=lambda name: ([int(n) for n in re.findall("[0-9]+", name)], name))


def _other_step(path: Path) -> str:
    """The newest step in the folder, for the remedy."""
    steps = _steps(path)
    return (
        f"name the step's folder, the newest is {path / steps[-1]}"
        if steps
        else "no step's folder has files: copy it again"
    )
