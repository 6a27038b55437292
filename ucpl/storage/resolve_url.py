"""The local paths of paths and URLs that callers give.

Also of several paths as one source, `A+B`. This is fast for local paths.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from ucpl.errors import Label, fail
from ucpl.storage.cache_dirs import current_scope
from ucpl.storage.joined import is_joined, join, paths_in
from ucpl.storage.urls import file_at, is_url

if TYPE_CHECKING:
    from ucpl.storage.upload_target import UploadTarget

__all__ = ["get_upload_target", "is_resolved", "resolve_source", "resolve_target"]

_PLACES: dict[Path, UploadTarget] = {}


def is_resolved(path: str | Path) -> bool:
    """False for a URL, and for several paths as one source."""
    return not is_joined(path) and not is_url(path)


def resolve_source(path: str | Path, say: Callable[[str], object] = warnings.warn) -> Path:
    """The local path of a checkpoint to read.

    A local path is returned unchanged. A URL becomes its folder of sparse files, a vault its newest generation, several
    paths a folder of links.
    say: receives warnings about generations that may be newer and cannot be read.
    Raises: UcplError E185, E400, E437, E680-E683, E685, E690-E692.
    """
    _reject_empty(path, "a checkpoint")
    if is_joined(path):
        return join(str(path), [resolve_source(one, say) for one in paths_in(str(path))])
    if not is_url(path):
        return Path(path)
    if (here := file_at(str(path))) is not None:
        return here
    if str(path).startswith("vault:"):
        from ucpl.storage.vaults.snapshot_folder import get_skipped, snapshot_folder

        found = snapshot_folder(str(path))
        for text in get_skipped(str(path)):
            say(text)
        return found
    from ucpl.storage.sparse_files import make_sparse

    return make_sparse(path)


def resolve_target(path: str | Path) -> Path:
    """The local path at which a target is written.

    A local path is returned unchanged; a URL gets a temporary path. Raises: UcplError E185, E680.
    """
    _reject_empty(path, "a target")
    if not is_url(path):
        return Path(path)
    if (here := file_at(str(path))) is not None:
        return here
    if str(path).startswith("vault:"):
        remedy = "name a folder; into a vault, a running job saves (ucpl.vault)"
        fail("E680", f"{path} cannot be a target", Label(str(path)), remedy=remedy)
    from ucpl.storage.upload_target import make_upload_target

    made = make_upload_target(path)
    _PLACES[made.path] = made
    current_scope().callback(_PLACES.pop, made.path)
    return made.path


def get_upload_target(path: Path) -> UploadTarget | None:
    """The target in a store that a temporary path represents.

    None: the path is local.
    """
    return _PLACES.get(path)


def _reject_empty(path: str | Path, what: str) -> None:
    """Reject an empty path. Raises: UcplError E185.

    `Path("")` would be the current folder.
    """
    if path == "":
        fail("E185", f"the path of {what} is empty", Label("<call>"), remedy="Write a path; `.` is the current folder.")
