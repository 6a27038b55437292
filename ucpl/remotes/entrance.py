"""Paths and URLs that callers give, as local paths. Cheap for those that are local."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from ucpl.errors import Label, fail
from ucpl.remotes.standing import ends
from ucpl.remotes.urls import file_at, is_url

if TYPE_CHECKING:
    from ucpl.remotes.places import Place

__all__ = ["place_of", "source_at", "target_at"]

_PLACES: dict[Path, Place] = {}


def source_at(path: str | Path, say: Callable[[str], object] = warnings.warn) -> Path:
    """Where a checkpoint can be read: a local path as it is, of a URL its shadow, of a vault its newest generation.

    say: is told of generations that may be newer and are not read. Raises: UcplError E185, E680-E683, E685, E690-E692.
    """
    _reject_empty(path, "a checkpoint")
    if not is_url(path):
        return Path(path)
    if (here := file_at(str(path))) is not None:
        return here
    if str(path).startswith("vault:"):
        from ucpl.remotes.vaults.view import passed_over, view

        found = view(str(path))
        for text in passed_over(str(path)):
            say(text)
        return found
    from ucpl.remotes.shadows import shadow

    return shadow(path)


def target_at(path: str | Path) -> Path:
    """Where a target is to grow: a local path as it is, of a URL one that stands for it. Raises: UcplError E185, E680."""
    _reject_empty(path, "a target")
    if not is_url(path):
        return Path(path)
    if (here := file_at(str(path))) is not None:
        return here
    if str(path).startswith("vault:"):
        remedy = "name a folder; into a vault, a running job saves (ucpl.vault)"
        fail("E680", f"{path} cannot be a target", Label(str(path)), remedy=remedy)
    from ucpl.remotes.places import place

    made = place(path)
    _PLACES[made.path] = made
    ends().callback(_PLACES.pop, made.path)
    return made.path


def place_of(path: Path) -> Place | None:
    """The place in a store that a path stands for; None: it is a local one."""
    return _PLACES.get(path)


def _reject_empty(path: str | Path, what: str) -> None:
    """`Path("")` is the current folder, and nobody means it by an empty text. Raises: UcplError E185."""
    if path == "":
        fail("E185", f"the path of {what} is empty", Label("<call>"), remedy="Write a path; `.` is the current folder.")
