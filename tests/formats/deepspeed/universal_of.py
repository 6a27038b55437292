"""Universal folders of fixtures: converted once per process, written per test."""

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
    """Write the conversion of a checkpoint to `universal()` for this test."""
    for name, data in _files(source).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder
