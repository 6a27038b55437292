"""Megatron-LM's legacy folders (--ckpt-format torch): a folder of each model-parallel rank in that of an iteration."""

from __future__ import annotations

from pathlib import Path

from ucpl.errors import Label, fail
from ucpl.extents import StoredTensor, Structure
from ucpl.stores.checkpoint import Checkpoint, Skeleton
from ucpl.stores.megatron.legacy_arguments import KNOWN_GLOBALS
from ucpl.stores.megatron.legacy_folder import step_of
from ucpl.stores.watching import watched

__all__ = ["MegatronLegacy"]


class MegatronLegacy:
    name = "megatron_legacy"
    known_globals = KNOWN_GLOBALS

    def recognises(self, path: Path) -> bool:
        """A folder of an iteration, or one whose tracker names one."""
        return step_of(path) is not None

    @watched
    def open(self, path: Path) -> Checkpoint:
        """Read all headers. Raises: UcplError E540-E548, and what the files raise (E400-E427)."""
        from ucpl.stores.megatron.legacy_reading import opened  # most checkpoints are others

        step = step_of(path)
        if step is None:
            fail("E540", f"{path} holds no folder of a rank", Label(str(path)))
        return opened(step)

    def skeleton(
        self, structure: Structure, targets: tuple[StoredTensor, ...], source: Checkpoint, tag: str | None
    ) -> Skeleton:
        """A folder of each rank, and the tracker beside the iteration. Raises: UcplError E471, E547."""
        from ucpl.stores.megatron.legacy_writing import skeleton

        return skeleton(structure, targets, source, tag)
