"""Hyper-parameters of a target's parameter groups, from the source by parameter.

Positions and names of groups are not used: a model may regroup its parameters, and a job may give groups other names.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NoReturn

from ucpl.errors import Label, fail
from ucpl.extents import ParameterGroup, TensorRef
from ucpl.files.carrying import Place, by_place, origin_of
from ucpl.files.scalars import number_of

if TYPE_CHECKING:
    from ucpl.extents import Extent, TrainState
    from ucpl.files.checkpoint import Checkpoint

__all__ = [
    "Hyper",
    "Wanted",
    "agreed",
    "differences",
    "each_of",
    "has_groups_alone",
    "matched",
    "named_hyper",
    "reject_without",
    "sources_of",
    "with_empty",
]

Wanted = Sequence[tuple[str, tuple[str, ...]]]  # groups of a target: (name, members in the optimizer's order)
Hyper = Mapping[str, object]

_STATED = "param_names"  # of torch 2.6 and later
_NAMES = ("params", _STATED)  # names of members, which every target has of its own
_SHOWN = 3


def matched(source: Checkpoint, wanted: Wanted) -> tuple[ParameterGroup, ...]:
    """A target's groups with the hyper-parameters of their members in the source.

    A group without members has those of the source's group of that name without members. If the source has no
    hyper-parameters (weights alone), no group gets any. Raises: UcplError E482 if members disagree, E483 if the source
    has no values for a group.
    """
    known = source.state.groups
    is_silent = not any(group.hyper for group in known)
    listed = _listed_in(known, wanted)
    out = []
    for number, ((name, members), hyper) in enumerate(
        zip(wanted, agreed(known, wanted, source.carried_extents.values()), strict=True)
    ):
        if hyper is None and not is_silent:
            like = next(group.name for group in known if group.hyper)
            reject_without(members, f"group {number} (`{name}`) of the target", f"{name}:{like}")
        out.append(ParameterGroup(name, members, dict(hyper or {}), listed[number]))
    return tuple(out)


def named_hyper(hyper: Hyper, names: Sequence[str]) -> Hyper:
    """A group's hyper-parameters, with the target's `param_names` if it has any."""
    return {**hyper, _STATED: [*names]} if _STATED in hyper else hyper


def agreed(known: Sequence[ParameterGroup], wanted: Wanted, tensors: Iterable[Extent] = ()) -> list[Hyper | None]:
    """The hyper-parameters of each target group; None if the source has none.

    tensors: the source's, which can be hyper-parameters. Raises: UcplError E482 if members of a group disagree.
    """
    tensors = tuple(tensors)
    out: list[Hyper | None] = []
    for number, ((name, members), found) in enumerate(zip(wanted, sources_of(known, wanted), strict=True)):
        for other in found[1:]:
            _check_equal((number, name, members), (known[found[0]], known[other]), tensors)
        out.append(known[found[0]].hyper if found else None)
    return out


def sources_of(known: Sequence[ParameterGroup], wanted: Wanted) -> list[list[int]]:
    """The source's groups of the members of each target group, by number."""
    holder = {member: i for i, group in enumerate(known) for member in group.members}
    without = {group.name: i for i, group in enumerate(known) if not group.members}
    out = []
    for name, members in wanted:
        found = list(dict.fromkeys(holder[member] for member in members if member in holder))
        out.append(found or ([without[name]] if name in without else []))
    return out


def with_empty(known: Sequence[ParameterGroup], wanted: Wanted) -> tuple[Wanted, tuple[str, ...]]:
    """A target's groups with the source's empty groups.

    Empty groups train nothing. One has no place if the target groups parameters differently.
    """
    places = [found[0] for found in sources_of(known, wanted) if found]
    names = {name for name, _ in wanted}
    alone = [i for i, group in enumerate(known) if not group.members and group.hyper and group.name not in names]
    if places != sorted(set(places)):
        return wanted, tuple(known[i].name for i in alone)
    out: list[tuple[str, tuple[str, ...]]] = []
    for group, found in zip(wanted, sources_of(known, wanted), strict=True):
        while alone and found and alone[0] < found[0]:
            out.append((known[alone.pop(0)].name, ()))
        out.append(group)
    return (*out, *((known[i].name, ()) for i in alone)), ()


