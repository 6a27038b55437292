"""Finds the comments and blank lines of a text, and the statement that each belongs to.

Records know nothing of comments: only the formatter needs them, and two texts that differ in comments are equal.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from attrs import Factory

from ucpl.records import frozen
from ucpl.syntax import nodes

__all__ = ["Notes", "comments_of"]

_SPACE = " \t\r"
_COMMENT = re.compile(r'"(?:[^"\\\n]|\\[^\n])*"|#[^\n]*')
_HEADER = re.compile(r"#[^\n]*|ucpl[ \t]+[0-9]+")
_BRACE = re.compile(r'"(?:[^"\\\n]|\\[^\n])*"|#[^\n]*|\{')


@frozen
class Notes:
    """What stands around the statements of one text. Statements are known by where they start.

    `above`: the lines before a statement, "" for a blank one. `beside`: the comment after it on its last line.
    A body has more: `opened` is beside its brace, `below` stands before the brace that closes it (for the whole
    file, before the end), under the start of the model or layout (-1 for the file).
    """

    above: dict[int, list[str]] = Factory(dict)
    beside: dict[int, str] = Factory(dict)
    opened: dict[int, str] = Factory(dict)
    below: dict[int, list[str]] = Factory(dict)
    header_above: list[str] = Factory(list)
    header_beside: list[str] = Factory(list)


_Item = nodes.Statement | nodes.ModelItem | nodes.LayoutItem


def comments_of(file: nodes.File) -> Notes:
    """The notes of a file, from the text that it was parsed from."""
    notes = Notes()
    text = file.text + "\n"  # so that a comment at the very end has a line
    header = next(m for m in _HEADER.finditer(text) if not m[0].startswith("#"))
    notes.header_above.extend(_lines(text[: header.start()]))
    notes.header_beside.append(_sequence(notes, text, file.statements, range(header.end(), len(text)), -1))
    return notes


def _sequence(notes: Notes, text: str, items: Sequence[_Item], within: range, owner: int) -> str:
    """Note what stands around items that follow each other within a part of the text; return what is beside its begin."""
    beside_begin = ""
    before: int | None = None
    place = within.start
    for item in (*items, None):
        start = within.stop if item is None else item.span.start
        rest, _, lines = text[place:start].partition("\n")
        beside = rest[rest.find("#") :].rstrip(_SPACE) if "#" in rest else ""
        if before is None:
            beside_begin = beside
        else:
            notes.beside[before] = beside
        above = _lines(lines)
        if item is None:
            notes.below[owner] = above
            break
        stop = item.span.stop
        if isinstance(item, nodes.Model | nodes.Layout):
            brace = next(m.end() for m in _BRACE.finditer(text, start) if m[0] == "{")
            notes.opened[start] = _sequence(notes, text, item.items, range(brace, item.span.stop - 1), start)
            stop = brace
        notes.above[start] = above + _inside(text, start, stop)
        before, place = start, item.span.stop
    return beside_begin


def _lines(text: str) -> list[str]:
    """The comments of whole lines, with at most one blank line between two. What follows the last newline is indent."""
    kept: list[str] = []
    for line in text.split("\n")[:-1]:
        line = line.strip(_SPACE)
        if line or not kept or kept[-1]:
            kept.append(line)
    return kept


def _inside(text: str, start: int, stop: int) -> list[str]:
    """The comments in the middle of a statement. They move above it: its lines are joined."""
    return [m[0].rstrip(_SPACE) for m in _COMMENT.finditer(text, start, stop) if m[0].startswith("#")]
