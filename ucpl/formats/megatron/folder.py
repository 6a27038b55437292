"""Where a checkpoint of Megatron's lies: the folder of a run, whose tracker says `10` or `release`, or one iteration's."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from ucpl.errors import Label, fail
from ucpl.files.texts import read_name
from ucpl.records import frozen

__all__ = ["TRACKER", "Step", "found", "has_tracker", "step_of"]

TRACKER = "latest_checkpointed_iteration.txt"
_RELEASE = "release"
_NUMBER = re.compile(r"[0-9]{1,12}")
_FOLDER = re.compile(r"iter_[0-9]{7,12}|release")


@frozen
class Step:
    """`top`: what the user named; `root`: the iteration's folder; `tag`: its name, where a tracker leads to it."""

    top: Path
    root: Path
    tag: str | None = None


def step_of(path: Path, holds: Callable[[Path], bool]) -> Step | None:
    """The iteration that a path is, or that its tracker leads to. None: it is no folder of this kind.

    holds: whether a folder is an iteration of this kind. A run that has some, and whose tracker leads to no folder, is of the
    kind, too; its step is where the tracker leads, and holds nothing.
    """
    if not path.is_dir():
        return None
    if holds(path):
        return Step(path, path)
    tracker = path / TRACKER
    if not tracker.is_file():
        return None
    said = read_name(tracker) or ""
    tag = f"iter_{int(said):07d}" if _NUMBER.fullmatch(said) else said if _FOLDER.fullmatch(said) else ""
    root = path / (tag or _RELEASE)
    if (tag and holds(root)) or (not (tag and root.is_dir()) and _iterations(path, holds)):
        return Step(path, root, tag)
    return None


def found(path: Path, holds: Callable[[Path], bool]) -> Step:
    """The iteration that a path leads to. Raises: UcplError E532 where it leads to none of this kind."""
    step = step_of(path, holds)
    if step is not None and holds(step.root):
        return step
    others = _iterations(path, holds)
    text = (read_name(path / TRACKER) if (path / TRACKER).is_file() else None) or "no name"
    fail(
        "E532",
        f"{path / TRACKER} says {text[:40]!a}, and no folder of that iteration is beside it",
        Label(str(path / TRACKER), text[:40]),
        remedy=f"name an iteration's folder: {path / others[-1]}" if others else "",
    )


def has_tracker(path: Path) -> bool:
    """Whether a folder is called as an iteration of a run, whose tracker is next to it."""
    return _FOLDER.fullmatch(path.name) is not None and (path.parent / TRACKER).is_file()


def _iterations(path: Path, holds: Callable[[Path], bool]) -> list[str]:
    if not path.is_dir():
        return []
    return sorted(one.name for one in path.iterdir() if _FOLDER.fullmatch(one.name) and holds(one))
