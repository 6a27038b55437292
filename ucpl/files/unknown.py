"""Unknown keys, and values that several files repeat: named."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator

from ucpl.extents import PickledCall
from ucpl.extents.account import NotRead
from ucpl.files.carrying import lifted
from ucpl.files.pickles import tensors_of
from ucpl.files.torch_files import TorchFile

__all__ = ["SHARED", "unknown_in", "unknown_keys", "unknown_of_torch", "Copy", "Mark", "hypers_of", "unlike"]

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


# ---- values that several files repeat --------------------------------------------------------------------------------


Mark = Callable[[object], object]  # equal for equal values, tensors by their bytes (carrying.marks_of)
Copy = tuple[TorchFile, str, object]  # a file, the key of a value in it with "/" at its end, or "", and the value
_DEPTH = 24
_ALIKE_MAX = 16
_MADE_DEPTH = 3  # of dicts and lists that a reader makes of a file's values


def unlike(copies: Iterable[Copy], mark: Mark) -> Iterator[NotRead]:
    """Places of each further copy whose values the first copy has not."""
    first: tuple[TorchFile, object] | None = None
    alike: list[object] = []  # values as the first one, or that one
    bare: dict[int, bool] = {}
    for part, lead, value in copies:
        if any(_is_one(value, one, bare) for one in alike):
            continue
        mine = lifted(value, part.file)
        found = [] if first is None else [*_differing(mine, first[1], mark, ())]
        first = first or (part, mine)
        if not found and len(alike) < _ALIKE_MAX:
            alike.append(value)
        for key in found:
            why = f"the values of {first[0].file} are taken for all ranks"
            yield NotRead(f"{part.file}: {lead}{'/'.join(map(str, key))}", why, kind="value")


def hypers_of(optimizer: object) -> list[object]:
    """Hyper-parameters of the groups of torch's optimizer, without their members."""
    groups = optimizer.get("param_groups") if isinstance(optimizer, dict) else None
    return [
        {key: value for key, value in group.items() if key != "params"} if isinstance(group, dict) else group
        for group in (groups if isinstance(groups, list) else ())
    ]


def _is_one(mine: object, first: object, bare: dict[int, bool], depth: int = 0) -> bool:
    """Test for values that equal files share, without tensors.

    Tensors of one description may have other bytes. bare: known values of `first`, by identity.
    """
    if mine is first:
        if id(first) not in bare:
            bare[id(first)] = next(tensors_of(first), None) is None
        return bare[id(first)]
    if depth >= _MADE_DEPTH or type(mine) is not type(first):
        return False
    if isinstance(mine, dict) and isinstance(first, dict):
        return mine.keys() == first.keys() and all(_is_one(mine[key], first[key], bare, depth + 1) for key in mine)
    if isinstance(mine, list) and isinstance(first, list):
        pairs = zip(mine, first, strict=False)
        return len(mine) == len(first) and all(_is_one(one, other, bare, depth + 1) for one, other in pairs)
    return False


def _differing(mine: object, first: object, mark: Mark, at: tuple[object, ...]) -> Iterator[tuple[object, ...]]:
    one, other = mine, first
    if isinstance(mine, PickledCall) and isinstance(first, PickledCall) and mine.function == first.function:
        one, other = mine.state, first.state
    if len(at) < _DEPTH and isinstance(one, dict) and isinstance(other, dict):
        for key, value in one.items():
            if key in other:
                yield from _differing(value, other[key], mark, (*at, key))
            else:
                yield (*at, key)
    elif len(at) < _DEPTH and isinstance(one, list | tuple) and isinstance(other, list | tuple):
        for n, value in enumerate(one):
            if n < len(other):
                yield from _differing(value, other[n], mark, (*at, n))
            else:
                yield (*at, n)
    elif mark(mine) != mark(first):
        yield at
