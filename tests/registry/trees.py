"""The parsed modules of the package, read once by a process."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import ucpl

ROOT = Path(ucpl.__file__).parent


@cache
def trees() -> dict[str, ast.Module]:
    """Modules of the package by their paths in it."""
    return {
        p.relative_to(ROOT).as_posix(): ast.parse(p.read_text(encoding="utf-8")) for p in sorted(ROOT.rglob("*.py"))
    }
