"""Reads a text for a test, which knows what kind of record stands where and takes it apart without asking."""

from __future__ import annotations

from typing import Any

from ucpl.language import parse

__all__ = ["read"]


def read(text: str, name: str = "<text>") -> Any:
    """The File of a text, as `parse` gives it; untyped."""
    return parse(text, name)
