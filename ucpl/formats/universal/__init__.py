"""Universal folders of DeepSpeed: tensors in one piece, for any number of ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ucpl.registry import Format

if TYPE_CHECKING:
    from ucpl.extents import Structure
    from ucpl.stores.checkpoint import Checkpoint, Framework


class Universal(Format):
    name = "universal"
    title = "a universal folder"
    place = 10
    layouts = ("universal",)
    settings = ("stage", "files", "bf16", "fp16", "weights", "shaped")
    forms = ("torch",)
    has_optimizer = True
    has_client_state = True
    has_plan_groups = True
    has_groups_of_weights = True
    has_names_of_modules = True
    has_engine = True
    is_of_any_ranks = True
    kept_values = frozenset(
        (
            "clip_grad",
            "data_sampler",
            "ds_config",
            "dynamic_loss_scale",
            "global_samples",
            "global_steps",
            "loss_scale_config",
            "loss_scaler",
            "lr_scheduler",
            "overflow",
            "random_ltd",
            "skipped_steps",
        )
    )

    def store(self) -> Framework:
        from ucpl.stores.deepspeed.universal import Universal as Store

        return Store()

    def group_dropped(self, settings: Mapping[str, object], source: Format, *, is_listed: bool) -> str:
        return "loaders of universal folders look for none"

    def has_scaler(self, settings: Mapping[str, object]) -> bool:
        return True

    def advice(self, source: Checkpoint, structure: Structure) -> tuple[str, ...]:
        from ucpl.stores.deepspeed.advice import universal_advice
        from ucpl.stores.megatron import objects_advice

        return (*universal_advice(source, structure), *objects_advice(source))


FORMAT = Universal()
