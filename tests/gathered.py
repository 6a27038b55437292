"""A checkpoint's content as one plain file, converted once per process."""

from __future__ import annotations

import io
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch

import ucpl


@cache
def plain_bytes(source: Path) -> bytes:
    """The file that `convert` makes of it for `plain()`."""
    with tempfile.TemporaryDirectory() as scratch:
        ucpl.convert(source, Path(scratch) / "plain.pt", "plain()")
        return (Path(scratch) / "plain.pt").read_bytes()


def plain_of(source: Path) -> dict[str, Any]:
    """That file as torch reads it, for a test to change."""
    value: dict[str, Any] = torch.load(io.BytesIO(plain_bytes(source)), weights_only=True)
    return value
