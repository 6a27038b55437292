"""Tests that `make test` leaves to `make thorough`, by thorough.toml.

CI runs both.

`make test` uses `--thorough leave`, `make thorough` uses `--thorough only`. Without the option, and if a folder, a
file or a test is named, nothing is left out.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from ucpl.records import frozen

LIST = Path(__file__).with_name("thorough.toml")


@frozen
class Entry:
    """Tests whose names a pattern has. `keep`.

    Of those of one function, every so many stays in `make test`; 0: none.
    """

    of: str
    why: str
    keep: int = 0


def entries() -> list[Entry]:
    return [Entry(**raw) for raw in tomllib.loads(LIST.read_text())["tests"]]


def thorough(names: Sequence[str], listed: Iterable[Entry]) -> set[str]:
    """Those of the names that are left to `make thorough`."""
    found: set[str] = set()
    for entry in listed:
        counts: dict[str, int] = {}
        for name in names:
            function = name.partition("[")[0]
            if fnmatchcase(function, entry.of):
                number = counts[function] = counts.get(function, -1) + 1
                if not entry.keep or number % entry.keep:
                    found.add(name)
    return found
