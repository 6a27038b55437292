"""Tests behind each row of `ucpl formats` (docs/capabilities.toml), and the page docs/FORMATS.md.

python -m tests.docs.capabilities        write docs/FORMATS.md (`make docs`)
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from attrs import field, frozen

from ucpl.errors.document import table
from ucpl.registry.support import MEANINGS, Claim, Support, support

ROOT = Path(__file__).parents[2]
LIST, PAGE = ROOT / "docs" / "capabilities.toml", ROOT / "docs" / "FORMATS.md"
HEAD = """\
# Formats

This page lists the formats of checkpoints that `ucpl` reads and writes, with the support for each.
`ucpl formats` prints the same list, `ucpl formats --json` for scripts. Releases that the last column of the
first table does not name were not tried.

`make docs` generates this page from the tables in `ucpl/formats/`: change an entry there.
"""


@frozen
class Tests:
    """The tests of a row, by reading and writing."""

    read: tuple[str, ...] = ()
    written: tuple[str, ...] = ()


@frozen
class Capabilities:
    rows: dict[str, Tests]  # by the row's id
    beside: dict[str, tuple[str, ...]] = field(factory=dict)  # why: tests of tests/interop that prove no row

    def named(self) -> set[str]:
        """Every name of tests that is in the list."""
        lists = [by for tests in self.rows.values() for by in (tests.read, tests.written)]
        return {name for by in (*lists, *self.beside.values()) for name in by}

    def claims(self) -> list[tuple[str, Claim, tuple[str, ...]]]:
        """Each claim of each row: its name, its text, and its tests."""
        out = []
        for row in (row for one in support() for row in one.rows):
            tests = self.rows.get(row.id, Tests())
            out += [(f"{row.id} read", row.read, tests.read), (f"{row.id} written", row.written, tests.written)]
        return out


def read_capabilities(path: Path = LIST) -> Capabilities:
    """Raise KeyError, TypeError or ValueError for an entry of another form."""
    value = tomllib.loads(path.read_text(encoding="utf-8"))
    beside = {entry["why"]: tuple(entry["by"]) for entry in value.pop("beside")}
    return Capabilities({name: tests_of(entry) for name, entry in value.items()}, beside)


def tests_of(entry: dict[str, Any]) -> Tests:
    if entry.keys() == {"both"}:
        return Tests(tuple(entry["both"]), tuple(entry["both"]))
    if more := entry.keys() - {"read", "written"}:
        raise ValueError(f"a row has no {', '.join(sorted(more))}")
    return Tests(**{side: tuple(by) for side, by in entry.items()})


def names(pattern: str, test: str) -> bool:
    """True if a name in the list is this test.

    `*` is any text, no [...] any parameters.
    """
    return _matched(pattern).fullmatch(test) is not None


@cache
def _matched(pattern: str) -> re.Pattern[str]:
    text = ".*".join(re.escape(part) for part in pattern.split("*"))
    return re.compile(text if pattern.endswith("]") else rf"{text}(\[.*\])?", re.DOTALL)


def markdown(found: Sequence[Support]) -> str:
    """The page: words, formats, and the rows of each format."""
    words = [(standing.value, meaning) for standing, meaning in MEANINGS.items()]
    heads: list[tuple[str, ...]] = [
        (
            f"`{one.name}`: {one.title}",
            ", ".join(f"`{name}`" for name in one.layouts),
            ", ".join(one.states),
            ", ".join(one.parallelism),
            ", ".join(one.releases),
        )
        for one in found
    ]
    parts = [
        HEAD,
        table(("word", "meaning"), words),
        "## All formats\n",
        table(("format", "`--to`", "states", "parallelism", "tried with"), heads),
    ]
    for one in found:
        rows: list[tuple[str, ...]] = [(row.checkpoint, str(row.read), str(row.written)) for row in one.rows]
        parts += [f"## {one.title[0].upper()}{one.title[1:]}\n", table(("checkpoint", "read", "written"), rows)]
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(markdown(support()), encoding="utf-8")
