"""Megatron-LM's legacy folders (--ckpt-format torch): one folder per model-parallel rank.

They are in the folder of an iteration.
"""

from __future__ import annotations

from pathlib import Path

from ucpl.extents import StoredTensor, Structure
from ucpl.files.checkpoint import Checkpoint, Skeleton
from ucpl.files.header_watch import watched
from ucpl.formats.megatron.demands import DEMANDS
from ucpl.formats.megatron.folder import TRACKER, found, step_of
from ucpl.formats.megatron.homes import legacy_of
from ucpl.formats.megatron.legacy_arguments import heads_advice

__all__ = ["MegatronLegacy", "legacy_advice"]

_NO_RNG = "random states are of the ranks that saved them, and are left out: start Megatron-LM with --no-load-rng"


def legacy_advice(source: Checkpoint, structure: Structure) -> tuple[str, ...]:
    """Advice on arguments that Megatron-LM requests and a target lacks."""
    alike = legacy_of(source) is not None and all(
        structure.settings.get(axis) == source.state.settings[axis].value for axis in ("tp", "pp", "ep")
    )
    no_random = () if alike and "megatron_rng" in source.state.blobs else (_NO_RNG,)
    return (*no_random, *heads_advice(source, "each model_optim_rng.pt"))


class MegatronLegacy:
    name = "megatron_legacy"
    demands = DEMANDS

    def recognises(self, path: Path) -> bool:
        """A folder of an iteration, or one whose tracker names one."""
        if not path.is_dir() or not (any(path.glob("mp_rank_*")) or (path / TRACKER).is_file()):
            return False
        from ucpl.formats.megatron.legacy_folder import is_step  # most folders are others

        return step_of(path, is_step) is not None

    @watched
    def open(self, path: Path) -> Checkpoint:
        """Read all headers.

        Raises: UcplError E532, E540-E548, and errors of reading files (E400-E427).
        """
        from ucpl.formats.megatron.legacy_folder import is_step
        from ucpl.formats.megatron.legacy_reading import opened

        return opened(found(path, is_step))

    def skeleton(
        self, structure: Structure, targets: tuple[StoredTensor, ...], source: Checkpoint, tag: str | None
    ) -> Skeleton:
        """A folder of each rank, and the tracker next to the iteration.

        Raises: UcplError E471, E547.
        """
        from ucpl.formats.megatron.legacy_writing import skeleton

        return skeleton(structure, targets, source, tag)
