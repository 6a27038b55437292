"""One file of torch.save as training scripts write it: torch_file()."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ucpl.registry import Format

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from ucpl.extents import Structure
    from ucpl.files.checkpoint import Checkpoint, Framework, Order

_LAYOUTS = 'one file of a training script is torch_file(): {"model": ..., "optimizer": ...}'
REFUSED = "values of the run are of {names}: torch.load takes this file with weights_only=False alone"


class TorchFileFormat(Format):
    name = "torch_file"
    title = "a torch file"
    place = 85
    layouts = ("torch_file",)
    hints = (
        ("pt", _LAYOUTS),
        ("state_dict", _LAYOUTS),
    )
    settings = ("file", "optimizer_file", "model", "optimizer", "scheduler", "wrap", "named", "masters", "master_list")
    reads = ("order", "model", "optimizer", "wrap")
    own_settings = frozenset(("optimizer_file", "model", "optimizer", "scheduler", "wrap", "named", "master_list"))
    forms = ("torch",)
    has_optimizer = True
    has_client_state = True
    has_plan_groups = True
    has_groups_alone = True
    guesses_buffers = True
    has_names_of_modules = True
    has_training_dtype = True

    def store(self) -> Framework:
        from ucpl.formats.torch_file.store import TorchFiles as Store

        return Store()

    def open(self, path: Path, order: Order | None, arguments: Mapping[str, object]) -> Checkpoint:
        from ucpl.formats.torch_file.store import TorchFiles as Store

        return Store().open(path, order, arguments)

    def has_tensors_alone(self, settings: Mapping[str, object]) -> bool:
        return settings.get("model") == "" and not settings.get("optimizer_file")

    def value_dropped(self, name: str, settings: Mapping[str, object]) -> str:
        from ucpl.formats.leaving import DESCRIBING, EXTRA

        is_left = self.has_tensors_alone(settings) and name not in (*DESCRIBING, EXTRA)
        return "a state dict alone has no place for it" if is_left else ""

    def advice(self, source: Checkpoint, structure: Structure) -> tuple[str, ...]:
        from ucpl.files.inert import unsafe_globals
        from ucpl.formats.leaving import tied_advice
        from ucpl.formats.optimizer_hypers import (
            NUMBERED,
            frozen_in_no_group,
            masters_as_states,
            numbered_empty,
            unfactored,
        )

        tied = tied_advice(source, structure, "module.load_state_dict(..., strict=False)")
        if self.has_tensors_alone(structure.settings):
            return tied
        masters = () if structure.settings.get("master_list") else masters_as_states(source, structure)
        unnamed = (*frozen_in_no_group(source, structure, NUMBERED), *numbered_empty(source, structure))
        classes = sorted({name for value in source.state.carried.values() for name in unsafe_globals(value)})
        refused = (REFUSED.format(names=", ".join(classes)),) if classes else ()
        return (*tied, *refused, *unnamed, *masters, *unfactored(source, structure))

    def known_globals(self) -> frozenset[str]:
        from ucpl.formats.torch_dicts import VALUES

        return VALUES


FORMAT = TorchFileFormat()
