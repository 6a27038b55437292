"""Megatron-Core's distributed format (torch_dist): a folder of PyTorch's distributed format with common.pt and metadata.json.

Not here: Megatron-LM's legacy files of ranks, and the zarr format, which Megatron-Core itself reads no more.
"""

from __future__ import annotations

from pathlib import Path

from ucpl.extents import StoredTensor, Structure
from ucpl.stores.checkpoint import Checkpoint, Skeleton
from ucpl.stores.megatron.classes import KNOWN_GLOBALS
from ucpl.stores.megatron.folder import step_of
from ucpl.stores.watching import watched

__all__ = ["MegatronCore"]

OTHERS = ("common.pt", "metadata.json")


class MegatronCore:
    name = "megatron_core"
    known_globals: frozenset[str] = KNOWN_GLOBALS

    def recognises(self, path: Path) -> bool:
        """`.metadata` beside the files of Megatron-Core's own, here or in the folder that a tracker leads to."""
        if not path.is_dir():
            return False
        from ucpl.stores.dcp.metadata import METADATA

        root = step_of(path).root
        return (root / METADATA).is_file() and any((root / name).exists() for name in OTHERS)

    @watched
    def open(self, path: Path) -> Checkpoint:
        """Read all headers. Raises: UcplError E455, E460, E520-E523, E530-E533, and what the files raise (E400-E427)."""
        from ucpl.stores.megatron.reading import opened  # most checkpoints are others

        return opened(step_of(path))

    def skeleton(
        self, structure: Structure, targets: tuple[StoredTensor, ...], source: Checkpoint, tag: str | None
    ) -> Skeleton:
        """A file of each rank, `.metadata`, common.pt and metadata.json. Raises: UcplError E471."""
        from ucpl.stores.megatron.writing import skeleton

        return skeleton(structure, targets, source, tag)
