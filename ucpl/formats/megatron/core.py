"""Megatron-Core's distributed checkpoints (torch_dist).

`MegatronLegacy`, the files of Megatron-LM's ranks, is in legacy; `MegatronFSDP`, folders of Megatron-FSDP, in fsdp.

Megatron-Core's distributed format (torch_dist) is a folder of PyTorch's distributed format with common.pt and
metadata.json. A folder of the zarr format, which Megatron-Core up to 0.15 reads, is refused by its name.
"""

from __future__ import annotations

import re
from pathlib import Path

from ucpl.errors import Label, fail
from ucpl.extents import StoredTensor, Structure
from ucpl.files.checkpoint import Checkpoint, Skeleton
from ucpl.files.header_watch import watched
from ucpl.files.texts import read_small
from ucpl.formats.megatron.demands import DEMANDS
from ucpl.formats.megatron.folder import found, step_of

__all__ = ["MegatronCore"]

BACKEND, METADATA = "metadata.json", ".metadata"
BACKEND_BYTES_MAX = 1 << 16
_ZARR = re.compile(rb'"sharded_backend"\s*:\s*"zarr"')


def is_of_zarr(path: Path) -> bool:
    """Test for a folder of Megatron-Core whose metadata.json names zarr."""
    if not (path / BACKEND).is_file() or (path / METADATA).exists():
        return False
    raw = read_small(path / BACKEND, BACKEND_BYTES_MAX)
    return raw is not None and _ZARR.search(raw) is not None


class MegatronCore:
    name = "megatron_core"
    demands = DEMANDS

    def recognises(self, path: Path) -> bool:
        """Test for `.metadata` and files of Megatron-Core.

        They are in the folder, or in the one that a tracker names.
        """
        from ucpl.formats.dcp.folders import is_of_megatron

        return step_of(path, is_of_megatron) is not None or step_of(path, is_of_zarr) is not None

    @watched
    def open(self, path: Path) -> Checkpoint:
        """Read all headers.

        Raises: UcplError E455, E457, E460, E520-E523, E530-E533, and errors of reading files (E400-E427).
        """
        from ucpl.formats.dcp.folders import is_of_megatron
        from ucpl.formats.megatron.reading import opened  # most checkpoints are others

        if step_of(path, is_of_megatron) is None and (step := step_of(path, is_of_zarr)) is not None:
            fail(
                "E457",
                "this checkpoint is of a kind that is not read yet: a zarr array for each tensor (--dist-ckpt-format zarr)",
                Label(str(step.root / BACKEND), where="sharded_backend"),
                remedy="Megatron-Core before 0.16 loads it: load the run there, save it with --ckpt-format torch_dist, and"
                " convert that folder",
            )
        return opened(found(path, is_of_megatron))

    def skeleton(
        self, structure: Structure, targets: tuple[StoredTensor, ...], source: Checkpoint, tag: str | None
    ) -> Skeleton:
        """A file of each rank, `.metadata`, common.pt and metadata.json. Raises: UcplError E471."""
        from ucpl.formats.megatron.writing import skeleton

        return skeleton(structure, targets, source, tag)
