"""The tests that each row of what works rests on, docs/capabilities.toml; the rows are those of `ucpl formats`.

python -m tests.docs.capabilities        write the tables into README.md anew (`make docs`)
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from attrs import field, frozen

from ucpl.conversion.formats import Claim, Format, formats
from ucpl.errors.document import table

ROOT = Path(__file__).parents[2]
LIST, README = ROOT / "docs" / "capabilities.toml", ROOT / "README.md"
BEGIN, END = "<!-- made of ucpl/conversion/formats by `make docs` -->\n", "<!-- until here -->\n"


@frozen
class Tests:
    """What a row rests on."""

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
        """Each claim of each row: what it is called, what it says, and its tests."""
        out = []
        for row in (row for one in formats() for row in one.rows):
            tests = self.rows.get(row.id, Tests())
            out += [(f"{row.id} read", row.read, tests.read), (f"{row.id} written", row.written, tests.written)]
        return out


def read_capabilities(path: Path = LIST) -> Capabilities:
    """Raises: KeyError, TypeError, ValueError of an entry that has not the form that the file's head says."""
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
    """Whether a name in the list is this test: `*` is any text, and no [...] is any parameters."""
    return _matched(pattern).fullmatch(test) is not None


@cache
def _matched(pattern: str) -> re.Pattern[str]:
    text = ".*".join(re.escape(part) for part in pattern.split("*"))
    return re.compile(text if pattern.endswith("]") else rf"{text}(\[.*\])?", re.DOTALL)


def markdown(found: Sequence[Format]) -> str:
    """Two tables: the forms, and what is to be said of each."""
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
    rows: list[tuple[str, ...]] = [(r.checkpoint, str(r.read), str(r.written)) for one in found for r in one.rows]
    return "\n".join(
        (
            table(("form", "`--to`", "states", "parallelism", "tried with"), heads),
            table(("checkpoint", "read", "written"), rows),
        )
    )


def page(readme: str, found: Sequence[Format]) -> str:
    """README with its tables made anew. Raises: ValueError where the lines around them are not there once each."""
    before, begin, rest = readme.partition(BEGIN)
    _, end, behind = rest.partition(END)
    if not begin or not end or BEGIN in behind or END in behind:
        raise ValueError(f"README.md has not one {BEGIN.strip()} and one {END.strip()} behind it")
    return f"{before}{BEGIN}\n{markdown(found)}\n{END}{behind}"


if __name__ == "__main__":
    README.write_text(page(README.read_text(encoding="utf-8"), formats()), encoding="utf-8")
