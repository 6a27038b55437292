"""Formats that are read and written, as data: `ucpl formats` prints them, `make docs` generates docs/FORMATS.md from them.

A form is a file in the folder of its format, `dcp/dcp.toml` of the form `dcp`:

    place       = 30                     where it stands among the others
    title       = "..."                  for people
    files       = "..."                  what lies there
    framework   = "dcp"                  as `framework NAME(...)` of a layout calls what reads it; left out where nothing does
    layouts     = ["dcp"]                what `--to` calls; [] where a layout of one architecture writes it, or nothing
    states      = ["weights", ...]       what is read and written of a parameter, and beside parameters
    parallelism = ["data", ...]
    releases    = ["torch 2.13.0", ...]  those that were tried

    [[row]]                              as many as there are things to be said of it
    id         = "dcp-flat"              docs/capabilities.toml has its tests under this name
    checkpoint = "what lies in the files, in Markdown"
    read       = { is = "proved" }
    written    = { is = "refused", codes = ["E471"], note = ": what is to be said beside it" }
    both       = { ... }                 instead of the two, where they are one

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

__all__ = ["Claim", "Row", "Standing", "Support", "support", "support_of"]


_ClaimEntry = TypedDict("_ClaimEntry", {"is": str, "codes": list[str], "note": str}, total=False)


class _RowEntry(TypedDict, total=False):
    id: str
    checkpoint: str
    read: _ClaimEntry
    written: _ClaimEntry
    both: _ClaimEntry


class Entry(TypedDict, total=False):
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
    """How far a form is read or written, the furthest first; the value is what tables say."""

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
    """How far a form is read, or written. `note` is said behind it, with what parts it from that: ", with peft 0.21"."""

    standing: Standing
    codes: tuple[str, ...] = ()
    note: str = ""

    def __str__(self) -> str:
        codes = f" ({', '.join(self.codes)})" if self.codes else ""
        return f"{self.standing.value}{codes}{self.note}"


@frozen
class Row:
    """One thing that lies in files of a form."""

    id: str
    checkpoint: str  # Markdown
    read: Claim
    written: Claim


@frozen
class Support:
    """What is read and written of a form of checkpoints."""

    name: str
    place: int
    title: str
    files: str  # Markdown, as `title` is not
    layouts: tuple[str, ...]
    states: tuple[str, ...]
    parallelism: tuple[str, ...]
    releases: tuple[str, ...]
    rows: tuple[Row, ...]
    framework: str | None = None

    @property
    def read(self) -> Standing:
        """Of its rows, the one that goes furthest."""
        return _furthest([row.read for row in self.rows])

    @property
    def written(self) -> Standing:
        return _furthest([row.written for row in self.rows])


def _furthest(claims: list[Claim]) -> Standing:
    return min((claim.standing for claim in claims), key=list(Standing).index)


@cache
def support() -> tuple[Support, ...]:
    """All forms, in their order. Raises: KeyError, TypeError, ValueError of a file that has not the form said above."""
    import tomllib

    found = [
        support_of(path.stem, cast(Entry, tomllib.loads(path.read_text(encoding="utf-8"))))
        for folder in _folders()
        for path in folder.glob("*.toml")
    ]
    return tuple(sorted(found, key=lambda one: (one.place, one.name)))


def _folders() -> list[Path]:
    """Folders of all formats, those of other packages included, and of the folders that training frameworks keep."""
    files = [sys.modules[type(one).__module__].__file__ or "" for one in formats().values()]
    own = Path(__file__).parents[1] / "formats" / "folders"
    return [*dict.fromkeys([*(Path(file).parent for file in files), own])]


def support_of(name: str, entry: Entry) -> Support:
    """A form as its file says it. Raises: KeyError, TypeError, ValueError."""
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


def _row(entry: _RowEntry) -> Row:
    sides = {"both"} if "both" in entry else {"read", "written"}
    if wrong := entry.keys() ^ sides ^ {"id", "checkpoint"}:
        raise ValueError(f"a row has too many keys or too few: {', '.join(sorted(wrong))}")
    if "both" in entry:
        return Row(entry["id"], entry["checkpoint"], _claim(entry["both"]), _claim(entry["both"]))
    return Row(entry["id"], entry["checkpoint"], _claim(entry["read"]), _claim(entry["written"]))


def _claim(entry: _ClaimEntry) -> Claim:
    if more := entry.keys() - {"is", "codes", "note"}:
        raise ValueError(f"a claim has no {', '.join(sorted(more))}")
    return Claim(Standing[entry["is"].upper()], tuple(entry.get("codes", ())), entry.get("note", ""))
