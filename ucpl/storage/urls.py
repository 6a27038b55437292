"""URLs of checkpoints.

The functions are fast: every path of a caller passes them.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from urllib.parse import unquote

from ucpl.errors import Label, fail

__all__ = ["OBJECTS", "file_at", "is_url", "split"]

# Schemes of obstore; fsspec handles all others.
OBJECTS = ("s3", "s3a", "gs", "az", "azure", "abfs", "abfss", "adl")
_URL = re.compile(r"([a-z][a-z0-9+.-]+):/+(.*)", re.DOTALL)  # pathlib makes one slash of two


def is_url(text: str | Path) -> bool:
    """True for a URL (`file://` included).

    A name that exists as a local path is a path.
    """
    found = str(text)
    if found.startswith("vault:"):  # of a local folder, whose path may be relative
        return found != "vault:" and not os.path.lexists(found)
    return ":/" in found and _URL.fullmatch(found) is not None and not os.path.lexists(found)


def split(text: str | Path) -> tuple[str, str, str]:
    """(complete URL, URL of the parent folder, name there).

    The name of a complete bucket is empty. Raises: UcplError E680.
    """
    found = _URL.fullmatch(str(text))
    assert found is not None
    scheme, rest = found[1], found[2].rstrip("/")
    begin = f"{scheme}:///" if ":///" in str(text) else f"{scheme}://"  # of some stores a path begins so
    steps = rest.split("/")
    if not rest or any(step in ("", ".", "..") or "\0" in step for step in steps):
        fail(
            "E680", f"{text} is not the URL of an object or folder", Label(str(text)), remedy="write s3://BUCKET/FOLDER"
        )
    url = f"{begin}{rest}"
    if len(steps) == 1:
        return url, url, ""
    return url, f"{begin}{'/'.join(steps[:-1])}", steps[-1]


def file_at(text: str) -> Path | None:
    """The local path of a file:// URL."""
    found = _URL.fullmatch(text)
    return Path("/" + unquote(found[2])) if found is not None and found[1] == "file" else None
