"""Reads a text for a test.

The test knows the kind of each record, so this module does not check kinds.
"""

from __future__ import annotations

from typing import Any

from ucpl.language import parse

__all__ = ["read"]


def read(text: str, name: str = "<text>") -> Any:
    """The File of a text, as `parse` gives it; untyped."""
    return parse(text, name)
