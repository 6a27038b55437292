"""Keys of Megatron-Core's common state that the reader skips.

They describe its files or its optimizer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ucpl.extents.account import NotRead
from ucpl.files.torch_files import TorchFile
from ucpl.files.unknown import Copy, hypers_of, unknown_keys, unlike
from ucpl.formats.dcp.metadata import METADATA

__all__ = ["BACKEND_KEYS", "unread_objects", "SCALER", "SCALING", "unread_of"]

SCALER = "grad_scaler"
SCALING = "the loss scaling of a run in fp16 is not read: a job begins with a new one"
EMPTY_GROUP = "no parameter is in this group by Megatron's rule"
_CONTENT = frozenset(
    (
        "chained_optim_avoid_prefix",
        "distrib_optim_fully_reshardable_mem_efficient",
        "distrib_optim_sharding_type",
        "dp_cp_group",
        "non_homogeneous_layers",
        "singleton_local_shards",
    )
)
_OPTIMIZER = frozenset(
    (
        "fp32_from_fp16_params",
        "optimizer",
        "param_groups",
        "param_state",
        "param_state_sharding_type",
        "state",
    )
)
_INNER = frozenset(("param_groups", "state"))
_STATE = frozenset(("common_step",))
_STEP = frozenset(("step",))
BACKEND_KEYS = ("common_backend", "common_backend_version", "sharded_backend", "sharded_backend_version")
_BY = "Megatron-Core"


def unread_of(common: TorchFile, *, is_trained: bool, empty: tuple[str, ...]) -> Iterator[NotRead]:
    """Of common.pt: keys without a place in a target.

    is_trained: whether the optimizer is read. empty: numbers of groups that get no parameter.
    """
    for group in empty:
        yield NotRead(f"param_groups/{group}", EMPTY_GROUP, kind="value")
    top = common.value if isinstance(common.value, dict) else {}
    yield from unknown_keys(common.file, top.get("content_metadata"), _CONTENT, "content_metadata/", _BY)
    held = top.get("optimizer")
    if not is_trained or not isinstance(held, dict):
        return
    numbers = [key for key in held if isinstance(key, int)]
    if not numbers:
        yield from _of_one(common.file, held, "optimizer/")
        return
    yield from unknown_keys(common.file, held, {*numbers}, "optimizer/", _BY)
    for number in numbers:
        yield from _of_one(common.file, held[number], f"optimizer/{number}/")


def _of_one(file: str, optimizer: object, lead: str) -> Iterator[NotRead]:
    """Of one optimizer of a chain, or of the only one."""
    if not isinstance(optimizer, dict):
        return
    if SCALER in optimizer:
        yield NotRead(f"{file}: {lead}{SCALER}", SCALING, kind="value")
    yield from unknown_keys(file, optimizer, {*_OPTIMIZER, SCALER}, lead, _BY)
    inner = optimizer.get("optimizer")
    yield from unknown_keys(file, inner, _INNER, f"{lead}optimizer/", _BY)
    numbered = optimizer.get("param_state")
    for number, kept in numbered.items() if isinstance(numbered, dict) else ():
        known = _STEP if isinstance(number, int) else ()
        yield from unknown_keys(file, kept if known else {number: kept}, known, f"{lead}param_state/", _BY)
    for holder, at in ((optimizer, lead), (inner, f"{lead}optimizer/")):
        state = holder.get("state") if isinstance(holder, dict) else None
        yield from unknown_keys(file, state, _STATE, f"{at}state/", _BY)


def unread_objects(objects: Iterable[tuple[str, TorchFile]]) -> Iterator[NotRead]:
    """Unknown keys of objects for buckets, and values of another rank."""
    groups: dict[str, list[Copy]] = {}
    for entry, part in objects:
        for n, held in enumerate(part.value if isinstance(part.value, list) else ()):
            lead = f"{entry}/{n}/"
            if ".optimizer/shard_" in f".{entry}":
                yield from unknown_keys(METADATA, held, _OPTIMIZER, lead, _BY)
                chain = entry.partition("optimizer.")[0]
                groups.setdefault(chain, []).append((part, f"{lead}param_groups/", hypers_of(held)))
            else:
                yield from _without_dtypes(held, lead)
    for copies in groups.values():
        yield from unlike(copies, repr)


def _without_dtypes(value: object, lead: str) -> Iterator[NotRead]:
    """Keys of the lengths of buckets that are no pair of dtypes."""
    if isinstance(value, list):
        for n, one in enumerate(value):
            yield from _without_dtypes(one, f"{lead}{n}/")
    for key in value if isinstance(value, dict) else ():
        if not isinstance(key, tuple):
            yield from unknown_keys(METADATA, {key: None}, (), lead, _BY)
