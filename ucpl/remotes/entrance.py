"""Paths and URLs that callers give, as local paths. Cheap for those that are local."""

from __future__ import annotations

from pathlib import Path

from ucpl.remotes.urls import file_at, is_url

__all__ = ["source_at", "target_at"]


def source_at(path: str | Path) -> Path:
    """Where a checkpoint can be read: a local path as it is, of a URL its shadow. Raises: UcplError E680-E684."""
    if not is_url(path):
        return Path(path)
    if (here := file_at(str(path))) is not None:
        return here
    from ucpl.remotes.shadows import shadow

    return shadow(path)


def target_at(path: str | Path) -> Path:
    """Where a target is to grow: a local path as it is, of a URL a place that stands for it. Raises: UcplError E680."""
    if not is_url(path):
        return Path(path)
    if (here := file_at(str(path))) is not None:
        return here
    from ucpl.remotes.places import place

    return place(path)
