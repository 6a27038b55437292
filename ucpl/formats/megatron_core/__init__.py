"""Folders of Megatron-Core's dist_checkpointing (torch_dist)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ucpl.registry import Format

if TYPE_CHECKING:
    from ucpl.extents import Structure
    from ucpl.frontends.parallel import Base, Extended
    from ucpl.layout import Layout
    from ucpl.stores.checkpoint import Checkpoint, Framework
    from ucpl.syntax import nodes

_BUCKETS = "dp_reshardable"  # the optimizer in the buckets of ranks


class MegatronCore(Format):
    name = "megatron_core"
    title = "a folder of Megatron-Core"
    place = 60
    layouts = ("megatron_core",)
    settings = ("tp", "pp", "masters", "master", "stacked", "step", "optimizer", "ep", "vpp", "dp")
    forms = ("dcp",)
    has_chunks = True
    has_optimizer = True
    has_client_state = True
    has_training_dtype = True
    is_of_iterations = True
    has_layers_stacked = True
    has_shifted_masters = True

    def store(self) -> Framework:
        from ucpl.stores.megatron import MegatronCore as Store

        return Store()

    def describes(self, checkpoint: Checkpoint) -> bool:
        return True

    def stored(self, base: Base, checkpoint: Checkpoint) -> Extended:
        from ucpl.frontends.megatron_core import stored

        return stored(base, checkpoint)

    def target(self, base: Base, source: Checkpoint | None, stored: Layout) -> Extended:
        from ucpl.frontends.megatron_core import target

        return target(base, source)

    def needs_modules(self, settings: Mapping[str, object]) -> bool:
        return settings.get("optimizer") == _BUCKETS

    def asks_modules(self, layout: nodes.Layout, call: nodes.Call) -> bool:
        from ucpl.frontends.megatron_core import is_in_buckets

        return is_in_buckets(layout, call)

    def registered(self, names: tuple[str, ...]) -> tuple[str, ...]:
        from ucpl.stores.megatron.orders import registered

        return registered(names, fused=any("linear_qkv.layer_norm_" in name for name in names))

    def advice(self, source: Checkpoint, structure: Structure) -> tuple[str, ...]:
        from ucpl.stores.megatron.legacy_arguments import heads_advice

        return heads_advice(source, "common.pt") if self.needs_modules(structure.settings) else ()


FORMAT = MegatronCore()
