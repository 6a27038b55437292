"""Habits of other languages and tools, and the line to write instead: tables, as data (`*.toml` beside this file).

A row has a pattern of a line that the parser refuses, tried where it covers the place of the refusal. What it matches is
replaced by `instead`, or by what the function `call` of `respelling` makes of it; the line is read again, and other rows go
on with it. Only a line that can be read is offered (`rewriting`). A row without either says `why` alone.

In a pattern `<N>` is a name, `<P>` a path of names, `<A>` an axis of a mesh of this text, `<T>` a tensor of its model, `<S>`
space. `place`: l inside a layout, m a model, t beside them, h where the version stands. `example` is a line with the habit,
and `write` what is then offered: a test reads both.

`words.toml` has words of other tools for which no line can be made, and what is written here for each.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from re import Match

from ucpl.records import frozen
from ucpl.syntax.habits import respelling

__all__ = ["Habit", "Words", "foreign", "habits", "words"]

_FILES = (
    "exact",
    "clauses",
    "forms",
    "tools",
    "signs",
    "numbers",
    "models",
    "entries",
    "patterns",
    "statements",
    "files",
    "brackets",
)  # the first one wins
_HERE = Path(__file__).parent


# A common word is no habit where it is a name: of a tensor on the left, in a path, a class behind `of`, in quotes.
_NAMED = re.compile(r'"[^"]*"?|^\s*[\w.-]+(?=\s*(?:\[[^]]*\])?\s*[=:])|\bof\s+\w+')
_QUOTED = re.compile(r'"[^"]*"?')
_COMMON = re.compile(r"(?<![\w-])[A-Za-z_][\w-]*(?![\w.-])")


@frozen
class Habit:
    """One row of the tables."""

    why: str  # may name groups of the match, as \\1
    pattern: str
    example: str
    write: str = ""  # empty: nothing is offered beside `why`
    instead: str | None = None
    call: str = ""
    place: str = "lmt"

    def applied(self, match: Match[str]) -> str | None:
        """What stands in place of the match; None where the row knows nothing."""
        if self.call:
            made: Callable[[Match[str]], str | None] = getattr(respelling, self.call)
            return made(match)
        return None if self.instead is None else match.expand(self.instead)

    @property
    def offers(self) -> bool:
        """Whether the row makes a line."""
        return bool(self.call) or self.instead is not None


@frozen
class Words:
    """Words of other tools. `tools` mean one thing wherever they stand; `names` are common; `dtypes` are element types."""

    tools: dict[str, str]
    names: dict[str, str]
    dtypes: dict[str, str]

    def of(self, line: str, own: frozenset[str], tools: bool) -> str:
        """What is written here for the first word of a line that another tool has. `own`: words that the language has."""
        table = self.tools if tools else self.names
        bare = line if line.startswith('"') else _QUOTED.sub(" ", line)  # of JSON the keys stand in quotes
        found = re.findall(r"[A-Za-z_][\w-]*", bare) if tools else _COMMON.findall(_NAMED.sub(" ", line))
        return next((table[w] for w in found if w in table and w not in own), "")


def _read(name: str) -> dict[str, object]:
    import tomllib  # most commands end without an error

    return tomllib.loads((_HERE / f"{name}.toml").read_text(encoding="utf-8"))


@cache
def habits() -> tuple[Habit, ...]:
    """All rows, in the order in which they are tried. Read at the first error of a process."""
    rows: list[Habit] = []
    for name in _FILES:
        listed = _read(name)["habit"]
        assert isinstance(listed, list)
        rows += (Habit(**row) for row in listed)
    return tuple(rows)


@cache
def words() -> Words:
    """The words of other tools."""
    return Words(**_read("words"))  # type: ignore[arg-type]  # three tables of texts


def foreign(name: str) -> str:
    """What is written here for a name of another tool, by the whole of it or its last part; empty where it is none."""
    known = words()
    for one in (name, name.rpartition(".")[2]):
        text = known.tools.get(one) or known.names.get(one)
        if text:
            return text
    kind = known.dtypes.get(name.rpartition(".")[2])
    return f"the element type stands behind the dims: `dtype {kind}`" if kind else ""
