"""A format of ucpl in a separate package: .npy files with index.json.

The optimizer is included.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ucpl.registry import Format

if TYPE_CHECKING:
    from ucpl.files.checkpoint import Framework


class NpyFolder(Format):
    name = "npy_folder"
    title = "a folder of .npy files"
    layouts = ("npy_folder",)
    settings = ("has_masters",)
    forms = ("npy",)
    has_optimizer = True
    has_plan_groups = True
    has_groups_of_weights = True
    kept_values = frozenset({"global_steps"})

    def store(self) -> Framework:
        from npy_folder.files import Store

        return Store()


FORMAT = NpyFolder()
