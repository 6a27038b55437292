"""DeepSpeed's checkpoints, of ZeRO-0 to ZeRO-3 and universal ones.

`names` parses files and keys, `topology` finds the ranks that wrote them, `order` has the orders of parameters. `store`
opens a folder: it sends dense model states, layers and experts to their readers, and `gathered` makes the Checkpoint.
`writing` lays out a target.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from math import prod
from typing import TYPE_CHECKING

from ucpl.registry import Format, degree_of

if TYPE_CHECKING:
    from pathlib import Path

    from ucpl.extents import Structure
    from ucpl.files.checkpoint import Checkpoint, Framework, Order

# Values of a run that files of an engine have a place for.
VALUES = frozenset(
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
        "module_extra",
        "overflow",
        "random_ltd",
        "skipped_steps",
    )
)
_LAYOUTS = "DeepSpeed's layouts are zero0(dp=4) to zero3(dp=4), and universal()"


class _EngineFormat(Format):
    """Attributes that both formats share."""

    forms = ("torch",)
    has_optimizer = True
    has_client_state = True
    kept_values = VALUES
    has_plan_groups = True
    has_groups_of_weights = True
    has_names_of_modules = True
    has_engine = True
    omits_empty_states = True

    def known_globals(self) -> frozenset[str]:
        from ucpl.formats.deepspeed.names import KNOWN_GLOBALS

        return KNOWN_GLOBALS

    def scaling_note(self, source: Checkpoint, *, is_fp16: bool) -> str:
        from ucpl.formats.deepspeed.config import scaling_note

        return scaling_note(source, is_fp16)


class DeepSpeedFormat(_EngineFormat):
    name = "deepspeed"
    title = "DeepSpeed's files"
    place = 20
    layouts = ("zero0", "zero1", "zero2", "zero3")
    hints = (
        ("deepspeed", _LAYOUTS),
        ("zero", _LAYOUTS),
        *((f"stage{stage}", _LAYOUTS) for stage in range(4)),
    )
    settings = (
        *("stage", "dp", "tp", "pp", "ep", "edp", "fsdp", "bf16", "fp16", "bf16_optimizer", "masters", "fused"),
        *("round_robin", "alignment", "elastic", "sub_group_size"),
    )
    file_marks = ("model_states", "optim_states")
    file_names = (
        'file weights = torch "mp_rank_{tp:02}_model_states.pt" and'
        ' file optim = torch "zero_pp_rank_{dp}_mp_rank_{tp:02}_optim_states.pt"'
    )

    def store(self) -> Framework:
        from ucpl.formats.deepspeed.store import DeepSpeed as Store

        return Store()

    def open(self, path: Path, order: Order | None, arguments: Mapping[str, object]) -> Checkpoint:
        from ucpl.formats.deepspeed.store import DeepSpeed as Store

        return Store().open(path, order)

    def layout_name(self, settings: Mapping[str, object]) -> str:
        return f"zero{settings['stage']}"

    def group_dropped(self, settings: Mapping[str, object], source: Format, *, is_listed: bool) -> str:
        if is_listed and not settings.get("stage") and not settings.get("masters"):
            return ""  # the optimizer is torch's own, which numbers frozen parameters
        if settings.get("stage") != 3:
            return f"ZeRO-{settings.get('stage')} keeps no group without trained parameters"
        if not source.has_engine and not is_listed:
            return "DeepSpeed takes groups without parameters out of an optimizer"
        return ""

    def value_dropped(self, name: str, settings: Mapping[str, object]) -> str:
        is_left = name == "clip_grad" and settings.get("stage") == 3
        return "shards of stage 3 have none: ds_config has it" if is_left else ""

    def accumulates_wide(self, source: Checkpoint) -> bool:
        from ucpl.formats.deepspeed.config import accumulates_wide

        return accumulates_wide(source)

    def has_layer_files(self, files: Collection[str]) -> bool:
        from ucpl.formats.deepspeed.names import is_apart, is_of_expert

        return any(is_apart(file) and not is_of_expert(file) for file in files)

    def cuts_described(self, source: Checkpoint, structure: Structure) -> object:
        from ucpl.formats.deepspeed.model_states import info_for

        return info_for(source, structure, degree_of(structure.settings, "tp"))

    def files_of_callers(self, settings: Mapping[str, object]) -> int:
        return degree_of(settings, "dp") if settings.get("stage") == 3 else 1

    def has_scaler(self, settings: Mapping[str, object]) -> bool:
        return settings.get("stage") != 0

    def job(self, source: Checkpoint, settings: Mapping[str, object]) -> str:
        from ucpl.formats.deepspeed.config import batch_text

        degrees = {name: degree_of(settings, name) for name in ("dp", "tp", "pp")}
        ranks = prod(degrees.values())
        stage = settings.get("stage")
        words = [f"{ranks} rank{'s' * (ranks > 1)}", f"with ZeRO stage {stage}" if stage else "without ZeRO"]
        words += [f"and {name} = {n}" for name, n in degrees.items() if n > 1 and n != ranks]
        return " ".join(words) + batch_text(source, settings)

    def advice(self, source: Checkpoint, structure: Structure) -> tuple[str, ...]:
        from ucpl.formats.deepspeed.advice import advice
        from ucpl.formats.leaving import objects_advice

        return (*advice(source, structure), *objects_advice(source))


DEEPSPEED = DeepSpeedFormat()


class UniversalFormat(_EngineFormat):
    name = "universal"
    title = "a universal folder"
    place = 10
    layouts = ("universal",)
    settings = ("stage", "files", "bf16", "fp16", "weights", "shaped")
    is_of_any_ranks = True

    def store(self) -> Framework:
        from ucpl.formats.deepspeed.store import Universal as Store

        return Store()

    def group_dropped(self, settings: Mapping[str, object], source: Format, *, is_listed: bool) -> str:
        return "loaders of universal folders look for none"

    def cuts_described(self, source: Checkpoint, structure: Structure) -> object:
        from ucpl.formats.deepspeed.model_states import info_for

        return info_for(source, structure, 1)

    def files_of_callers(self, settings: Mapping[str, object]) -> int:
        return degree_of(settings, "files") if settings.get("stage") == 3 else 1

    def has_scaler(self, settings: Mapping[str, object]) -> bool:
        return True

    def job(self, source: Checkpoint, settings: Mapping[str, object]) -> str:
        return 'any number of ranks, with "checkpoint": {"load_universal": true} in the config of DeepSpeed'

    def advice(self, source: Checkpoint, structure: Structure) -> tuple[str, ...]:
        from ucpl.formats.deepspeed.advice import universal_advice
        from ucpl.formats.leaving import objects_advice

        return (*universal_advice(source, structure), *objects_advice(source))


UNIVERSAL = UniversalFormat()
