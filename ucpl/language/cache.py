"""Files kept between processes, in the user's own cache folder.

They hold data, never code. A file that does not belong to this user alone is ignored, and nothing here fails loudly: a
caller can always make the kept data again.
"""

from __future__ import annotations

import contextlib
import os
import stat
import sys
from pathlib import Path

__all__ = ["cache_folder", "keep", "kept"]


def cache_folder() -> Path | None:
    """Folder of the cache; None if `UCPL_CACHE` is empty."""
    if "UCPL_CACHE" in os.environ:
        return Path(os.environ["UCPL_CACHE"]) if os.environ["UCPL_CACHE"] else None
    import platformdirs

    return platformdirs.user_cache_path("ucpl", appauthor=False)


def kept(path: Path) -> str | None:
    """Text of a kept file, or None if it cannot be trusted."""
    try:
        if not _belongs_to_user(path.parent.stat()):
            return None
        with path.open(encoding="utf-8") as file:
            if not _belongs_to_user(os.fstat(file.fileno())):
                return None
            return file.read()
    except (OSError, ValueError):
        return None


def keep(path: Path, text: str) -> None:
    """Keep a text completely or not at all, without errors."""
    import tempfile

    with contextlib.suppress(Exception):
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=".kept-")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
            os.replace(name, path)
        except BaseException:
            os.unlink(name)
            raise


def _belongs_to_user(status: os.stat_result) -> bool:
    if sys.platform == "win32":
        return True  # the profile's folders are private by default, and there are no owners to compare
    return status.st_uid == os.geteuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
