"""Brackets of a text that need not parse: which of them are open at a place. Those in quotes and comments are none."""

from __future__ import annotations

import re

__all__ = ["CLOSING", "SKELETON", "open_brackets"]

SKELETON = re.compile(r'"(?:[^"\\\n]|\\[^\n])*"|#[^\n]*|[()\[\]{}]')
CLOSING = {"(": ")", "[": "]", "{": "}"}


def open_brackets(text: str, stop: int) -> list[int]:
    """Where the brackets stand that are still open at `stop`, the outermost first."""
    stack: list[int] = []
    for match in SKELETON.finditer(text, 0, stop):
        if match[0] in CLOSING:
            stack.append(match.start())
        elif match[0] in ")]}" and stack:
            stack.pop()
    return stack
