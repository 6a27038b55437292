"""From what the user named to the folder of one iteration, and which ranks have files there.

A save folder has `latest_checkpointed_iteration.txt`, which says `10` or `release`; an iteration's folder has a folder for each
model-parallel rank: `mp_rank_TT`, with `_PPP` behind it where there are stages, and `_EEE` where experts are dealt over ranks.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from ucpl.errors import Label, fail
from ucpl.records import frozen
from ucpl.stores.megatron.folder import TRACKER
from ucpl.stores.texts import read_name

__all__ = ["MODEL", "OPTIM", "TRACKER", "Rank", "Step", "is_step", "ranks_in", "step_of"]

MODEL, OPTIM = "model_optim_rng.pt", "distrib_optim.pt"
_RANK = re.compile(r"mp_rank_(\d{2,6})(?:_(\d{3,6}))?(?:_(\d{3,6}))?")


@frozen
class Step:
    """The folder of one iteration. `top`: what the user named."""

    top: Path
    root: Path
    tag: str


@frozen
class Rank:
    """A model-parallel rank's folder, and the numbers in its name."""

    folder: str
    numbers: tuple[int, ...]

    @property
    def model(self) -> str:
        return f"{self.folder}/{MODEL}"

    @property
    def optim(self) -> str:
        return f"{self.folder}/{OPTIM}"


def ranks_in(root: Path) -> tuple[Rank, ...]:
    """The ranks that have files in an iteration's folder, in order."""
    found = []
    for name in sorted(os.listdir(root)):
        match = _RANK.fullmatch(name)
        if match is not None and any((root / name / file).is_file() for file in (MODEL, OPTIM)):
            found.append(Rank(name, tuple(int(n) for n in match.groups() if n is not None)))
    return tuple(found)


def is_step(root: Path) -> bool:
    return root.is_dir() and bool(ranks_in(root))


def step_of(path: Path) -> Step | None:
    """The iteration that a path leads to; None where it is no folder of Megatron-LM's. Raises: UcplError E540."""
    if not path.is_dir():
        return None
    if ranks_in(path):
        return Step(path, path, path.resolve().name)
    tracker = path / TRACKER
    if not tracker.is_file():
        return None
    said = read_name(tracker)
    tag = f"iter_{int(said):07d}" if said is not None and re.fullmatch(r"\d{1,9}", said) else said or ""
    if said is None or not (tag == "release" or tag.startswith("iter_")) or "/" in tag:
        return None
    root = path / tag
    if is_step(root):
        return Step(path, root, tag)
    others = sorted(c.name for c in path.iterdir() if c.name.startswith(("iter_", "release")) and is_step(c))
    if not others:
        return None
    fail(
        "E540",
        f"{tracker} names {tag}, and there is no such folder of ranks",
        Label(str(tracker), said),
        remedy=f"name the iteration's folder: {path / others[-1]}",
    )
