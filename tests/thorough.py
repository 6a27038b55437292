"""Tests that `make test` leaves to `make thorough`.

These are all but a share of the cases of each function. CI runs both.

`make test` uses `--thorough leave`, `make thorough` uses `--thorough only`. Without the option, and if a folder, a
file or a test is named, nothing is left out.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import Path

from ucpl.records import frozen

LIST = Path(__file__).with_name("thorough.toml")
KEEP = 8  # of the tests of one function, every so many stays in `make test`
NONE = 0  # the share of a function without cases in `make test`


@frozen
class Entry:
    """Functions whose names a pattern has, and their own share."""

    of: str
    why: str
    keep: int


def entries() -> list[Entry]:
    return [Entry(**raw) for raw in tomllib.loads(LIST.read_text())["tests"]]


def by_function(names: Iterable[str]) -> dict[str, list[str]]:
    """The tests of each function, in their order."""
    functions: dict[str, list[str]] = {}
    for name in names:
        functions.setdefault(name.partition("[")[0], []).append(name)
    return functions


def share(function: str, listed: Iterable[Entry]) -> int:
    """Its share, one in so many, or NONE."""
    return next((entry.keep for entry in listed if fnmatchcase(function, entry.of)), KEEP)


def thorough(names: Iterable[str], listed: list[Entry]) -> set[str]:
    """Those of the names that are left to `make thorough`."""
    found: set[str] = set()
    for function, cases in by_function(names).items():
        keep = share(function, listed)
        found.update(case for number, case in enumerate(cases) if keep == NONE or number % keep)
    return found
