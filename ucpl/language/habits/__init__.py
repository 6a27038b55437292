"""Habits of other languages and tools, with the line to write instead.

The tables are data (`*.toml` next to this file). A row has a pattern of a line that the parser refuses, tried if it
covers the place of the refusal. The match is replaced by `instead`, or by the result of the function `call` of
`respelling`; the line is read again, and other rows continue with it. Only a line that can be read is offered
(`rewriting`). A row without either gives `why` alone.

In a pattern `<N>` is a name, `<P>` a path of names, `<A>` an axis of a mesh of this text, `<T>` a tensor of its model,
`<S>` space. `place`: l inside a layout, m a model, t outside both, h at the version. `example` is a line with the
habit, and `write` is the offer for it: a test reads both.

`words.toml` has words of other tools for which no line can be made, and the words of this language for each.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from re import Match

from ucpl.language.habits import respelling
from ucpl.language.habits.tools import Words, foreign, table, words
from ucpl.records import frozen

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


@frozen
class Habit:
    """One row of the tables."""

    why: str  # may name groups of the match, as \\1
    pattern: str
    example: str
    write: str = ""  # empty: the offer is `why` alone
    instead: str | None = None
    call: str = ""
    place: str = "lmt"

    def applied(self, match: Match[str]) -> str | None:
        """Replacement of the match; None if the row has none."""
        if self.call:
            made: Callable[[Match[str]], str | None] = getattr(respelling, self.call)
            return made(match)
        return None if self.instead is None else match.expand(self.instead)

    @property
    def offers(self) -> bool:
        """True if the row makes a line."""
        return bool(self.call) or self.instead is not None


@cache
def habits() -> tuple[Habit, ...]:
    """All rows, in the order in which they are tried.

    They are read at the first error of a process.
    """
    rows: list[Habit] = []
    for name in _FILES:
        listed = table(name)["habit"]
        assert isinstance(listed, list)
        rows += (Habit(**row) for row in listed)
    return tuple(rows)
