"""One text: its places, as labels, and the limits of its size.

A person can open a label's place.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from ucpl.errors import Label
from ucpl.language.nodes import Span
from ucpl.records import frozen

__all__ = [
    "CALL", "CLOSING", "SKELETON", "Source", "open_brackets", "version_of", "DEPTH_MAX", "INDICES_MAX", "INTEGER_MAX",
    "NAME_CHARACTERS_MAX", "STATEMENTS_MAX", "TEXT_CHARACTERS_MAX", "why_too_large", "why_too_many", "why_unwritten",
]  # fmt: skip

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


CALL = "<call>"  # the name of a command line's call: no file has its text


@frozen
class Source:
    """A text, its name, and its begin in its file."""

    name: str
    text: str
    line: int = 1  # of the first character, 1-based
    column: int = 1

    @property
    def line_text(self) -> str:
        """The line that spans carry.

        Of a text that is no file, it is all of the text.
        """
        return self.text if self.name == CALL else ""

    def span(self, start: int, stop: int) -> Span:
        """The span of the characters start .. stop."""
        above = self.text.count("\n", 0, start)
        column = start - self.text.rfind("\n", 0, start)  # rfind gives -1 on the first line: column is 1-based
        return Span(
            start, stop, self.line + above, column + (self.column - 1 if above == 0 else 0), self.name, self.line_text
        )

    def label(self, span: Span, text: str = "") -> Label:
        """Label at a span of this text.

        It shows the source line, unless the text is only a part of a line.
        """
        begin = self.text.rfind("\n", 0, span.start) + 1
        end = self.text.find("\n", span.start)
        line = self.text[begin : end if end >= 0 else None].rstrip("\r")
        length = max(1, min(span.stop, begin + len(line)) - span.start)
        whole = self.line == 1 and self.column == 1
        return Label(self.name, text, span.line, span.column, length, line if whole else None)


_HEADER = re.compile(r"(?:\s|#[^\n]*(?![^\n]))*ucpl[ \t]+(\d{1,9})\b")


def version_of(text: str) -> int:
    """The version of the language that a text states, or 0."""
    found = _HEADER.match(text)
    return int(found[1]) if found else 0


# ---- brackets of a text that need not parse --------------------------------------------------------------------------

SKELETON = re.compile(r'"(?:[^"\\\n]|\\[^\n])*"|#[^\n]*|[()\[\]{}]')
CLOSING = {"(": ")", "[": "]", "{": "}"}


def open_brackets(text: str, stop: int) -> list[int]:
    """Places of the brackets that are open at `stop`, the outermost first."""
    stack: list[int] = []
    for match in SKELETON.finditer(text, 0, stop):
        if match[0] in CLOSING:
            stack.append(match.start())
        elif match[0] in ")]}" and stack:
            stack.pop()
    return stack
