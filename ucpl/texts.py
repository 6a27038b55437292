"""Small UTF-8 files of the user (.ucpl, config.json), with a size limit.

A device has no end and a FIFO may never begin: neither is read.
"""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Union

from ucpl.errors import Label, fail
from ucpl.storage.reading import fetch_all

__all__ = ["TEXT_MAX", "Json", "is_endless", "is_text", "json_object", "read_text", "text_at"]

Json = Union[None, bool, int, float, str, list["Json"], dict[str, "Json"]]  # noqa: UP007 (it names itself)
TEXT_MAX = 64 << 20  # bytes
_DIGITS_MAX = 18  # of a whole number that surely fits 64 bits


def read_text(path: Path) -> str:
    """Read a text file of the user's.

    Raises: UcplError E170 if it cannot be read, E184 if it is no text.
    """
    try:
        with open(path, "rb", opener=_waiting_for_nobody) as file:
            state = os.fstat(file.fileno())
            if not stat.S_ISREG(state.st_mode):
                fail("E184", f"{path} is no regular file", Label(str(path)))
            if state.st_size <= TEXT_MAX:
                fetch_all(file.fileno())
            data = file.read(TEXT_MAX + 1)
    except (OSError, ValueError) as error:  # a ValueError: a path that no file can have
        remedy = "a layout of a file is FILE.ucpl:LAYOUT(...), in quotes for the shell" if "(" in str(path) else ""
        if isinstance(error, IsADirectoryError) or (isinstance(error, OSError) and os.path.isdir(path)):
            remedy = f"it is a folder: name a file in it{_in_folder(path)}"
        text = f"{path} cannot be read: {getattr(error, 'strerror', None) or error}"
        fail("E170", text, Label(str(path)), remedy=remedy)
    if len(data) > TEXT_MAX:
        fail("E184", f"{path} has more than {TEXT_MAX:,} bytes", Label(str(path)))
    try:
        return data.decode("utf-8").replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        fail(
            "E170",
            f"{path} cannot be read: it is no UTF-8 text, byte 0x{data[error.start]:02x} of line {line}",
            Label(str(path)),
            remedy="save it as UTF-8",
        )


def _in_folder(path: Path) -> str:
    """The text of a folder that has exactly one."""
    try:
        found = [name for name in sorted(os.listdir(path)) if name.endswith(".ucpl")]
    except OSError:  # a folder that may not be looked into
        return ""
    return f", {path / found[0]}" if len(found) == 1 else ""


def text_at(path: str) -> str | None:
    """The text of a file, if there is one, for imports.

    Raises: as `read_text` for a file that is no text.
    """
    try:
        if not Path(path).exists() or Path(path).is_dir():
            return None
    except (OSError, ValueError):
        return None  # no file can have this name
    return read_text(Path(path))


def is_endless(path: str | Path) -> bool:
    """Return True for a device, a pipe or a socket."""
    return os.path.exists(path) and not (os.path.isfile(path) or os.path.isdir(path))


def _waiting_for_nobody(path: str, flags: int) -> int:
    """Open a FIFO without waiting for its writer.

    Regular files are opened as usual.
    """
    return os.open(path, flags | os.O_NONBLOCK)


def is_text(text: str) -> bool:
    """Test whether a text can be written as UTF-8.

    Pickles and JSON may hold halves of characters.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def json_object(text: str) -> dict[str, Json] | str:
    """The object of a JSON text, or the reason for its absence.

    Integers beyond 64 bits become floats: none is a size.
    """
    try:
        value = json.loads(text, parse_int=_number)
    except (ValueError, RecursionError) as error:
        return str(error)[:200]
    return value if isinstance(value, dict) else "no JSON object"


def _number(digits: str) -> int | float:
    return int(digits) if len(digits) <= _DIGITS_MAX else float(digits)
