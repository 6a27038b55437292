"""Folders of torch.distributed.checkpoint: of FSDP2, FSDP, one rank, or any job."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from ucpl.registry import Format

if TYPE_CHECKING:
    from pathlib import Path

    from ucpl.extents import Structure
    from ucpl.files.checkpoint import Checkpoint, Framework, Order
    from ucpl.inference.parallel import Base, Extended
    from ucpl.layout import Layout

_LAYOUTS = "folders that FSDP2 saves are dcp(fsdp=4)"


class DCPFormat(Format):
    name = "dcp"
    title = "a DCP folder"
    place = 40
    layouts = ("dcp",)
    hints = (
        ("fsdp", _LAYOUTS),
        ("fsdp2", _LAYOUTS),
    )
    settings = ("fsdp", "tp", "masters", "prefix", "states", "flat", "shards", "decoupled_weight_decay")
    reads = ("order", "prefix", "states")
    forms = ("dcp",)
    has_chunks = True
    has_own_files = True
    has_optimizer = True
    has_client_state = True
    has_plan_groups = True
    has_groups_alone = True
    guesses_buffers = True
    has_names_of_modules = True
    has_training_dtype = True
    settings_in_container: ClassVar[Mapping[str, str]] = {"prefix": "model.", "states": "optimizer.state."}

    def store(self) -> Framework:
        from ucpl.formats.dcp.store import DCP as Store

        return Store()

    def open(self, path: Path, order: Order | None, arguments: Mapping[str, object]) -> Checkpoint:
        from ucpl.formats.dcp.store import DCP as Store

        said = {name: value for name, value in arguments.items() if isinstance(value, str) and name != "order"}
        return Store().open(path, order=order, **said)

    def describes(self, checkpoint: Checkpoint) -> bool:
        return True

    def stored(self, base: Base, checkpoint: Checkpoint) -> Extended:
        from ucpl.formats.dcp.layouts import stored

        return stored(base, checkpoint)

    def target(self, base: Base, source: Checkpoint | None, stored: Layout) -> Extended:
        from ucpl.formats.dcp.layouts import target
        from ucpl.placement.sharding import shardings_of

        return target(base, shardings_of(stored))

    def has_tensors_alone(self, settings: Mapping[str, object]) -> bool:
        return bool(settings.get("shards"))

    def value_dropped(self, name: str, settings: Mapping[str, object]) -> str:
        from ucpl.files.model_texts import TEXTS
        from ucpl.formats.leaving import DESCRIBING

        is_left = self.has_tensors_alone(settings) and name not in (*DESCRIBING, TEXTS)
        return "shards of safetensors have no place for it" if is_left else ""

    def companions_of(self, root: Path) -> tuple[str, ...]:
        from ucpl.formats.dcp.folders import folders_in

        return folders_in(root)

    def job(self, source: Checkpoint, settings: Mapping[str, object]) -> str:
        return "any number of ranks, with torch.distributed.checkpoint.load"

    def advice(self, source: Checkpoint, structure: Structure) -> tuple[str, ...]:
        from ucpl.formats.dcp.wrapped import advice as of_wraps
        from ucpl.formats.leaving import tied_advice
        from ucpl.formats.optimizer_hypers import advice, masters_as_states

        tied = tied_advice(source, structure, "DefaultLoadPlanner(allow_partial_load=True)")
        masters = masters_as_states(source, structure)
        return (*tied, *advice(source, structure), *of_wraps(source, structure), *masters)


FORMAT = DCPFormat()
