"""Values of a run that a target's files have no place for, by format, as data; and values that describe files.

Not here: client_state and groups, which all formats of runs keep (conversion.accounting).
"""

from __future__ import annotations

from ucpl.extents import Structure
from ucpl.stores.checkpoint import Checkpoint
from ucpl.stores.dcp.metadata import META
from ucpl.stores.huggingface_texts import TEXTS
from ucpl.stores.plain import EMPTY
from ucpl.stores.skipping import TENSORS_ALONE

__all__ = ["DESCRIBING", "EMPTY", "EXTRA", "LAYERS", "SCALE", "SCALED", "TEXTS", "keeps_all", "left_values"]

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
_OF_MEGATRON = ("sharded_objects", "megatron_rng", "megatron_fsdp_rng", "megatron_optimizer", "megatron_extra_state")
_OF_DEEPSPEED = (
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
# Formats whose files have places for these values alone; others keep all values of any run.
_KEPT: dict[str, frozenset[str]] = {
    "deepspeed": frozenset(_OF_DEEPSPEED),
    "universal": frozenset(_OF_DEEPSPEED) - {"module_extra"},
    "megatron_legacy": frozenset(("global_steps", "megatron_rng", "megatron_optimizer")),
    "huggingface": frozenset((TEXTS,)),
    "torch": frozenset((TEXTS,)),
}
_TITLES = {
    "deepspeed": "DeepSpeed's files",
    "universal": "a universal folder",
    "megatron_legacy": "Megatron's legacy files",
}


def keeps_all(framework: str) -> bool:
    """Whether a format keeps all values of any run."""
    return framework not in _KEPT


def left_values(source: Checkpoint, structure: Structure) -> dict[str, str]:
    """Names of values of the run -> the reason for which a target has none of them."""
    kept = _KEPT.get(structure.framework)
    title = _TITLES.get(structure.framework) or TENSORS_ALONE.get(structure.framework, "")
    out = {
        name: f"{title} have no place for it" if title.endswith("files") else f"{title} has no place for it"
        for name in source.envelope.blobs
        if kept is not None and name not in kept and name not in DESCRIBING
    }
    if (
        structure.framework == "deepspeed"
        and structure.settings.get("stage") == 3
        and "clip_grad" in source.envelope.blobs
    ):
        out["clip_grad"] = "shards of stage 3 have none: ds_config has it"
    if META in out:
        out[META] = "it is Lightning's file of what is in no chunk"
    return out
