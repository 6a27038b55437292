"""Universal folders of fixtures: each converted once in a process, and written for each test that asks."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path

import ucpl

__all__ = ["universal_of"]


@cache
def _files(source: Path) -> dict[Path, bytes]:
    with tempfile.TemporaryDirectory() as name:
        top = Path(name) / "whole"
        ucpl.convert(source, top, to="universal()")
        return {path.relative_to(top): path.read_bytes() for path in sorted(top.rglob("*")) if path.is_file()}


def universal_of(source: Path, folder: Path) -> Path:
    """What a conversion to `universal()` makes of a checkpoint, written there: the test's own."""
    for name, data in _files(source).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder
