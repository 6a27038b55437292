"""The line of text that a diagnostic points at, where the room that raised it did not give it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from attrs import evolve

from ucpl.errors import Diagnostic, Label
from ucpl.resources import spec_text

__all__ = ["with_source"]

_SIZE_MAX = 16 << 20  # characters of a text


def with_source(diagnostic: Diagnostic, arguments: Sequence[str] = ()) -> Diagnostic:
    """The diagnostic with the lines of its labels. `arguments` are the command's: a call among them is a text, too."""
    labels = (_called(label, diagnostic.message, arguments) for label in diagnostic.labels)
    return evolve(diagnostic, labels=tuple(map(_sourced, labels)))


def _called(label: Label, message: str, arguments: Sequence[str]) -> Label:
    """A place in a call of the command line: the one argument that has a word of the message there."""
    if label.file != "<call>" or label.line != 1 or label.source is not None:
        return label
    texts = [text.rpartition(".ucpl:")[2] for text in arguments]
    begin = (label.column or 1) - 1
    words = re.findall("`([^`]+)`", message)
    found = [text for text in texts if any(text.startswith(word, begin) for word in words)]
    return evolve(label, source=found[0]) if len(set(found)) == 1 else label


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
