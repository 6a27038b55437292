"""Megatron-Core's distributed checkpoints (torch_dist).

`MegatronLegacy`, the files of Megatron-LM's ranks, is in legacy; `MegatronFSDP`, folders of Megatron-FSDP, in fsdp.

Megatron-Core's distributed format (torch_dist) is a folder of PyTorch's distributed format with common.pt and
metadata.json. Not here: the zarr format, which Megatron-Core itself reads no more.
"""

from __future__ import annotations

from pathlib import Path

from ucpl.extents import StoredTensor, Structure
from ucpl.files.checkpoint import Checkpoint, Skeleton
from ucpl.files.header_watch import watched
from ucpl.formats.megatron.demands import DEMANDS
from ucpl.formats.megatron.folder import found, step_of

__all__ = ["MegatronCore"]


class MegatronCore:
    name = "megatron_core"
    demands = DEMANDS

    def recognises(self, path: Path) -> bool:
        """Test for `.metadata` and files of Megatron-Core.

        They are in the folder, or in the one that a tracker names.
        """
        from ucpl.formats.dcp.folders import is_of_megatron

        return step_of(path, is_of_megatron) is not None

    @watched
    def open(self, path: Path) -> Checkpoint:
        """Read all headers.

        Raises: UcplError E455, E460, E520-E523, E530-E533, and errors of reading files (E400-E427).
        """
        from ucpl.formats.dcp.folders import is_of_megatron
        from ucpl.formats.megatron.reading import opened  # most checkpoints are others

        return opened(found(path, is_of_megatron))

    def skeleton(
        self, structure: Structure, targets: tuple[StoredTensor, ...], source: Checkpoint, tag: str | None
    ) -> Skeleton:
        """A file of each rank, `.metadata`, common.pt and metadata.json. Raises: UcplError E471."""
        from ucpl.formats.megatron.writing import skeleton

        return skeleton(structure, targets, source, tag)
