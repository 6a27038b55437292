"""Megatron's folders of one file a rank (torch format)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ucpl.registry import Format

if TYPE_CHECKING:
    from ucpl.extents import Structure
    from ucpl.frontends.parallel import Base, Extended
    from ucpl.layout import Layout
    from ucpl.stores.checkpoint import Checkpoint, Framework


class MegatronLegacy(Format):
    name = "megatron_legacy"
    title = "Megatron's legacy files"
    place = 50
    layouts = ("megatron_legacy",)
    settings = ("tp", "pp", "ep", "vpp", "bf16", "fp16", "optimizer")
    forms = ("torch",)
    has_optimizer = True
    has_client_state = True
    is_of_iterations = True
    kept_values = frozenset(("global_steps", "megatron_rng", "megatron_optimizer"))

    def store(self) -> Framework:
        from ucpl.stores.megatron.legacy import MegatronLegacy as Store

        return Store()

    def describes(self, checkpoint: Checkpoint) -> bool:
        return checkpoint.legacy is not None

    def stored(self, base: Base, checkpoint: Checkpoint) -> Extended:
        from ucpl.frontends.megatron_legacy import stored

        return stored(base, checkpoint)

    def target(self, base: Base, source: Checkpoint | None, stored: Layout) -> Extended:
        from ucpl.frontends.megatron_dealt import target

        return target(base, source)

    def needs_modules(self, settings: Mapping[str, object]) -> bool:
        return True

    def registered(self, names: tuple[str, ...]) -> tuple[str, ...]:
        from ucpl.stores.megatron.orders import registered

        return registered(names, fused=any("linear_qkv.layer_norm_" in name for name in names))

    def advice(self, source: Checkpoint, structure: Structure) -> tuple[str, ...]:
        from ucpl.stores.megatron.legacy import legacy_advice

        return legacy_advice(source, structure)


FORMAT = MegatronLegacy()
