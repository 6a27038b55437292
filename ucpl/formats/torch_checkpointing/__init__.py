"""Items of torch_checkpointing, a file of each rank: a target.

The reader of such files is that of DCP's folders (formats.dcp.per_rank).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ucpl.registry import Format, degree_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ucpl.extents import StoredTensor, Structure
    from ucpl.files.checkpoint import Checkpoint, Framework


class TorchCheckpointingFormat(Format):
    name = "torch_checkpointing"
    title = "a folder of torch_checkpointing"
    place = 46
    layouts = ("torch_checkpointing",)
    settings = ("fsdp", "device")
    forms = ("torch",)
    has_own_files = True
    has_optimizer = True
    has_client_state = True
    has_plan_groups = True
    has_groups_alone = True
    guesses_buffers = True
    has_names_of_modules = True
    masters_are_weights = True
    kept_values = frozenset(("lr_scheduler", "module_extra", "optimizer_values"))

    def store(self) -> Framework:
        from ucpl.formats.torch_checkpointing.writing import STORE

        return STORE

    def as_read(
        self, settings: Mapping[str, object], targets: list[StoredTensor], opened: Checkpoint
    ) -> tuple[list[StoredTensor], Checkpoint]:
        from ucpl.formats.verl.writing import as_read

        return as_read(settings, targets, opened)

    def job(self, source: Checkpoint, settings: Mapping[str, object]) -> str:
        ranks = degree_of(settings, "fsdp")
        loader = "CheckpointManager.load (on other ranks, its DefaultResharder loads tensors alone)"
        return f"{ranks} rank{'s' * (ranks > 1)}: {loader}"

    def advice(self, source: Checkpoint, structure: Structure) -> tuple[str, ...]:
        from ucpl.formats.optimizer_hypers import advice

        return advice(source, structure)

    def known_globals(self) -> frozenset[str]:
        from ucpl.formats.verl.dtensors import CLASSES

        return CLASSES


FORMAT = TorchCheckpointingFormat()
