"""Keys of hosts, made once for all tests of a process."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path

from ucpl.remotes.issuing import issue

DOMAINS = 8
_kept: list[tempfile.TemporaryDirectory[str]] = []


@cache
def authority(which: str = "first") -> Path:
    """A folder as `ucpl vault keys` makes it; another authority for each name."""
    _kept.append(tempfile.TemporaryDirectory(prefix="ucpl-test-keys-"))
    folder = Path(_kept[-1].name) / "keys"
    issue(folder, DOMAINS)
    return folder


def keys_of(number: int) -> Path:
    return authority() / f"d{number}"
