"""What is in the way of a folder that is to be made."""

from __future__ import annotations

from pathlib import Path

__all__ = ["why_not_made"]


def why_not_made(folder: Path, error: OSError) -> str:
    """Why a folder could not be made or written to, in a few words: what stands where a folder should be is named."""
    for one in (folder, *folder.parents):
        try:
            if not one.is_dir() and (one.is_symlink() or one.exists()):
                return f"{one} is no folder"
        except OSError:  # nobody may look
            continue
    return error.strerror or str(error)
