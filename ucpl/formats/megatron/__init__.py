"""Megatron's checkpoints: folders of Megatron-Core, of Megatron-FSDP, and files of Megatron-LM's ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from ucpl.registry import Format, degree_of

if TYPE_CHECKING:
    from ucpl.extents import StoredTensor, Structure
    from ucpl.files.checkpoint import Checkpoint, Framework
    from ucpl.inference.parallel import Base, Extended
    from ucpl.language import nodes
    from ucpl.layout import Layout

_LAYOUTS = "megatron_core(tp=2), or megatron_legacy(tp=2)"
_BUCKETS = "dp_reshardable"  # the optimizer in the buckets of ranks
KEPT = (
    "the target keeps {name}{more}: Megatron-Core stores layers, experts and halves so, and no module has these names."
    " A folder of --to megatron_legacy has those of modules: convert it. Or name a spec's names on both sides: --from 'of"
    " FILE.ucpl:torch_dist()' --to 'LAYOUT(...) of FILE.ucpl:hf()'"
)

_OPTIONS = {
    "tp": "--tensor-model-parallel-size",
    "pp": "--pipeline-model-parallel-size",
    "ep": "--expert-model-parallel-size",
}


def _options(settings: Mapping[str, object], *names: str) -> str:
    """Megatron's options for these degrees; those of 1 are its defaults."""
    texts = [f"{_OPTIONS[name]} {degree_of(settings, name)}" for name in names if degree_of(settings, name) > 1]
    return " ".join(texts) or f"{_OPTIONS['tp']} 1"


class Megatron(Format):
    """Attributes that the three formats share."""

    remade_hypers = ("is_expert_parallel",)
    has_optimizer = True
    has_client_state = True
    is_of_iterations = True

    def known_globals(self) -> frozenset[str]:
        from ucpl.formats.megatron.classes import KNOWN_GLOBALS

        return KNOWN_GLOBALS

    def describes(self, checkpoint: Checkpoint) -> bool:
        return True

    def registered(self, names: tuple[str, ...]) -> tuple[str, ...]:
        from ucpl.formats.megatron.orders import registered

        return registered(names, fused=any("linear_qkv.layer_norm_" in name for name in names))

    def takes_plan_groups(self, source: Checkpoint) -> bool:
        from ucpl.formats.megatron.groups import has_own_groups

        return has_own_groups(source.state)

    def advice(self, source: Checkpoint, structure: Structure) -> tuple[str, ...]:
        from ucpl.formats.megatron.groups import decay_advice
        from ucpl.formats.optimizer_hypers import members_without_states

        return (*decay_advice(source, structure), *members_without_states(source, structure))


class MegatronCoreFormat(Megatron):
    name = "megatron_core"
    title = "a folder of Megatron-Core"
    place = 60
    layouts = ("megatron_core",)
    hints = (
        ("megatron", _LAYOUTS),
        ("mcore", _LAYOUTS),
        ("torch_dist", _LAYOUTS),
        ("megatron_lm", _LAYOUTS),
    )
    settings = ("tp", "pp", "masters", "master", "stacked", "step", "optimizer", "ep", "vpp", "dp")
    forms = ("dcp",)
    has_chunks = True
    has_own_files = True
    has_training_dtype = True
    has_layers_stacked = True
    has_shifted_masters = True

    def store(self) -> Framework:
        from ucpl.formats.megatron.stores import MegatronCore as Store

        return Store()

    def stored(self, base: Base, checkpoint: Checkpoint) -> Extended:
        from ucpl.formats.megatron.core_layouts import stored

        return stored(base, checkpoint)

    def target(self, base: Base, source: Checkpoint | None, stored: Layout) -> Extended:
        from ucpl.formats.megatron.core_layouts import target

        return target(base, source)

    def needs_modules(self, settings: Mapping[str, object]) -> bool:
        return settings.get("optimizer") == _BUCKETS

    def job(self, source: Checkpoint, settings: Mapping[str, object]) -> str:
        if self.needs_modules(settings):
            return f"ranks with {_options(settings, 'tp', 'pp', 'ep')}"
        return "any number of ranks, at any tensor and pipeline parallel sizes"

    def stored_apart(self, names: Iterable[str]) -> str:
        from ucpl.formats.megatron.stacks import stored_alone

        found = stored_alone(names)
        more = f" and {len(found) - 1} more" if len(found) > 1 else ""
        return KEPT.format(name=found[0], more=more) if found else ""

    def in_modules(self, checkpoint: Checkpoint) -> Checkpoint:
        from ucpl.formats.megatron.stacks import in_modules

        return in_modules(checkpoint)

    def as_read(
        self, settings: Mapping[str, object], targets: list[StoredTensor], opened: Checkpoint
    ) -> tuple[list[StoredTensor], Checkpoint]:
        from ucpl.formats.megatron.buckets_writing import as_read

        # The plan names modules and places in buckets; a reader gives stacks, and boxes of parameters.
        return (as_read(targets), self.in_modules(opened)) if self.needs_modules(settings) else (targets, opened)

    def asks_modules(self, layout: nodes.Layout, call: nodes.Call) -> bool:
        from ucpl.formats.megatron.core_layouts import is_in_buckets

        return is_in_buckets(layout, call)

    def advice(self, source: Checkpoint, structure: Structure) -> tuple[str, ...]:
        from ucpl.formats.megatron.legacy_arguments import heads_advice

        heads = heads_advice(source, "common.pt") if self.needs_modules(structure.settings) else ()
        return (*heads, *super().advice(source, structure))


