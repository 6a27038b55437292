"""Quoted texts: from strings of the language to characters, and back."""

from __future__ import annotations

import re

from ucpl.errors import fail
from ucpl.language.source import Source

__all__ = ["HOLE", "is_dotted", "quote", "unquote"]

HOLE = re.compile(r'\{((?:"(?:[^"\\]|\\.)*"|[^{}:"])*)(?::([^{}]*))?\}')  # `{expr:format}` in a template

_DOTTED = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*\Z")
_ESCAPE = re.compile(r"\\(u\{([0-9A-Fa-f]{1,6})\}|.)")
_HALF = re.compile("[\ud800-\udfff]")  # surrogates: no encoding of texts has them alone
_PLAIN = {'"': '"', "\\": "\\", "n": "\n", "t": "\t", "r": "\r"}
_UNPRINTED = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\t": "\\t", "\r": "\\r"}


def is_dotted(name: str) -> bool:
    """True if a name needs no quotes: identifiers, with dots between."""
    return _DOTTED.match(name) is not None


def quote(text: str) -> str:
    """The text as a string of the language.

    Characters that do not print are written by their numbers.
    """
    if text.isprintable() and '"' not in text and "\\" not in text:
        return f'"{text}"'
    return '"' + "".join(_UNPRINTED.get(c) or (c if c.isprintable() else f"\\u{{{ord(c):x}}}") for c in text) + '"'


def unquote(literal: str, source: Source, start: int) -> str:
    """Characters of a string (with its quotes).

    `start` is its place in the source. Raises: UcplError E006, on an escape that the language does not have; E021 on
    half a character.
    """
    body = literal[1:-1]

    def character(match: re.Match[str]) -> str:
        number, plain = match[2], _PLAIN.get(match[1])
        if number is not None and int(number, 16) <= 0x10FFFF:
            return chr(int(number, 16))
        if plain is not None:
            return plain
        place = source.span(start + 1 + match.start(), start + 1 + match.end())
        fail("E006", f"`{match[0]}` is not an escape of the language", source.label(place, "not an escape"))

    value = _ESCAPE.sub(character, body) if "\\" in body else body
    if _HALF.search(value):
        place = source.span(start, start + len(literal))
        fail("E021", "a quoted text holds half a character", source.label(place, "no file can be written with it"))
    return value
