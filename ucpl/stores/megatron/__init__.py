"""Megatron's checkpoints: `MegatronCore` here; `MegatronLegacy`, the files of Megatron-LM's ranks, in legacy; `MegatronFSDP`,
folders of Megatron-FSDP, in fsdp.

Megatron-Core's distributed format (torch_dist) is a folder of PyTorch's distributed format with common.pt and metadata.json.
Not here: the zarr format, which Megatron-Core itself reads no more.
"""

from __future__ import annotations

from pathlib import Path

from ucpl.extents import StoredTensor, Structure
from ucpl.stores.checkpoint import Checkpoint, Skeleton
from ucpl.stores.megatron.classes import KNOWN_GLOBALS
from ucpl.stores.megatron.demands import DEMANDS
from ucpl.stores.megatron.folder import found, step_of
from ucpl.stores.watching import watched

__all__ = ["MegatronCore", "objects_advice"]

# What a checkpoint of torch_dist, of ranks, and of Megatron-FSDP keeps that no tensor is.
_OBJECTS = ("sharded_objects", "megatron_rng", "megatron_fsdp_rng")


def objects_advice(source: Checkpoint) -> tuple[str, ...]:
    """What a target of DeepSpeed has no place for; `_extra_state` without anything in it is nothing."""
    names: list[str] = []
    for key in _OBJECTS:
        held = source.envelope.blobs.get(key)
        names += [str(name) for name, value in held.items() if value != [None]] if isinstance(held, dict) else []
    if not names:
        return ()
    shown = ", ".join(names[:2]) + (", ..." if len(names) > 2 else "")
    return (f"random states and other objects of Megatron's ranks are left out, {len(names)} in all: {shown}",)


class MegatronCore:
    name = "megatron_core"
    known_globals: frozenset[str] = KNOWN_GLOBALS
    demands = DEMANDS

    def recognises(self, path: Path) -> bool:
        """`.metadata` beside the files of Megatron-Core's own, here or in the folder that a tracker leads to."""
        from ucpl.stores.dcp.folders import is_of_megatron

        return step_of(path, is_of_megatron) is not None

    @watched
    def open(self, path: Path) -> Checkpoint:
        """Read all headers. Raises: UcplError E455, E460, E520-E523, E530-E533, and what the files raise (E400-E427)."""
        from ucpl.stores.dcp.folders import is_of_megatron
        from ucpl.stores.megatron.reading import opened  # most checkpoints are others

        return opened(found(path, is_of_megatron))

    def skeleton(
        self, structure: Structure, targets: tuple[StoredTensor, ...], source: Checkpoint, tag: str | None
    ) -> Skeleton:
        """A file of each rank, `.metadata`, common.pt and metadata.json. Raises: UcplError E471."""
        from ucpl.stores.megatron.writing import skeleton

        return skeleton(structure, targets, source, tag)
