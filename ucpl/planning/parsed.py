"""Checked access to a plan's JSON.

A value has the type that it must have, or is refused. Each function returns the typed value, or raises ValueError,
which `load_plan` turns into an error about the file.
"""

from __future__ import annotations

import json
import math
from typing import Any, NoReturn

from ucpl.extents.structure import Plain

__all__ = ["NUMBER_MAX", "Json", "items", "plain", "read_json", "table", "text", "texts", "whole", "wholes"]

Json = Any  # the result of read_json: checked as it is parsed
NUMBER_MAX = 1 << 62


def read_json(raw: bytes) -> Json:
    """JSON in UTF-8 without infinities, with writable texts.

    Raises: ValueError, RecursionError.
    """
    value = json.loads(raw.decode(), parse_constant=_no_number)
    if b"\\ud" in raw or b"\\uD" in raw:  # nothing but an escape makes half of a character
        json.dumps(value, ensure_ascii=False).encode()
    return value


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number")


def text(value: Json) -> str:
    if type(value) is not str:
        raise ValueError(f"{ascii(value)[:80]} is no text")
    return value


def texts(value: Json) -> tuple[str, ...]:
    return tuple(map(text, items(value)))


def whole(value: Json, low: int = 0, high: int = NUMBER_MAX) -> int:
    """A whole number from `low` to below `high`."""
    if type(value) is not int or not low <= value < high:
        raise ValueError(f"{ascii(value)[:80]} is no whole number from {low}")
    return value


def wholes(value: Json) -> tuple[int, ...]:
    return tuple(map(whole, items(value)))


def items(value: Json) -> list[Json]:
    if type(value) is not list:
        raise ValueError(f"{ascii(value)[:80]} is no list")
    return value


def table(value: Json) -> dict[str, Json]:
    if type(value) is not dict:
        raise ValueError(f"{ascii(value)[:80]} is no table")
    return value


def plain(value: Json) -> Plain:
    """A value of a setting."""
    if type(value) is float and not math.isfinite(value):
        raise ValueError(f"{value} is no number")
    if type(value) is int:
        return whole(value, -NUMBER_MAX)
    if value is not None and type(value) not in (str, bool, float):
        raise ValueError(f"{ascii(value)[:80]} is no value of a setting")
    made: Plain = value
    return made
