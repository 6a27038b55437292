"""From what the user named to one step's folder: a save folder has `latest`, a text file with the name of a step's folder."""

from __future__ import annotations

import os
from pathlib import Path

from ucpl.errors import Label, fail
from ucpl.stores.deepspeed.names import LATEST, list_files
from ucpl.stores.texts import read_name


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
        steps = sorted(child.name for child in path.iterdir() if child.is_dir() and not list_files(child).is_empty)
        if steps:
            fail(
                "E451",
                f"{path} has {len(steps)} step{'s' if len(steps) > 1 else ''} but no `latest` that says which",
                Label(str(path)),
                remedy=f"name the step's folder: {path / steps[-1]}",
            )
        fail("E450", f"{path} holds no DeepSpeed checkpoint", Label(str(path)))
    tag = read_name(latest)
    if tag is None:
        fail("E451", f"{latest} does not hold the name of a step", Label(str(latest)))
    root = path / tag
    if not Path(os.path.realpath(root)).is_relative_to(os.path.realpath(path)):  # links that go round lead nowhere
        fail("E451", f"{latest} names {tag!r}, which is outside the folder", Label(str(latest), tag))
    if not os.path.isdir(root):  # nor is one that no file can be called
        fail(
            "E451",
            f"{latest} names {tag!r}, but there is no such folder",
            Label(str(latest), tag),
            Label(str(root), "not there"),
            remedy="name the step's folder itself, or correct `latest`",
        )
    if list_files(root).is_empty:
        fail("E450", f"{root} holds no file of a DeepSpeed checkpoint", Label(str(latest), tag), Label(str(root)))
    return root, tag
