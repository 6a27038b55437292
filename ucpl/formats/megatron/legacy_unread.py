"""Values of Megatron's legacy files that the reader skips.

They are those of other ranks, and keys of no known release.
"""

from __future__ import annotations

from collections.abc import Iterator

from ucpl.extents import PickledCall, TensorRef
from ucpl.extents.account import NotRead
from ucpl.files.repeated_values import Copy, Mark, hypers_of, unlike
from ucpl.files.torch_files import TorchFile
from ucpl.files.unknown import unknown_keys
from ucpl.formats.megatron.legacy_ranks import LegacyRanks

__all__ = ["unread_in"]

_OPTIMIZER, _RANDOM, _ARGUMENTS = "optimizer", "rng_state", "args"
_OF_RANK = frozenset(("rank", "local_rank"))  # arguments that differ from rank to rank in each run
_STATES = frozenset(("fp32_from_fp16_params", "optimizer", "param_groups", "state"))
_INNER = frozenset(("param_groups", "state"))
_BUCKETS = frozenset(("buckets_coalesced", "per_bucket_numel", "per_bucket_numel_unpadded"))
_BY = "Megatron"


def unread_in(ranks: LegacyRanks, own: frozenset[str], mark: Mark, *, is_trained: bool) -> Iterator[NotRead]:
    """Find values that are not read.

    own: top-level keys that are read of each rank. is_trained: the optimizer is read.
    """
    parts = [*ranks.parts.values()]
    tops = [(part, part.value if isinstance(part.value, dict) else {}) for part in parts]
    rest = [{k: _plain(k, v) for k, v in top.items() if k not in own and k != _RANDOM} for _, top in tops]
    yield from unlike(((part, "", one) for part, one in zip(parts, rest, strict=True)), mark)
    for chunk in (key for key in own if key.startswith("model")):
        for stage in dict.fromkeys(place[1] for place in ranks.parts):
            of_stage = (one for place, one in ranks.parts.items() if place[1] == stage)
            yield from unlike(((one, f"{chunk}/", _no_tensors(one, chunk)) for one in of_stage), mark)
    if not is_trained:
        return
    found = [one for part, top in tops for one in _optimizers(part, top.get(_OPTIMIZER))]
    yield from unlike(((part, at, _without(value, _STATES)) for part, at, value in found), mark)
    numbers = dict.fromkeys(at for _, at, _ in found)
    for number in numbers:
        same = [one for one in found if one[1] == number]
        yield from unlike(((part, f"{_inner(at, value)[0]}param_groups/", hypers_of(_inner(at, value)[1]))
                           for part, at, value in same), mark)  # fmt: skip
    for part in ranks.optims.values():
        yield from _buckets(part)
    for part, at, value in found:
        lead, inner = _inner(at, value)
        if lead != at:
            yield from unknown_keys(part.file, inner, _INNER, lead, _BY)
        states = inner.get("state") if isinstance(inner, dict) else None
        for key in states if isinstance(states, dict) else ():
            if not isinstance(key, int) and key != "common_step":
                yield from unknown_keys(part.file, {key: None}, (), f"{lead}state/", _BY)


def _buckets(part: TorchFile) -> Iterator[NotRead]:
    """Unknown entries of distrib_optim.pt.

    Known ones are a buffer's number and, in a buffer, a pair of dtypes.
    """
    for n, one in enumerate(part.value if isinstance(part.value, list) else [part.value]):
        lead = f"{n}/" if isinstance(part.value, list) else ""
        for key, held in one.items() if isinstance(one, dict) else ():
            if not isinstance(key, int):
                yield from unknown_keys(part.file, {key: held}, _BUCKETS, lead, _BY)
            for pair in held if isinstance(key, int) and isinstance(held, dict) else ():
                if not isinstance(pair, tuple):
                    yield from unknown_keys(part.file, {pair: None}, (), f"{lead}{key}/", _BY)


def _no_tensors(part: TorchFile, chunk: str) -> dict[object, object]:
    """Values of a model's state dict that are no tensors."""
    held = part.value.get(chunk) if isinstance(part.value, dict) else None
    named = held.items() if isinstance(held, dict) else ()
    return {name: value for name, value in named if not isinstance(value, TensorRef | dict)}


def _plain(key: object, value: object) -> object:
    """Arguments of a run without those of one rank."""
    state = value.state if isinstance(value, PickledCall) else None
    if key != _ARGUMENTS or not isinstance(state, dict):
        return value
    return _without(state, _OF_RANK)


def _optimizers(part: TorchFile, held: object) -> Iterator[Copy]:
    """The optimizer of a rank, or those of its chain."""
    if isinstance(held, list):
        yield from ((part, f"{_OPTIMIZER}/{n}/", one) for n, one in enumerate(held))
    elif held is not None:
        yield part, f"{_OPTIMIZER}/", held


def _inner(at: str, value: object) -> tuple[str, object]:
    if isinstance(value, dict) and "param_groups" not in value and _OPTIMIZER in value:
        return f"{at}{_OPTIMIZER}/", value[_OPTIMIZER]
    return at, value


def _without(value: object, keys: frozenset[str]) -> object:
    return {key: one for key, one in value.items() if key not in keys} if isinstance(value, dict) else value
