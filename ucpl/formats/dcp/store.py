"""torch.distributed.checkpoint's format: a folder with `.metadata` and one file per rank.

A chunk is found by its tensor's name and its begin; the file that has it is not part of the layout. So layouts use one
file, `.metadata`, of form dcp, and a key is a name. Files are read by ranges of bytes, without a process group.

Not here: data that torch.distributed.checkpoint saves through stream extensions.
"""

from __future__ import annotations

from pathlib import Path

from attrs import evolve

from ucpl.extents import StoredTensor, Structure
from ucpl.files.checkpoint import Checkpoint, Order, Skeleton
from ucpl.files.demands import Demands
from ucpl.files.header_watch import watched

__all__ = ["DCP"]


class DCP:
    name = "dcp"
    demands = Demands()

    def recognises(self, path: Path) -> bool:
        """Test for a folder with `.metadata` and *.distcp, but not Megatron-Core's.

        Folders of FSDP's model and optimizer, each in a folder, are also recognised.
        """
        from ucpl.formats.dcp.flat_ranks import flats_in
        from ucpl.formats.dcp.folders import (
            has_chunks,
            is_apart,
            is_of_megatron,
            step_in,
        )  # most checkpoints are others
        from ucpl.formats.dcp.per_rank import has_ranks
        from ucpl.formats.dcp.shards import shards_in

        if path.is_dir() and (shards_in(path) or has_ranks(path) or is_apart(path) or flats_in(path)):
            return True
        return step_in(path) is not None or (has_chunks(path) and not is_of_megatron(path))

    @watched
    def open(self, path: Path, prefix: str = "", states: str = "", order: Order | None = None) -> Checkpoint:
        """Read all headers.

        prefix, states: of the model and the optimizer among several. order: of numbered parameters. Raises: UcplError
        E446, E452, E455, E466, E520-E524, and errors of reading files (E400-E427).
        """
        from ucpl.formats.dcp.flat_ranks import flats_in, opened_flats
        from ucpl.formats.dcp.folders import is_apart, read_folders, step_in
        from ucpl.formats.dcp.masters import with_masters
        from ucpl.formats.dcp.metadata import read_metadata
        from ucpl.formats.dcp.per_rank import has_ranks, opened_ranks
        from ucpl.formats.dcp.shards import opened_shards, shards_in

        if (step := step_in(path)) is not None:
            return evolve(self.open(step, prefix, states, order), top=path)
        if shards_in(path):
            return opened_shards(path)
        if has_ranks(path):
            return with_masters(opened_ranks(path, order))
        if flats_in(path):
            return with_masters(opened_flats(path))
        from ucpl.formats.dcp.reading import opened
        from ucpl.formats.dcp.roles import NamedRoles

        metadata = read_folders(path) if is_apart(path) else read_metadata(path)
        return with_masters(opened(path, metadata, NamedRoles(prefix, states, order)))

    def skeleton(
        self, structure: Structure, targets: tuple[StoredTensor, ...], source: Checkpoint, tag: str | None
    ) -> Skeleton:
        """A file of each rank and `.metadata`, or shards of safetensors.

        Raises: UcplError E392, E471.
        """
        from ucpl.formats.dcp import shards_writing, writing

        made = shards_writing.skeleton if structure.settings.get("shards") else writing.skeleton
        return made(structure, targets, source)
