"""Targets in a store: the local staging path, and existing objects.

The runtime decides the time of each upload, and reports the run.
"""

from __future__ import annotations

from pathlib import Path

from ucpl.errors import calling
from ucpl.records import define
from ucpl.storage import cache_dirs
from ucpl.storage.cache_dirs import current_scope
from ucpl.storage.error_mapping import reject_source, reject_target
from ucpl.storage.objects import ObjectEntry, Objects, objects_at
from ucpl.storage.sparse_files import MANIFEST, UNFINISHED, ObjectTree, lay
from ucpl.storage.urls import split

__all__ = ["UploadTarget", "make_upload_target"]


@define(eq=False)
class UploadTarget:
    """A target in a store, and its local path."""

    url: str
    objects: Objects
    name: str  # of the target, below the objects' folder; "": all of a bucket
    path: Path

    def key(self, name: str) -> str:
        """The key of one of its files."""
        return f"{self.name}/{name}" if self.name else name

    def entries(self) -> list[ObjectEntry]:
        """The existing objects of the target. Raises: UcplError E503."""
        try:
            found = self.objects.entries(self.name)
            one = self.objects.entry(self.name) if self.name and not found else None
        except OSError as error:
            reject_target(error, self.url)
        return found if one is None else [one]

    @property
    def is_unfinished(self) -> bool:
        """True if a run has started to write there and not ended.

        Raises: UcplError E503.
        """
        keys = {entry.key for entry in self.entries()}
        return self.key(UNFINISHED) in keys and self.key(MANIFEST) not in keys

    def show(self) -> None:
        """Make the local path list the existing objects, as sparse files.

        Raises: UcplError E681, E682, E685.
        """
        try:
            lay(ObjectTree(self.url, self.objects, self.name, self.path))
        except OSError as error:
            reject_source(error, self.url)


def make_upload_target(path: str | Path) -> UploadTarget:
    """A new local path for a target's URL. Raises: UcplError E680."""
    url, above, name = split(path)
    here = cache_dirs.fresh() / (name or url.rpartition("/")[2])
    current_scope().enter_context(calling(str(here), url))
    return UploadTarget(url, objects_at(above), name, here)
