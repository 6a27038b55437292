"""Keys of files that no known release of their framework writes: the reader passes them by, and names them."""

from __future__ import annotations

from collections.abc import Container, Iterator

from ucpl.extents.account import NotRead
from ucpl.stores.torch_files import TorchFile

__all__ = ["SHARED", "unknown_in", "unknown_keys"]

_TOP = frozenset(("optimizer_state_dict", "ds_config", "ds_version", "optimizer"))
_SHARD = frozenset(
    (
        "base_optimizer_state",
        "base_optimizer_state_step",
        "clip_grad",
        "ds_version",
        "ds_zero_partition_groups",
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
        "zero_stage",
    )
)
_BASE = frozenset(("state", "param_groups"))
SHARED = _SHARD | _BASE  # of zero/optimizer_state.pt, a copy of one rank's
_WHY = "no known release of {} writes it"


def unknown_keys(
    file: str, value: object, known: Container[object], lead: str = "", by: str = "its framework"
) -> Iterator[NotRead]:
    """Keys of a dict of a file that are not among the known ones; none of another value."""
    for key in value if isinstance(value, dict) else ():
        if key not in known:
            yield NotRead(f"{file}: {lead}{key}", _WHY.format(by), kind="value")


def unknown_in(part: TorchFile) -> Iterator[NotRead]:
    """Those of a shard of ZeRO's optimizer; none of another file."""
    top = part.value
    held = top.get("optimizer_state_dict") if isinstance(top, dict) else None
    if not isinstance(held, dict) or not held.keys() & {"base_optimizer_state", "fp32_flat_groups"}:
        return
    levels: list[tuple[str, object, frozenset[str]]] = [("", top, _TOP), ("optimizer_state_dict/", held, _SHARD)]
    for name in ("base_optimizer_state", "optimizer_state_dict"):
        base = held.get(name)
        levels.append((f"optimizer_state_dict/{name}/", base, _BASE))
        states = base.get("state") if isinstance(base, dict) else None
        for key in states if isinstance(states, dict) else ():
            if not isinstance(key, int):
                levels.append((f"optimizer_state_dict/{name}/state/", {key: None}, frozenset()))
    for lead, value, known in levels:
        yield from unknown_keys(part.file, value, known, lead, "DeepSpeed")
