"""docs/capabilities.toml, the one list of what works, as records; README's table is made of it.

python -m tests.docs.capabilities        write the table into README.md anew (`make docs`)
"""

from __future__ import annotations

import re
import tomllib
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any

from attrs import field, frozen

from ucpl.errors.document import table

ROOT = Path(__file__).parents[2]
LIST, README = ROOT / "docs" / "capabilities.toml", ROOT / "README.md"
BEGIN, END = "<!-- made from docs/capabilities.toml by `make docs` -->\n", "<!-- until here -->\n"


class Standing(Enum):
    """How far a form of checkpoint is read or written; the value is what the table says."""

    PROVED = "proved"
    COMPARED = "compared here"
    READER = "reader only"
    REFUSED = "refused"
    NO = "no"
    LATER = "not yet"


@frozen
class Claim:
    """One cell of the table, and the tests that it rests on."""

    standing: Standing
    by: tuple[str, ...] = ()
    codes: tuple[str, ...] = ()
    note: str = ""

    def __str__(self) -> str:
        codes = f" ({', '.join(self.codes)})" if self.codes else ""
        return f"{self.standing.value}{codes}{self.note}"


@frozen
class Row:
    checkpoint: str
    read: Claim
    written: Claim


@frozen
class Capabilities:
    rows: tuple[Row, ...]
    beside: dict[str, tuple[str, ...]] = field(factory=dict)  # why: tests of tests/interop that prove no row

    def named(self) -> set[str]:
        """Every name of tests that is in the list."""
        claims = [claim for row in self.rows for claim in (row.read, row.written)]
        return {name for by in (*(c.by for c in claims), *self.beside.values()) for name in by}


def read_capabilities(path: Path = LIST) -> Capabilities:
    """Raises: KeyError, TypeError, ValueError of an entry that has not the form that the file's head says."""
    value = tomllib.loads(path.read_text(encoding="utf-8"))
    beside = {entry["why"]: tuple(entry["by"]) for entry in value["beside"]}
    return Capabilities(tuple(row_of(entry) for entry in value["row"]), beside)


def row_of(entry: dict[str, Any]) -> Row:
    if "both" in entry:
        entry = {"checkpoint": entry["checkpoint"], "read": entry["both"], "written": entry["both"], **entry}
        del entry["both"]
    if entry.keys() != {"checkpoint", "read", "written"}:
        raise ValueError(f"{entry['checkpoint']}: its keys are {', '.join(entry)}")
    return Row(entry["checkpoint"], claim_of(entry["read"]), claim_of(entry["written"]))


def claim_of(entry: dict[str, Any]) -> Claim:
    if more := entry.keys() - {"is", "by", "codes", "note"}:
        raise ValueError(f"a claim has no {', '.join(sorted(more))}")
    by, codes = tuple(entry.get("by", ())), tuple(entry.get("codes", ()))
    return Claim(Standing[entry["is"].upper()], by, codes, entry.get("note", ""))


def names(pattern: str, test: str) -> bool:
    """Whether a name in the list is this test: `*` is any text, and no [...] is any parameters."""
    return _matched(pattern).fullmatch(test) is not None


@cache
def _matched(pattern: str) -> re.Pattern[str]:
    text = ".*".join(re.escape(part) for part in pattern.split("*"))
    return re.compile(text if pattern.endswith("]") else rf"{text}(\[.*\])?", re.DOTALL)


def markdown(found: Capabilities) -> str:
    rows: list[tuple[str, ...]] = [(row.checkpoint, str(row.read), str(row.written)) for row in found.rows]
    return table(("checkpoint", "read", "written"), rows)


def page(readme: str, found: Capabilities) -> str:
    """README with its table made anew. Raises: ValueError where the lines around it are not there once each."""
    before, begin, rest = readme.partition(BEGIN)
    _, end, behind = rest.partition(END)
    if not begin or not end or BEGIN in behind or END in behind:
        raise ValueError(f"README.md has not one {BEGIN.strip()} and one {END.strip()} behind it")
    return f"{before}{BEGIN}\n{markdown(found)}\n{END}{behind}"


if __name__ == "__main__":
    README.write_text(page(README.read_text(encoding="utf-8"), read_capabilities()), encoding="utf-8")
