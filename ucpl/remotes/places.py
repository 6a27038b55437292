"""Where a target in a store grows: not written yet."""

from __future__ import annotations

from pathlib import Path
from typing import NoReturn

from ucpl.errors import Label, fail

__all__ = ["place"]


def place(path: str | Path) -> NoReturn:
    """Raises: UcplError E680, always."""
    fail("E680", f"{path}: targets are written to local folders alone", Label(str(path)), remedy="give a local DST")
