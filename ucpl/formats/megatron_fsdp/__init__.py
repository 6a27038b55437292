"""Folders of Megatron-FSDP (fsdp_dtensor)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ucpl.registry import Format

if TYPE_CHECKING:
    from ucpl.frontends.parallel import Base, Extended
    from ucpl.layout import Layout
    from ucpl.stores.checkpoint import Checkpoint, Framework


class MegatronFSDP(Format):
    name = "megatron_fsdp"
    title = "a folder of Megatron-FSDP"
    place = 30
    layouts = ("megatron_fsdp",)
    settings = ("dp", "tp", "halves", "masters", "owner", "grouped", "step")
    forms = ("dcp",)
    has_chunks = True
    has_optimizer = True
    has_client_state = True
    is_of_iterations = True
    file_format = "dcp"

    def store(self) -> Framework:
        from ucpl.stores.megatron.fsdp import MegatronFSDP as Store

        return Store()

    def describes(self, checkpoint: Checkpoint) -> bool:
        return True

    def stored(self, base: Base, checkpoint: Checkpoint) -> Extended:
        from ucpl.frontends.megatron_fsdp import stored

        return stored(base, checkpoint)

    def target(self, base: Base, source: Checkpoint | None, stored: Layout) -> Extended:
        from ucpl.frontends.megatron_fsdp import target

        return target(base, source)

    def needs_modules(self, settings: Mapping[str, object]) -> bool:
        return True

    def registered(self, names: tuple[str, ...]) -> tuple[str, ...]:
        from ucpl.stores.megatron.orders import registered

        return registered(names, fused=any("linear_qkv.layer_norm_" in name for name in names))


FORMAT = MegatronFSDP()
