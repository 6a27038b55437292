"""The ranks with files in the folder of one iteration.

It has a folder for each model-parallel rank: `mp_rank_TT`, with `_PPP` behind it if there are stages, and `_EEE` if
experts are dealt over ranks.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from ucpl.records import frozen

__all__ = ["MODEL", "OPTIM", "RankFolder", "is_step", "ranks_in"]

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
