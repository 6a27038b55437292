"""Small text files next to tensors.

Regular files only, with a size limit.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

from ucpl.errors import Label, fail
from ucpl.files.zips import open_file
from ucpl.storage.reading import pread

NAME_BYTES_MAX = 4096
_BLOCK = 4096  # bytes that are looked for past the end of a file


def read_small(path: Path, most: int) -> bytes | None:
    """A file of at most `most` bytes, or None if larger.

    Raises: UcplError E400.
    """
    fd = open_file(path, path.name)
    try:
        try:
            size, raw = os.fstat(fd).st_size, b""  # a read of `most` bytes has a buffer of as many
            while part := pread(fd, min(most, max(size, len(raw) + _BLOCK)) + 1 - len(raw), len(raw)):
                raw += part
        finally:
            os.close(fd)  # which may fail, too, where a disk is at its end
    except OSError as error:
        fail("E400", f"{path.name} cannot be read: {error.strerror or error}", Label(str(path)))
    return raw if len(raw) <= most else None


def read_name(path: Path) -> str | None:
    """The one name in a text file (`latest`), or None."""
    raw = read_small(path, NAME_BYTES_MAX)
    if raw is None:
        return None
    try:
        name = raw.decode("utf-8").strip()
    except UnicodeDecodeError:
        return None
    return name if name and "\n" not in name and "\0" not in name else None


def names_like(folder: Path, end: str) -> list[str]:
    """Sorted names in a folder with this end.

    Raises: OSError if it cannot be listed: globs may find nothing there.
    """
    return sorted(name for name in os.listdir(folder) if name.endswith(end))


def is_inside(path: str) -> bool:
    """Test whether a relative path stays in its folder, ignoring links."""
    parts = PurePosixPath(path).parts
    return bool(parts) and not path.startswith("/") and ".." not in parts and "\0" not in path


def check_inside(folder: Path, files: Iterable[str]) -> None:
    """Check that files stay in a folder.

    Raises: UcplError E393.
    """
    for file in files:
        if not is_inside(file):
            fail(
                "E393",
                f"the spec names the file {file!a}, outside of the checkpoint's folder",
                Label(str(folder), where=file),
            )
