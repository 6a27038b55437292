"""Folders of the Trainer and of Accelerate without an engine.

DDP, one process, and FSDP's full state dict write them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ucpl.registry import Format, degree_of

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from ucpl.extents import Structure
    from ucpl.files.checkpoint import Checkpoint, Framework, Order


class _Run(Format):
    settings = ("dp", "full")
    forms = ("torch",)
    has_own_files = True
    has_optimizer = True
    has_plan_groups = True
    guesses_buffers = True
    has_names_of_modules = True
    kept_values = frozenset(("optimizer_values", "huggingface_files"))
    reads = ("order",)

    def store(self) -> Framework:
        from ucpl.formats.trainer.writing import Folders as Store

        return Store(self.name)

    def open(self, path: Path, order: Order | None, arguments: Mapping[str, object]) -> Checkpoint:
        from ucpl.formats.trainer.writing import Folders

        return Folders(self.name).open(path, order)

    def job(self, source: Checkpoint, settings: Mapping[str, object]) -> str:
        ranks = degree_of(settings, "dp")
        return f"{ranks} rank{'s' * (ranks > 1)}"

    def advice(self, source: Checkpoint, structure: Structure) -> tuple[str, ...]:
        from ucpl.formats.optimizer_hypers import NUMBERED, frozen_in_no_group, numbered_empty, unfactored

        unnamed = (*frozen_in_no_group(source, structure, NUMBERED), *numbered_empty(source, structure))
        return (*unnamed, *unfactored(source, structure))

    def companions_of(self, root: Path) -> tuple[str, ...]:
        from ucpl.formats.trainer.reading import own_files

        return own_files(self.name, root)


class TrainerFormat(_Run):
    name = "trainer"
    title = "a folder of the Trainer"
    place = 60
    layouts = ("trainer",)
    container = "trainer"
    kept_values = _Run.kept_values | {"global_steps"}


class AccelerateFormat(_Run):
    name = "accelerate"
    title = "a folder of Accelerate"
    place = 61
    layouts = ("accelerate",)
    container = "accelerate"


TRAINER = TrainerFormat()
ACCELERATE = AccelerateFormat()
