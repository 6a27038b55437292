"""Support of each form of checkpoints, as data.

`ucpl formats` prints it, and `make docs` makes docs/FORMATS.md of it. A form has a file in the folder of its format; the form
`dcp` has `dcp/dcp.toml`:

    place       = 30                     its position in the list
    title       = "..."                  for people
    files       = "..."                  names of its files
    framework   = "dcp"                  the name in `framework NAME(...)`; absent if no layout names it
    layouts     = ["dcp"]                layouts for `--to`; [] if no generic layout writes it
    states      = ["weights", ...]       values of a parameter that are read and written, and other values
    parallelism = ["data", ...]
    releases    = ["torch 2.13.0", ...]  releases that were tried

    [[row]]                              one for each statement
    id         = "dcp-flat"              docs/capabilities.toml has its tests under this name
    checkpoint = "contents of the files, in Markdown"
    read       = { is = "proved" }
    written    = { is = "refused", codes = ["E471"], note = ": text that follows it" }
    both       = { ... }                 instead of the two, if they are the same

`is` is a name of Standing, in small letters.
"""

from __future__ import annotations

import sys
from enum import Enum
from functools import cache
from pathlib import Path
from typing import TypedDict, cast

from ucpl.records import frozen
from ucpl.registry.entries import formats

__all__ = ["Claim", "SupportRow", "Standing", "Support", "support", "support_of"]


_ClaimEntry = TypedDict("_ClaimEntry", {"is": str, "codes": list[str], "note": str}, total=False)


class _RowEntry(TypedDict, total=False):
    id: str
    checkpoint: str
    read: _ClaimEntry
    written: _ClaimEntry
    both: _ClaimEntry


class SupportEntry(TypedDict, total=False):
    """A file of a form."""

    place: int
    title: str
    files: str
    framework: str
    layouts: list[str]
    states: list[str]
    parallelism: list[str]
    releases: list[str]
    row: list[_RowEntry]


class Standing(Enum):
    """A degree of support, the highest first; the value is for tables."""

    PROVED = "proved"
    COMPARED = "compared here"
    READER = "reader only"
    REFUSED = "refused"
    LATER = "not yet"
    NO = "no"


MEANINGS = {
    Standing.PROVED: "a framework loaded the target with bit-equal state, and trained on or computed the same",
    Standing.COMPARED: "tests without a framework found the state equal",
    Standing.READER: "read in tests, from files made for them",
    Standing.REFUSED: "refused by name, with a remedy",
    Standing.LATER: "planned",
    Standing.NO: "not supported",
}


@frozen
class Claim:
    """Support for reading or writing. `note` comes next: ", with peft 0.21"."""

    standing: Standing
    codes: tuple[str, ...] = ()
    note: str = ""

    def __str__(self) -> str:
        codes = f" ({', '.join(self.codes)})" if self.codes else ""
        return f"{self.standing.value}{codes}{self.note}"


@frozen
class SupportRow:
    """One statement about files of a form."""

    id: str
    checkpoint: str  # Markdown
    read: Claim
    written: Claim


@frozen
class Support:
    """A form of checkpoints, with all statements about it."""

    name: str
    place: int
    title: str
    files: str  # Markdown, as `title` is not
    layouts: tuple[str, ...]
    states: tuple[str, ...]
    parallelism: tuple[str, ...]
    releases: tuple[str, ...]
    rows: tuple[SupportRow, ...]
    framework: str | None = None

    @property
    def read(self) -> Standing:
        """The highest degree of its rows."""
        return _furthest([row.read for row in self.rows])

    @property
    def written(self) -> Standing:
        return _furthest([row.written for row in self.rows])


def _furthest(claims: list[Claim]) -> Standing:
    return min((claim.standing for claim in claims), key=list(Standing).index)


@cache
def support() -> tuple[Support, ...]:
    """All forms, sorted. Raises: KeyError, TypeError, ValueError for a wrong file."""
    import tomllib

    found = [
        support_of(path.stem, cast(SupportEntry, tomllib.loads(path.read_text(encoding="utf-8"))))
        for folder in _folders()
        for path in folder.glob("*.toml")
    ]
    return tuple(sorted(found, key=lambda one: (one.place, one.name)))


def _folders() -> list[Path]:
    """Folders of all formats and of containers."""
    files = [sys.modules[type(one).__module__].__file__ or "" for one in formats().values()]
    own = Path(__file__).parents[1] / "formats" / "folders"
    return [*dict.fromkeys([*(Path(file).parent for file in files), own])]


def support_of(name: str, entry: SupportEntry) -> Support:
    """A form from its file's table. Raises: KeyError, TypeError, ValueError."""
    keys = {"place", "title", "files", "layouts", "states", "parallelism", "releases", "row"}
    if wrong := (entry.keys() ^ keys) - {"framework"}:
        raise ValueError(f"{name} has too many keys or too few: {', '.join(sorted(wrong))}")
    rows = tuple(map(_row, entry["row"]))
    if not rows:
        raise ValueError(f"{name} has no row")
    return Support(
        name=name,
        place=entry["place"],
        title=entry["title"],
        files=entry["files"],
        layouts=tuple(entry["layouts"]),
        states=tuple(entry["states"]),
        parallelism=tuple(entry["parallelism"]),
        releases=tuple(entry["releases"]),
        rows=rows,
        framework=entry.get("framework"),
    )


def _row(entry: _RowEntry) -> SupportRow:
    sides = {"both"} if "both" in entry else {"read", "written"}
    if wrong := entry.keys() ^ sides ^ {"id", "checkpoint"}:
        raise ValueError(f"a row has too many keys or too few: {', '.join(sorted(wrong))}")
    if "both" in entry:
        return SupportRow(entry["id"], entry["checkpoint"], _claim(entry["both"]), _claim(entry["both"]))
    return SupportRow(entry["id"], entry["checkpoint"], _claim(entry["read"]), _claim(entry["written"]))


def _claim(entry: _ClaimEntry) -> Claim:
    if more := entry.keys() - {"is", "codes", "note"}:
        raise ValueError(f"a claim has no {', '.join(sorted(more))}")
    return Claim(Standing[entry["is"].upper()], tuple(entry.get("codes", ())), entry.get("note", ""))
