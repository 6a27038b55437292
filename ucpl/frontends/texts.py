"""Texts of the user's: .ucpl files from the disk, for the rooms that know texts and never files.

Only regular files are read, and no more of one than a text may have: a device or a pipe would be read without end.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from ucpl.errors import Label, fail
from ucpl.syntax.limits import TEXT_CHARACTERS_MAX

__all__ = ["read_text", "text_at"]

BYTES_MAX = 4 * TEXT_CHARACTERS_MAX  # a character of UTF-8 has at most four


def read_text(path: Path) -> str:
    """A text file. Raises: UcplError E170 where it cannot be read."""
    try:
        return _text(path)
    except UnicodeDecodeError:
        reason = "it is no UTF-8 text"
    except OSError as error:
        reason = error.strerror or str(error)
    except ValueError:
        reason = "no file can have this name"
    fail("E170", f"{path} cannot be read: {reason}", Label(str(path)))


def text_at(path: str) -> str | None:
    """The text of a file that may be there: what `layout.load` asks for imports. Raises: UcplError E170 for what is no text."""
    try:
        if not Path(path).exists() or Path(path).is_dir():
            return None
    except (OSError, ValueError):
        return None  # no file can have this name
    return read_text(Path(path))


def _text(path: Path) -> str:
    # Not blocking: opening a pipe would wait for someone to write into it.
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(handle, "rb") as file:
        kind = os.fstat(handle).st_mode
        if stat.S_ISDIR(kind):
            raise IsADirectoryError(None, "Is a directory")
        if not stat.S_ISREG(kind):
            raise OSError(None, "it is a device or a pipe, and no regular file")
        data = file.read(BYTES_MAX + 1)
    if len(data) > BYTES_MAX:
        raise OSError(None, f"it has more than {BYTES_MAX} bytes")
    return data.decode("utf-8").replace("\r\n", "\n").replace("\r", "\n")
