"""The tokens of any text.

Nothing is an error, so a line that is being typed has tokens, too.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from typing import Literal

from ucpl.errors import UcplError
from ucpl.language.source import Source
from ucpl.language.words import unquote
from ucpl.records import frozen

__all__ = ["Kind", "LineStarts", "Token", "tokens"]

Kind = Literal["comment", "string", "name", "number", "sign", "newline"]
_TOKEN = re.compile(
    r"(?P<comment>#[^\n]*)"
    r'|(?P<string>"(?:[^"\\\n]|\\[^\n])*"?)'  # one that does not end ends with its line
    r"|(?P<name>[A-Za-z_][A-Za-z0-9_]*(?:\.[A-Za-z_][A-Za-z0-9_]*)*(?:\.(?![.]))?)"  # `config.` is being typed
    r"|(?P<number>[0-9]+)"
    r"|(?P<newline>\n)"
    r"|(?P<sign>->|\.\.\.|\.\.|==|!=|<=|>=|[^\s])"
)


@frozen
class Token:
    """A word, a quoted text or a sign. Characters start ..

    Stop of the text.
    """

    kind: Kind
    text: str
    start: int
    stop: int

    @property
    def value(self) -> str:
        """The named value: a quoted text without its quotes."""
        if self.kind != "string":
            return self.text
        try:
            return unquote(self.text if self.is_whole else f'{self.text}"', Source("", self.text), 0)
        except UcplError:
            return self.text.strip('"')

    @property
    def is_whole(self) -> bool:
        """Return True if a quoted text ends."""
        return len(self.text) > 1 and self.text.endswith('"')

    @property
    def is_name(self) -> bool:
        return self.kind in ("name", "string")


def tokens(text: str) -> list[Token]:
    """All of them in order, comments and newlines as well."""
    return [Token(m.lastgroup, m[0], m.start(), m.end()) for m in _TOKEN.finditer(text)]  # type: ignore[arg-type]


class LineStarts:
    """Convert offsets of a text to (line, character), and back.

    Both count from 0, in characters.
    """

    def __init__(self, text: str) -> None:
        self.length = len(text)
        self.starts = [0, *(m.end() for m in re.finditer("\n", text))]

    def place(self, offset: int) -> tuple[int, int]:
        offset = max(0, min(offset, self.length))
        line = bisect_right(self.starts, offset) - 1
        return line, offset - self.starts[line]

    def offset(self, line: int, character: int) -> int:
        """The offset of a place.

        One behind a line's end is its end.
        """
        if line >= len(self.starts):
            return self.length
        line = max(0, line)
        end = self.starts[line + 1] - 1 if line + 1 < len(self.starts) else self.length
        return max(self.starts[line], min(self.starts[line] + max(0, character), end))
