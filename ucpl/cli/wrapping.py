"""Lines broken at spaces to the width of a terminal.

No word, path, name or quoted text is cut.

Output for other programs, into a file or a pipe, keeps its lines.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Iterator
from typing import IO

__all__ = ["Formatter", "width_of", "wrapped"]

_USUAL = 80  # columns of a terminal that gives none
_NARROWEST = 20  # columns: in fewer, no text can be read
_COLOR = re.compile("\x1b\\[[0-9;]*m")
_COMMAND = ("ucpl ", "python ")  # a shell continues with the next line after a backslash
_SOURCE = r"\s*[0-9]* \|"  # a line of a file, or the carets below it
_LABEL = r"\s*\S.{0,44}?(?:  +|: )(?=\S)"  # as in `read          12 bytes` and `  = help: text`
# A quoted text with its spaces, `name = value`, or a word; the spaces before it belong to it.
_WORD = r"""\s*(?:[^\s"'`]*[=(\[]|)(["'`])(?:(?!\1).){1,400}\1(?![^\s.,;:)\]])\S*|\s*\S+ = \S+|\s*\S+"""


def width_of(stream: IO[str]) -> int | None:
    """The width of lines: COLUMNS, or the terminal's.

    None: the stream is no terminal.
    """
    asked = os.environ.get("COLUMNS", "")
    try:
        if not stream.isatty():
            return None
        given = int(asked) if asked.isascii() and asked.isdecimal() and len(asked) < 7 else 0
        return max(given or os.get_terminal_size(stream.fileno()).columns or _USUAL, _NARROWEST)
    except (OSError, ValueError, AttributeError):
        return None


def wrapped(line: str, width: int | None, indent: int | None = None) -> list[str]:
    """The line in pieces of at most `width` characters.

    Longer words stay in one piece.

    Pieces after the first are indented as the text behind its label, or by `indent`.
    """
    plain = _COLOR.sub("", line)
    if width is None or len(plain) <= width or re.match(_SOURCE, plain):
        return [line]
    found = re.match(_LABEL, line)
    name = found[0] if found is not None and _size(found[0]) <= min(width // 2, 26) else ""
    label, text = _size(name), _size(name.rstrip())  # a text that fits no line stays next to its label
    inner = (label or len(plain) - len(plain.lstrip()) + 2) if indent is None else indent
    out, piece, end = [], "", ""
    for word, tail in _words(line, width - inner):
        least = label if _size(word.lstrip() + tail) > width else text
        if _size(piece) >= max(least, 1) and _size(piece + word + tail) > width:
            out.append(piece + end)
            word = word.lstrip()
            piece = " " * min(inner, max(width - _size(word + tail), 0))
        piece += word
        end = tail
    return [*out, piece]


def _words(line: str, room: int) -> Iterator[tuple[str, str]]:
    """Words with the spaces before them, and the end of each.

    A line that breaks after them has that end.
    """
    command = " \\" if line.lstrip().startswith(_COMMAND) else ""
    for found in re.finditer(_WORD, line):
        word = found[0]
        if word.strip() == "python":  # of a remedy: all that follows is its command
            command = " \\"
        if len(word.lstrip()) <= room:
            yield word, command
            continue
        yield from ((part, command) for part in re.findall(r"\s*\S+", word))


def _size(text: str) -> int:
    """The columns of a text, without its colors."""
    return len(_COLOR.sub("", text))


class Formatter(argparse.HelpFormatter):
    """The form of a verb's --help.

    Lists and examples keep their lines if they fit, and no word is cut.
    """

    def _split_lines(self, text: str, width: int) -> list[str]:
        return wrapped(" ".join(text.split()), max(width, _NARROWEST), 0)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        joined = re.sub(
            r"(?<=[^\s:])\n(?=[^\s])", " ", text
        )  # lines of a paragraph, which a docstring breaks elsewhere
        lines = [indent + line for line in joined.splitlines()]
        pieces = (piece for line in lines for piece in wrapped(line, width, None if line.startswith(" ") else 0))
        return "\n".join(pieces)
