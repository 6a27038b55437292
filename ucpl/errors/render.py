"""Render diagnostics as text: message, place, source line, remedy.

    error[E001]: unexpected `|`
      --> gpt.ucpl:3:22
       |
     3 |   attn.qkv = (q: r d | k: d) h
       |                      ^
       = help: parts stand end to end with `+`, as in (q: r d + k: d)

Texts and names come from files that anybody may have written: characters that a terminal would obey are replaced.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import PurePath
from typing import NamedTuple

from attrs import evolve

from ucpl.errors import Diagnostic, Label

__all__ = ["render_diagnostic", "shorter"]

_SOURCE_MAX = 160  # characters of a source line that are shown
_CLAUSE = re.compile(r"; |, or |\. (?=[A-Z`-])")  # the end of a clause of a remedy
_RED, _BLUE, _BOLD, _RESET = "\x1b[1;31m", "\x1b[1;34m", "\x1b[1m", "\x1b[0m"


def render_diagnostic(diagnostic: Diagnostic, color: bool = False) -> str:
    """The diagnostic as lines of text, without a newline at the end."""
    red, blue, bold, reset = (_RED, _BLUE, _BOLD, _RESET) if color else ("", "", "", "")
    numbers = [str(label.line) for label in diagnostic.labels if label.line is not None]
    margin = " " * max((len(number) for number in numbers), default=1)
    first = _safe(diagnostic.message)
    lines = [f"{red}error[{diagnostic.code}]{reset}{bold}: {first}{reset}"]
    for i, label in enumerate(diagnostic.labels):
        again = i > 0 and label.file == diagnostic.labels[i - 1].file and label.line is not None
        arrow = f"{margin} {blue}:::{reset}" if again else f"{margin}{blue}-->{reset}"
        lines.extend(_label(label, arrow, margin, _Colors(red if i == 0 else blue, blue, reset)))
    for note in diagnostic.notes:
        lines.append(f"{margin} {blue}={reset} {bold}note{reset}: {_indented(note, margin)}")
    if diagnostic.remedy:
        lines.append(f"{margin} {blue}={reset} {bold}help{reset}: {_indented(diagnostic.remedy, margin)}")
    return "\n".join(line.rstrip() for line in lines)


def shorter(diagnostic: Diagnostic) -> Iterator[Diagnostic]:
    """Shorter forms; the last has a message and a clause.

    Places that the message names go first, then other places, notes, and clauses of the remedy from its end. Lines of
    a user's own text stay.
    """
    first = _safe(diagnostic.message)
    yield (less := evolve(diagnostic, labels=_brief(diagnostic, first)))
    named = any(PurePath(label.file).name in first for label in less.labels)
    shown = tuple(label for label in less.labels if label.source is not None)
    yield (less := evolve(less, labels=shown if named or shown else less.labels[:1]))
    yield (less := evolve(less, labels=shown, notes=less.notes if shown else ()))
    remedy = less.remedy
    ends = [m.start() for m in _CLAUSE.finditer(remedy) if remedy.count("`", 0, m.start()) % 2 == 0]
    for end in reversed(ends):
        yield evolve(less, remedy=f"{remedy[:end]} …")


def _brief(diagnostic: Diagnostic, first: str) -> tuple[Label, ...]:
    """Places that a short form keeps.

    Not kept: those that the message names, lines of shipped specs, and carets below a call.
    """
    calls = [label.source for label in diagnostic.labels if label.file == "<call>" and label.source is not None]
    kept = tuple(Label(call) for call in dict.fromkeys(calls))
    for label in diagnostic.labels:
        of_call = label.file.startswith("<") or (label.line is None and label.file.endswith(")"))
        if not of_call and not label.file.startswith("specs/") and label.file not in first:
            kept += (evolve(label, where="") if label.where in first else label,)
    return kept


class _Colors(NamedTuple):
    own: str  # of the carets
    blue: str
    reset: str


def _label(label: Label, arrow: str, margin: str, colors: _Colors) -> Iterator[str]:
    own, blue, reset = colors
    if label.line is None:
        parts = [label.file, label.where, label.text]
        yield f"{arrow} {': '.join(_safe(part) for part in parts if part)}"
        return
    column = label.column or 1
    yield f"{arrow} {_safe(label.file)}:{label.line}:{column}"
    if label.source is None:
        if label.text:
            yield f"{margin} {blue}={reset} {_safe(label.text)}"
        return
    source, column = _window(label.source, column)
    length = max(1, min(label.length, len(source) - column + 1))
    yield f"{margin} {blue}|{reset}"
    yield f"{blue}{str(label.line).rjust(len(margin))} |{reset} {source}"
    text = f" {_safe(label.text)}" if label.text else ""
    yield f"{margin} {blue}|{reset} {' ' * (column - 1)}{own}{'^' * length}{text}{reset}"


def _window(source: str, column: int) -> tuple[str, int]:
    """The part of a long line around a column, with that column.

    A tab takes one place, as a space does.
    """
    source = _safe(source.replace("\t", " "))
    if len(source) <= _SOURCE_MAX:
        return source, column
    begin = max(0, min(column - 1 - _SOURCE_MAX // 2, len(source) - _SOURCE_MAX))
    shown = source[begin : begin + _SOURCE_MAX]
    return ("…" + shown[1:] if begin else shown), column - begin


def _safe(text: str) -> str:
    """Replace each character that does not print by one mark."""
    return text if text.isprintable() else "".join(c if c.isprintable() else "\ufffd" for c in text)


def _indented(text: str, margin: str) -> str:
    """A note of several lines, set under its first."""
    return f"\n{margin}   ".join(_safe(line) for line in text.split("\n"))
