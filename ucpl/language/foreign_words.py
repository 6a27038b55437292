"""Words of other tools and their replacements (`suggestions.toml`)."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from ucpl.language.words import CLAUSE_WORDS, ELEMENT_TYPES
from ucpl.records import frozen

__all__ = ["Words", "foreign", "table", "words"]


@frozen
class Words:
    """Words of other tools.

    `advice` is keyed by word; `always` are those that mean one thing in every place; `dtypes` are element types;
    `keywords` are words that can replace the key, in the order in which they are tried.
    """

    advice: dict[str, str]
    always: frozenset[str]
    dtypes: dict[str, str]
    keywords: dict[str, tuple[str, ...]]


@cache
def table() -> dict[str, object]:
    """The file, read at the first error of a process."""
    import tomllib  # most commands end without an error

    return tomllib.loads((Path(__file__).parent / "suggestions.toml").read_text(encoding="utf-8"))


@cache
def words() -> Words:
    """The words of other tools."""
    advice: dict[str, str] = {}
    always: set[str] = set()
    for entry in table()["word"]:  # type: ignore[attr-defined]  # a list of tables
        names = entry["of"].split()
        advice |= dict.fromkeys(names, entry["advice"])
        always |= set(names) if entry.get("always") else set()
    keywords: dict[str, tuple[str, ...]] = {}
    for own, others in table()["keywords"].items():  # type: ignore[attr-defined]  # a table of texts
        for other in others.split():
            keywords[other] = (*keywords.get(other, ()), own)
    dtypes = {other: own for own, others in table()["dtypes"].items() for other in others.split()}  # type: ignore[attr-defined]
    return Words(advice, frozenset(always), dtypes, keywords)


def foreign(name: str) -> str:
    """Replacement for a name of another tool.

    All of the name is tried, then its last part. Empty if it is none.
    """
    known = words()
    last = name.rpartition(".")[2]
    text = known.advice.get(name) or known.advice.get(last)
    kind = last if last in ELEMENT_TYPES else known.dtypes.get(last)
    own = known.keywords.get(last, ("",))[0]
    if own in CLAUSE_WORDS | {"0", "1", "none"} and not text:
        return f"write `{'` or `'.join(known.keywords[last])}`"
    return text or (f"the element type comes after the dims: `dtype {kind}`" if kind else "")
