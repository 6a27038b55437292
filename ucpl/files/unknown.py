"""Keys that no known release of the framework writes: skipped and named."""

from __future__ import annotations

from collections.abc import Container, Iterator

from ucpl.extents.account import NotRead
from ucpl.files.torch_files import TorchFile

__all__ = ["SHARED", "unknown_in", "unknown_keys", "unknown_of_torch"]

_TOP = frozenset(("optimizer_state_dict", "ds_config", "ds_version", "optimizer"))
_CUTS = "ds_zero_partition_groups"
_CUT = frozenset(("sub_group", "partition_count", "partition_rank", "partition_ranks", "families", "group_names"))
_SHARD = frozenset(
    (
        "base_optimizer_state",
        "base_optimizer_state_step",
        "clip_grad",
        "ds_version",
        _CUTS,
        "dynamic_loss_scale",
        "fp32_flat_groups",
        "group_paddings",
        "loss_scaler",
        "optimizer_state_dict",
        "overflow",
        "param_alignment_paddings",
        "param_slice_mappings",
        "partition_count",
        "single_partition_of_fp32_groups",
        "universal_checkpoint_info",
        "zero_stage",
    )
)
_BASE = frozenset(("state", "param_groups"))
SHARED = _SHARD | _BASE  # of zero/optimizer_state.pt, a copy of one rank's
_WHY = "no known release of {} writes it"


def unknown_keys(
    file: str, value: object, known: Container[object], lead: str = "", by: str = "its framework"
) -> Iterator[NotRead]:
    """Unknown keys of a dict of a file; none of another value."""
    for key in value if isinstance(value, dict) else ():
        if key not in known:
            yield NotRead(f"{file}: {lead}{key}", _WHY.format(by), kind="value")


def unknown_in(part: TorchFile) -> Iterator[NotRead]:
    """Unknown keys of a ZeRO shard, or of an optimizer without ZeRO."""
    top = part.value if isinstance(part.value, dict) else {}
    held, apart = top.get("optimizer_state_dict"), top.get("optimizer")
    if isinstance(held, dict) and held.keys() & {"base_optimizer_state", "fp32_flat_groups"}:
        yield from unknown_keys(part.file, top, _TOP, by="DeepSpeed")
        yield from unknown_keys(part.file, held, _SHARD, "optimizer_state_dict/", "DeepSpeed")
        for number, cut in enumerate(cuts if isinstance(cuts := held.get(_CUTS), list | tuple) else ()):
            yield from unknown_keys(part.file, cut, _CUT, f"optimizer_state_dict/{_CUTS}/{number}/", "DeepSpeed")
        for name in ("base_optimizer_state", "optimizer_state_dict"):
            yield from unknown_of_torch(part.file, held.get(name), f"optimizer_state_dict/{name}/")
    elif "module" in top and isinstance(apart, dict):
        yield from unknown_of_torch(part.file, apart.get("optimizer_state_dict"), "optimizer/optimizer_state_dict/")


def unknown_of_torch(file: str, value: object, lead: str, count: int | None = None) -> Iterator[NotRead]:
    """Unknown keys of a torch optimizer's state dict, with `count` numbers."""
    yield from unknown_keys(file, value, _BASE, lead, "DeepSpeed")
    states = value.get("state") if isinstance(value, dict) else None
    for key in states if isinstance(states, dict) else ():
        if not isinstance(key, int):
            yield from unknown_keys(file, {key: None}, (), f"{lead}state/", "DeepSpeed")
        elif count is not None and not 0 <= key < count:
            yield NotRead(f"{file}: {lead}state/{key}", "it is the state of no group of the model", kind="value")
