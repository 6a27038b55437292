"""State dicts of each rank, as verl's FSDPCheckpointManager saves them: a target.

The reader of such files is that of DCP's folders (formats.dcp.per_rank).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ucpl.registry import Format, degree_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ucpl.extents import StoredTensor, Structure
    from ucpl.files.checkpoint import Checkpoint, Framework


class VerlFormat(Format):
    name = "verl"
    title = "a folder of verl"
    place = 45
    layouts = ("verl",)
    settings = ("fsdp", "ddp", "device", "schedule")
    forms = ("torch",)
    has_own_files = True
    has_optimizer = True
    has_plan_groups = True
    has_groups_alone = True
    guesses_buffers = True
    has_names_of_modules = True
    masters_are_weights = True
    kept_values = frozenset(("lr_scheduler", "module_extra", "optimizer_values", "huggingface_files"))

    def store(self) -> Framework:
        from ucpl.formats.verl.writing import STORE

        return STORE

    def as_read(
        self, settings: Mapping[str, object], targets: list[StoredTensor], opened: Checkpoint
    ) -> tuple[list[StoredTensor], Checkpoint]:
        from ucpl.formats.verl.writing import as_read

        return as_read(settings, targets, opened)

    def value_dropped(self, name: str, settings: Mapping[str, object]) -> str:
        is_left = name == "lr_scheduler" and settings.get("schedule") == 0
        return "schedule = 0 leaves it out" if is_left else ""

    def job(self, source: Checkpoint, settings: Mapping[str, object]) -> str:
        ranks = degree_of(settings, "fsdp") * degree_of(settings, "ddp")
        return f"{ranks} rank{'s' * (ranks > 1)}, with FSDP2: FSDPCheckpointManager.load_checkpoint(FOLDER)"

    def advice(self, source: Checkpoint, structure: Structure) -> tuple[str, ...]:
        from ucpl.formats.leaving import tied_advice
        from ucpl.formats.optimizer_hypers import NUMBERED, frozen_in_no_group, numbered_empty, unfactored

        tied = tied_advice(source, structure, "module.load_state_dict(..., strict=False)")
        unnamed = (*frozen_in_no_group(source, structure, NUMBERED), *numbered_empty(source, structure))
        return (*tied, *unnamed, *unfactored(source, structure))

    def known_globals(self) -> frozenset[str]:
        from ucpl.formats.verl.dtensors import CLASSES

        return CLASSES


FORMAT = VerlFormat()
