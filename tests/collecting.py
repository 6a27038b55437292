"""The tests that pytest collects of some files.

The names of tests with their parameters, which a file's text does not contain.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
_here: dict[str, list[str]] = {}  # of each file that this process collected completely: names of its tests


def keep(config: pytest.Config, items: Iterable[pytest.Item]) -> None:
    """The tests that this process has collected, before anything is deselected.

    A run that was asked for single tests has no list.
    """
    _here.clear()
    if any("::" in asked for asked in config.args) or getattr(config.option, "lf", False):
        return
    for item in items:
        _here.setdefault(item.nodeid.partition("::")[0], []).append(item.nodeid)


def collected(files: Iterable[str | Path]) -> list[str]:
    """The names of all tests of these files.

    Nothing of a file that cannot be collected here.

    Another process collects the missing files, all at once.
    """
    names = [(ROOT / file).relative_to(ROOT).as_posix() for file in files]
    found = [test for name in names for test in _here.get(name, ())]
    others = [name for name in names if name not in _here]
    if not others:
        return found
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    command += ["--continue-on-collection-errors", *others]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    return found + [line for line in done.stdout.splitlines() if line.startswith("tests/") and "::" in line]
