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

from collections.abc import Iterator
from typing import NamedTuple

from attrs import evolve

from ucpl.errors import Diagnostic, Label

__all__ = ["render_diagnostic"]

_SOURCE_MAX = 160  # characters of a source line that are shown
_RED, _BLUE, _BOLD, _RESET = "\x1b[1;31m", "\x1b[1;34m", "\x1b[1m", "\x1b[0m"


def render_diagnostic(diagnostic: Diagnostic, color: bool = False, *, brief: bool = False) -> str:
    """The diagnostic as lines of text, without a newline at the end.

    brief: without places that the message names, lines of shipped specs, and carets below a call.
    """
    red, blue, bold, reset = (_RED, _BLUE, _BOLD, _RESET) if color else ("", "", "", "")
    numbers = [str(label.line) for label in diagnostic.labels if label.line is not None]
    margin = " " * max((len(number) for number in numbers), default=1)
    first = _safe(diagnostic.message)
    lines = [f"{red}error[{diagnostic.code}]{reset}{bold}: {first}{reset}"]
    labels = _brief(diagnostic, first) if brief else diagnostic.labels
    for i, label in enumerate(labels):
        again = i > 0 and label.file == labels[i - 1].file and label.line is not None
        arrow = f"{margin} {blue}:::{reset}" if again else f"{margin}{blue}-->{reset}"
        lines.extend(_label(label, arrow, margin, _Colors(red if i == 0 else blue, blue, reset)))
    for note in diagnostic.notes:
        lines.append(f"{margin} {blue}={reset} {bold}note{reset}: {_indented(note, margin)}")
    if diagnostic.remedy:
        lines.append(f"{margin} {blue}={reset} {bold}help{reset}: {_indented(diagnostic.remedy, margin)}")
    return "\n".join(line.rstrip() for line in lines)


def _brief(diagnostic: Diagnostic, first: str) -> tuple[Label, ...]:
    """The places that a short form keeps."""
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
