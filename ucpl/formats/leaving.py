"""Values of a run that a target's files have no place for, by format, as data; and values that describe files.

Not here: client_state and groups, which all formats of runs keep (conversion.accounting).
"""

from __future__ import annotations

from ucpl.extents import Structure
from ucpl.files.checkpoint import Checkpoint
from ucpl.files.model_texts import TEXTS
from ucpl.registry import format_named

__all__ = [
    "DESCRIBING",
    "EMPTY",
    "EXTRA",
    "LAYERS",
    "META",
    "SCALE",
    "SCALED",
    "TEXTS",
    "keeps_all",
    "left_values",
    "objects_advice",
]

# Where Lightning's FSDPStrategy saves what is in no chunk: loops, callbacks, schedulers.
META = "meta.pt"
EMPTY = "empty_tensors"  # tensors without elements, which plans do not have
EXTRA = "module_extra"  # what a module's state dict has that is no tensor
SCALE = "loss_scale_config"  # ZeRO-0's numbers of loss scaling: a shard has an object made of them
SCALED = frozenset(
    ("cur_iter", "cur_scale", "dynamic_loss_scale", "last_overflow_iter", "scale_factor", "scale_window")
)
LAYERS = "layer_files"  # of a pipeline, with such values of each layer

# Values that describe the source's own files: each target has its own, made for it.
DESCRIBING = frozenset(
    (
        "ds_version",
        "empty_tensors",
        LAYERS,
        "left_out",
        "megatron_without_extra_state",
        "module_attributes",
        "module_names",
        "num_experts",
        "universal_checkpoint_info",
    )
)


def keeps_all(framework: str) -> bool:
    """Whether a format keeps all values of any run."""
    return format_named(framework).kept_values is None


def left_values(source: Checkpoint, structure: Structure) -> dict[str, str]:
    """Names of values of the run -> the reason for which a target has none of them."""
    target = format_named(structure.framework)
    kept, have = target.kept_values, "has" if target.title.startswith("a ") else "have"
    out: dict[str, str] = {}
    for name in source.state.blobs:
        if kept is not None and name not in kept and name not in DESCRIBING:
            out[name] = f"{target.title} {have} no place for it"
        elif why := target.value_dropped(name, structure.settings):
            out[name] = why
    if META in out:
        out[META] = "it is Lightning's file of what is in no chunk"
    return out


# What a checkpoint of torch_dist, of ranks, and of Megatron-FSDP keeps that no tensor is.
_OBJECTS = ("sharded_objects", "megatron_rng", "megatron_fsdp_rng")


def objects_advice(source: Checkpoint) -> tuple[str, ...]:
    """What a target of DeepSpeed has no place for; `_extra_state` without anything in it is nothing."""
    names: list[str] = []
    for key in _OBJECTS:
        held = source.state.blobs.get(key)
        names += [str(name) for name, value in held.items() if value != [None]] if isinstance(held, dict) else []
    if not names:
        return ()
    shown = ", ".join(names[:2]) + (", ..." if len(names) > 2 else "")
    return (f"random states and other objects of Megatron's ranks are left out, {len(names)} in all: {shown}",)
