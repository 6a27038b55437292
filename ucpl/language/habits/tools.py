"""Words of other tools (`words.toml`), and the reader of the habit tables."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from ucpl.records import frozen

__all__ = ["Words", "foreign", "table", "words"]

_HERE = Path(__file__).parent

# A common word is no habit where it is a name: of a tensor on the left, in a path, a class behind `of`, in quotes.
_NAMED = re.compile(r'"[^"]*"?|^\s*[\w.-]+(?=\s*(?:\[[^]]*\])?\s*[=:])|\bof\s+\w+')
_QUOTED = re.compile(r'"[^"]*"?')
_COMMON = re.compile(r"(?<![\w-])[A-Za-z_][\w-]*(?![\w.-])")


@frozen
class Words:
    """Words of other tools.

    `tools` mean one thing in every place; `names` are common; `dtypes` are element types.
    """

    tools: dict[str, str]
    names: dict[str, str]
    dtypes: dict[str, str]

    def of(self, line: str, own: frozenset[str], tools: bool) -> str:
        """Replacement for another tool's word at the start of a line.

        `own`: words that the language has.
        """
        table = self.tools if tools else self.names
        bare = line if line.startswith('"') else _QUOTED.sub(" ", line)  # of JSON the keys stand in quotes
        found = re.findall(r"[A-Za-z_][\w-]*", bare) if tools else _COMMON.findall(_NAMED.sub(" ", line))
        return next((table[w] for w in found if w in table and w not in own), "")


def table(name: str) -> dict[str, object]:
    """One of the tables."""
    import tomllib  # most commands end without an error

    return tomllib.loads((_HERE / f"{name}.toml").read_text(encoding="utf-8"))


@cache
def words() -> Words:
    """The words of other tools."""
    return Words(**table("words"))  # type: ignore[arg-type]  # three tables of texts


def foreign(name: str) -> str:
    """Replacement for a name of another tool.

    All of the name is tried, then its last part. Empty if it is none.
    """
    known = words()
    for one in (name, name.rpartition(".")[2]):
        text = known.tools.get(one) or known.names.get(one)
        if text:
            return text
    kind = known.dtypes.get(name.rpartition(".")[2])
    return f"the element type comes after the dims: `dtype {kind}`" if kind else ""
