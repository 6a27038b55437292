"""The folder of a Megatron checkpoint: a run or an iteration.

A run has a tracker, whose text is `10` or `release`. In Megatron-LM's legacy form, an iteration has a folder for each
model-parallel rank: `mp_rank_TT`, with `_PPP` behind it if there are stages, and `_EEE` if experts are dealt over ranks.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

from ucpl.errors import Label, fail
from ucpl.files.texts import read_name
from ucpl.records import frozen

__all__ = [
    "INNER",
    "MODEL",
    "OPTIM",
    "TRACKER",
    "RankFolder",
    "Step",
    "found",
    "has_tracker",
    "is_step",
    "ranks_in",
    "step_of",
]

TRACKER = "latest_checkpointed_iteration.txt"
INNER = "weights"  # of NeMo 2: an iteration's folder, next to `context`
_RELEASE = "release"
_NUMBER = re.compile(r"[0-9]{1,12}")
_FOLDER = re.compile(r"iter_[0-9]{7,12}|release")


@frozen
class Step:
    """A path and the iteration that it leads to.

    `top`: the path that the user named; `root`: the iteration's folder; `tag`: its name, if a tracker leads to it.
    """

    top: Path
    root: Path
    tag: str | None = None


def step_of(path: Path, holds: Callable[[Path], bool]) -> Step | None:
    """The iteration of a path or of its tracker, or None.

    holds: tests whether a folder is an iteration of this kind. A run with iterations of this kind whose tracker leads
    to no folder is of this kind, too; its step is the tracker's, and has no files.
    """
    if not path.is_dir():
        return None
    if holds(path):
        return Step(path, path)
    if holds(path / INNER):
        return Step(path, path / INNER)
    tracker = path / TRACKER
    if not tracker.is_file():
        return None
    text = read_name(tracker) or ""
    tag = f"iter_{int(text):07d}" if _NUMBER.fullmatch(text) else text if _FOLDER.fullmatch(text) else ""
    root = path / (tag or _RELEASE)
    if (tag and holds(root)) or (not (tag and root.is_dir()) and _iterations(path, holds)):
        return Step(path, root, tag)
    return None


def found(path: Path, holds: Callable[[Path], bool]) -> Step:
    """The iteration that a path leads to.

    Raises: UcplError E532 if it leads to none of this kind.
    """
    step = step_of(path, holds)
    if step is not None and holds(step.root):
        return step
    others = _iterations(path, holds)
    text = (read_name(path / TRACKER) if (path / TRACKER).is_file() else None) or "no name"
    fail(
        "E532",
        f"{path / TRACKER} says {text[:40]!a}, and no folder of that iteration is next to it",
        Label(str(path / TRACKER), text[:40]),
        remedy=f"name an iteration's folder: {path / others[-1]}" if others else "",
    )


def has_tracker(path: Path) -> bool:
    """Test for an iteration's name and a tracker next to it."""
    return _FOLDER.fullmatch(path.name) is not None and (path.parent / TRACKER).is_file()


def _iterations(path: Path, holds: Callable[[Path], bool]) -> list[str]:
    if not path.is_dir():
        return []
    return sorted(one.name for one in path.iterdir() if _FOLDER.fullmatch(one.name) and holds(one))


# ---- folders of ranks ----------------------------------------------------------------------------------------------

MODEL, OPTIM = "model_optim_rng.pt", "distrib_optim.pt"
_RANK = re.compile(r"mp_rank_(\d{2,6})(?:_(\d{3,6}))?(?:_(\d{3,6}))?")


@frozen
class RankFolder:
    """A model-parallel rank's folder, and the numbers in its name."""

    folder: str
    numbers: tuple[int, ...]

    @property
    def model(self) -> str:
        return f"{self.folder}/{MODEL}"

    @property
    def optim(self) -> str:
        return f"{self.folder}/{OPTIM}"


def ranks_in(root: Path) -> tuple[RankFolder, ...]:
    """The ranks that have files in an iteration's folder, in order."""
    found = []
    for name in sorted(os.listdir(root)):
        match = _RANK.fullmatch(name)
        if match is not None and any((root / name / file).is_file() for file in (MODEL, OPTIM)):
            found.append(RankFolder(name, tuple(int(n) for n in match.groups() if n is not None)))
    return tuple(found)


def is_step(root: Path) -> bool:
    return root.is_dir() and bool(ranks_in(root))