def _listed_in(known: Sequence[ParameterGroup], wanted: Wanted) -> list[tuple[str, ...]]:
    """All names of the optimizer in each target group.

    Frozen parameters stay in their groups.
    """
    trained = {member for _, members in wanted for member in members}
    left = {i: [name for name in group.every if name not in trained] for i, group in enumerate(known)}
    out = []
    for (_, members), found in zip(wanted, sources_of(known, wanted), strict=True):
        idle = [name for i in found for name in left.pop(i, [])]
        idle = [name for name in idle if not any(name in known[i].members for i in found)]
        order = [name for name in known[found[0]].every if name in {*members, *idle}] if found else []
        is_order = [name for name in order if name in members] == list(members)
        listed = order if is_order and set(order) == {*members, *idle} else [*members, *idle]
        out.append(tuple(listed) if idle else ())
    return out


def each_of(train_state: TrainState) -> dict[str, Hyper]:
    """The hyper-parameters of every parameter of the source's groups."""
    return {member: group.hyper for group in train_state.groups for member in group.members}


def has_groups_alone(source: Checkpoint) -> bool:
    """Test whether a source's optimizer has groups but no states.

    SGD without momentum is an example.
    """
    states = {state for tensor in source.state.tensors for state in tensor.states}
    return states <= {"fp32"} and any(group.hyper for group in source.state.groups)


def differences(one: Hyper, other: Hyper, tensors: Iterable[Extent] = ()) -> list[str]:
    """Keys of hyper-parameters that differ or are on one side only.

    tensors: the source's; some may be values.
    """
    places = by_place(tensors)
    keys = [key for key in dict.fromkeys([*one, *other]) if key not in _NAMES]
    return [
        key for key in keys if (key in one) != (key in other) or _value(one[key], places) != _value(other[key], places)
    ]


def _value(value: object, places: Mapping[Place, Extent]) -> object:
    """A value for comparison: numbers of small tensors, checksums of tensors, tuples."""
    if isinstance(value, TensorRef):
        file, storage = origin_of(value.storage.name)
        place = (file, storage, value.offset, value.shape, value.stride, value.storage.dtype)
        extent = places.get(place)
        if extent is None or extent.crc is None:
            return value
        return extent.dtype, extent.shape, extent.offset, extent.crc
    number = number_of(value)
    if isinstance(number, list | tuple):
        return tuple(_value(one, places) for one in number)
    listed = getattr(number, "tolist", None)  # of a live tensor
    return listed() if callable(listed) else number


def _check_equal(
    group: tuple[int, str, tuple[str, ...]], both: tuple[ParameterGroup, ParameterGroup], tensors: Iterable[Extent]
) -> None:
    """Raises: UcplError E482."""
    one, other = both
    keys = differences(one.hyper, other.hyper, tensors)
    if not keys:
        return
    number, name, members = group
    held = [[member for member in members if member in of.members] for of in both]
    key = keys[0]
    values = [_shown(of.hyper[key]) if key in of.hyper else "not set" for of in both]
    more = f" ({', '.join(keys[1:])} differ, too)" if keys[1:] else ""
    lines = [f'`group "{name}.{i}" = {_listed(names)}`' for i, names in enumerate(held)]
    fail(
        "E482",
        f"group {number} (`{name}`) of the target has `{held[0][0]}`, whose {key} is {values[0]}, and `{held[1][0]}`, whose"
        f" {key} is {values[1]}{more}",
        Label("<source>", f"{key} = {values[0]}", where=f"group {one.name}"),
        Label("<source>", f"{key} = {values[1]}", where=f"group {other.name}"),
        remedy=f"write groups in the target's model that keep them apart: {lines[0]} and {lines[1]}",
    )


def reject_without(members: Sequence[str], called: str = "", begun: str = "GROUP:LIKE") -> NoReturn:
    """Stop: the source has no hyper-parameters of a target group.

    Raises: UcplError E483.
    """
    named = f"`{members[0]}`{f' and {len(members) - 1:,} more' if members[1:] else ''}" if members else "no parameter"
    fail(
        "E483",
        f"{called or 'a group of the target'} has {named}, and the source has no hyper-parameters (lr and so on) for it",
        Label("<source>", "in no parameter group", where=members[0] if members else called),
        remedy=f"--train '{members[0]}={begun}' (the target's group, the source's group whose values it has); or write the"
        " parameters into a group that has parameters of the source"
        if members
        else "take the group out of the model",
    )


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")


def _shown(value: object) -> str:
    return "a tensor" if isinstance(value, TensorRef) else str(number_of(value))[:40]
