"""The line of text that a diagnostic points at, where the room that raised it did not give it."""

from __future__ import annotations

from pathlib import Path

from attrs import evolve

from ucpl.errors import Diagnostic, Label
from ucpl.resources import spec_text

__all__ = ["with_source"]

_SIZE_MAX = 16 << 20  # characters of a text


def with_source(diagnostic: Diagnostic) -> Diagnostic:
    """The diagnostic with the lines of its labels. A label in a call has its text with it."""
    return evolve(diagnostic, labels=tuple(map(_sourced, diagnostic.labels)))


def _sourced(label: Label) -> Label:
    if label.line is None or label.source is not None:
        return label
    lines = _lines(label.file)
    return evolve(label, source=lines[label.line - 1]) if label.line <= len(lines) else label


def _lines(name: str) -> tuple[str, ...]:
    try:
        if name.startswith("specs/") and not Path(name).is_file():
            return tuple(spec_text(name.removeprefix("specs/")).splitlines())
        path = Path(name)
        if not path.is_file() or path.stat().st_size > _SIZE_MAX:
            return ()
        return tuple(path.read_text(encoding="utf-8").splitlines())
    except (OSError, UnicodeDecodeError, KeyError):
        return ()
