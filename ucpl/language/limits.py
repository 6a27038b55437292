"""Limits of the size of a text.

Each limit has its own code; none is near the needs of a real checkpoint. A file can come from anybody, and a short one
can ask for much: every count below is one that some later stage pays for in memory, in time, or in depth of recursion.
"""

from __future__ import annotations

from collections.abc import Iterable

__all__ = [
    "DEPTH_MAX",
    "INDICES_MAX",
    "INTEGER_MAX",
    "NAME_CHARACTERS_MAX",
    "STATEMENTS_MAX",
    "TEXT_CHARACTERS_MAX",
    "why_too_large",
    "why_too_many",
    "why_unwritten",
]

TEXT_CHARACTERS_MAX = 8 * 1024 * 1024  # infer writes 100 to 240 characters a tensor: 35,000 tensors of long names
STATEMENTS_MAX = 200_000
DEPTH_MAX = 64  # of brackets, and of operators in one expression; a walker spends up to six frames a level
INDICES_MAX = 16  # of one entry: each multiplies the tensors that it names
NAME_CHARACTERS_MAX = 1024
INTEGER_MAX = 2**63 - 1  # an index column holds it


def why_unwritten(names: Iterable[str], *, in_keys: bool) -> str:
    """Reason why no text could name tensors so; empty if one can.

    The text must be readable again. in_keys: names occur in templates, too.
    """
    for name in names:
        if name == "*":
            return "a tensor is called `*`, which means all in the language"
        if not name:
            return "the name of a tensor is empty"
        if len(name) > NAME_CHARACTERS_MAX:
            return (
                f"the name of a tensor has {len(name):,} characters; a text may have names of {NAME_CHARACTERS_MAX:,}"
            )
        if in_keys and {"{", "}"} & {*name}:
            return f"a tensor is called `{name[:40]}`: braces stand for numbers in the language"
    return ""


def why_too_large(text: str) -> str:
    """The same of a text as it is."""
    large = len(text) > TEXT_CHARACTERS_MAX
    return f"the text has {len(text):,} characters; {TEXT_CHARACTERS_MAX:,} are read" if large else ""


def why_too_many(names: Iterable[str]) -> str:
    """The same of a text with two lines for each name.

    Nothing is printed for it.
    """
    least = 2 * sum(len(name) + len("  =\n") for name in names)
    large = least > TEXT_CHARACTERS_MAX
    return f"the text has {least:,} characters and more; {TEXT_CHARACTERS_MAX:,} are read" if large else ""