CORE = MegatronCoreFormat()


class MegatronFSDPFormat(Megatron):
    name = "megatron_fsdp"
    title = "a folder of Megatron-FSDP"
    place = 30
    layouts = ("megatron_fsdp",)
    settings = ("dp", "tp", "halves", "masters", "owner", "grouped", "step")
    forms = ("dcp",)
    has_chunks = True
    has_own_files = True
    file_format = "dcp"

    def store(self) -> Framework:
        from ucpl.formats.megatron.stores import MegatronFSDP as Store

        return Store()

    def stored(self, base: Base, checkpoint: Checkpoint) -> Extended:
        from ucpl.formats.megatron.fsdp_layouts import stored

        return stored(base, checkpoint)

    def target(self, base: Base, source: Checkpoint | None, stored: Layout) -> Extended:
        from ucpl.formats.megatron.fsdp_layouts import target

        return target(base, source)

    def job(self, source: Checkpoint, settings: Mapping[str, object]) -> str:
        return "ranks with --use-megatron-fsdp --ckpt-format fsdp_dtensor"

    def needs_modules(self, settings: Mapping[str, object]) -> bool:
        return True


FSDP = MegatronFSDPFormat()


class MegatronLegacyFormat(Megatron):
    name = "megatron_legacy"
    title = "Megatron's legacy files"
    place = 50
    layouts = ("megatron_legacy",)
    settings = ("tp", "pp", "ep", "vpp", "bf16", "fp16", "optimizer")
    forms = ("torch",)
    kept_values = frozenset(("global_steps", "megatron_rng", "megatron_optimizer"))
    own_settings = frozenset(("tp", "pp", "ep", "vpp"))  # a target of another format has its own ranks
    chosen_settings = Format.chosen_settings | {"optimizer"}

    def store(self) -> Framework:
        from ucpl.formats.megatron.stores import MegatronLegacy as Store

        return Store()

    def known_globals(self) -> frozenset[str]:
        from ucpl.formats.megatron.classes import LEGACY_GLOBALS

        return LEGACY_GLOBALS

    def takes_plan_groups(self, source: Checkpoint) -> bool:
        return False  # its files have one group for each kind of parameter

    def run_values(self, carried: Mapping[object, object]) -> Mapping[object, object]:
        from ucpl.formats.megatron.legacy_arguments import besides_degrees

        return besides_degrees(carried)

    def describes(self, checkpoint: Checkpoint) -> bool:
        from ucpl.formats.megatron.homes import legacy_of

        return legacy_of(checkpoint) is not None

    def stored(self, base: Base, checkpoint: Checkpoint) -> Extended:
        from ucpl.formats.megatron.legacy_layouts import stored

        return stored(base, checkpoint)

    def target(self, base: Base, source: Checkpoint | None, stored: Layout) -> Extended:
        from ucpl.formats.megatron.dealt import target

        return target(base, source)

    def job(self, source: Checkpoint, settings: Mapping[str, object]) -> str:
        return f"ranks with {_options(settings, 'tp', 'pp', 'ep')}"

    def value_dropped(self, name: str, settings: Mapping[str, object]) -> str:
        return "tensors without elements are not written into files of ranks" if name == "empty_tensors" else ""

    def needs_modules(self, settings: Mapping[str, object]) -> bool:
        return True

    def advice(self, source: Checkpoint, structure: Structure) -> tuple[str, ...]:
        from ucpl.formats.megatron.stores import legacy_advice

        return (*legacy_advice(source, structure), *super().advice(source, structure))


LEGACY = MegatronLegacyFormat()
