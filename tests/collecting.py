"""What pytest collects of some files: the names of tests with their parameters, which no text of a file tells."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def collected(files: Iterable[str | Path]) -> list[str]:
    """The names of all tests of these files, as one process tells them; nothing of a file that cannot be collected here."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    command += ["--continue-on-collection-errors", *map(str, files)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    return [line for line in done.stdout.splitlines() if line.startswith("tests/") and "::" in line]
