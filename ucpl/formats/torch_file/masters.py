"""Masters in a list, in the order of the optimizer's parameters.

Apex and older Megatron have such a list for each group (`fp32_from_fp16_params`). A list is one of masters if the model's
weights have 16 bits, the optimizer's states are in f32, and the list has a tensor in f32 of each parameter's shape. Averages of
weights are none.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from attrs import field

from ucpl.extents import Key, TensorRef, key_text
from ucpl.formats.torch_dicts import is_average
from ucpl.records import frozen

__all__ = ["BY_GROUP", "MasterList", "list_of", "masters_in"]

BY_GROUP = "/*"  # the end of a list's key, if it has a list for each group
_DEPTH = 3  # of dicts around a list
_NARROW = ("bf16", "f16")


@frozen(eq=False)
class MasterList:
    """The list at a place, and its tensors by parameter."""

    place: Key = ()
    tensors: dict[str, tuple[Key, TensorRef]] = field(factory=dict)
    is_by_group: bool = False

    @property
    def key(self) -> str:
        """The text of a setting."""
        return key_text(self.place) + (BY_GROUP if self.is_by_group else "")


def masters_in(value: object, weights: Mapping[str, TensorRef], groups: Sequence[Sequence[str]]) -> MasterList | None:
    """The only list of masters in a file, or None.

    groups: the parameters of the optimizer's groups.
    """
    names = [name for group in groups for name in group]
    if not any(weights[name].storage.dtype in _NARROW for name in names):
        return None
    found = [*_lists(value, (), weights, groups)]
    return found[0] if len(found) == 1 else None


def _lists(
    value: object, place: Key, weights: Mapping[str, TensorRef], groups: Sequence[Sequence[str]]
) -> Iterator[MasterList]:
    if isinstance(value, dict) and len(place) < _DEPTH:
        for key, one in value.items():
            if type(key) is str and not is_average((key,)):
                yield from _lists(one, (*place, key), weights, groups)
    elif isinstance(value, list) and value:
        names = [name for group in groups for name in group]
        by_group = [(*place, g, n) for g, group in enumerate(groups) for n in range(len(group))]
        is_nested = all(isinstance(one, list) for one in value) and [*map(len, value)] == [*map(len, groups)]
        tensors = [one for inner in value for one in inner] if is_nested else value
        places = by_group if is_nested else [(*place, n) for n in range(len(names))]
        if len(tensors) == len(names) and all(
            isinstance(one, TensorRef) and one.storage.dtype == "f32" and one.shape == weights[name].shape
            for name, one in zip(names, tensors, strict=True)
        ):
            made = dict(zip(names, zip(places, tensors, strict=True), strict=True))
            yield MasterList(place, made, is_nested)


def list_of(groups: Sequence[Sequence[str]], masters: Mapping[str, object], *, is_by_group: bool) -> list[object]:
    """The list of a target."""
    if is_by_group:
        return [[masters[name] for name in group] for group in groups]
    return [masters[name] for group in groups for name in group]
