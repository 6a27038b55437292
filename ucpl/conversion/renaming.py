"""Renames a checkpoint's tensors for a target: groups, numbers and states."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from attrs import evolve

from ucpl.errors import Label, fail
from ucpl.extents.parallel_facts import ParallelFacts

if TYPE_CHECKING:
    from ucpl.extents import Counted, NamedTensor, ParameterGroup
    from ucpl.files.checkpoint import Checkpoint

__all__ = ["renamed"]


def renamed(
    checkpoint: Checkpoint,
    made: Mapping[str, Sequence[str]],
    tensors: Sequence[NamedTensor],
    aliases: Mapping[str, str],
) -> Checkpoint:
    """The checkpoint with the target's names in groups, numbers and states.

    Raises: UcplError E337 if tensors that become one differ in dtype, kind or numbers, or in the hyper-parameters of their
    groups.
    """
    state = checkpoint.state
    groups = {member: g.name for g in state.groups for member in g.members}
    held = {t.name: t for t in checkpoint.state.tensors}

    def agreed(name: str, what: str, of: Callable[[str], object]) -> object:
        first, *others = made[name]
        for other in others:
            if of(other) != of(first):
                fail(
                    "E337",
                    f"`{name}` is made of `{first}` and `{other}`, and they are of other {what}",
                    Label(str(checkpoint.top), str(of(first)), where=first),
                    Label(str(checkpoint.top), str(of(other)), where=other),
                )
        return of(first)

    for name, parts in made.items():
        _demand_alike_groups(checkpoint, name, parts, groups)
        for what, of in (("dtypes", lambda t: held[t].dtype), ("kinds", lambda t: held[t].kind)):
            agreed(name, what, of)
        agreed(name, "states", lambda t: sorted(held[t].states))
        for called, values in state.scalars.items():
            agreed(name, f"numbers of `{called}`", _numbers(values))
    first = {name: of[0] for name, of in made.items()}
    scalars = {
        called: {name: values[one] for name, one in first.items() if one in values}
        for called, values in state.scalars.items()
    }
    known = evolve(
        state,
        tensors=tuple(tensors),
        aliases=dict(aliases),
        groups=tuple(_renamed(group, first, held) for group in state.groups),
        scalars=scalars,
        blobs=_blobs(checkpoint, made),
        parallel=ParallelFacts(carried_by_rank=state.parallel.carried_by_rank),
    )
    extents = {
        called: {name: mine[one] for name, one in first.items() if one in mine}
        for called, mine in checkpoint.scalar_extents.items()
    }
    return evolve(
        checkpoint,
        state=known,
        scalar_extents=extents,
        own=checkpoint.own.renamed() if checkpoint.own is not None else None,
    )


def _renamed(group: ParameterGroup, first: Mapping[str, str], held: Collection[str]) -> ParameterGroup:
    """A group with the target's names.

    Names of tensors without elements, which no plan has, stay.
    """
    from ucpl.files.groups import named_hyper

    every = [name for name, one in first.items() if one in group.every]
    every += [name for name in group.every if name not in held]
    members = tuple(name for name in every if first.get(name, name) in group.members)
    listed = tuple(every) if len(every) > len(members) else ()
    return evolve(group, members=members, hyper={**named_hyper(group.hyper, every)}, listed=listed)


def _blobs(checkpoint: Checkpoint, made: Mapping[str, Sequence[str]]) -> dict[str, object]:
    """Raises: UcplError E448."""
    from ucpl.formats.leaving import OPTIMIZER_VALUES, with_names

    blobs = checkpoint.state.blobs
    if OPTIMIZER_VALUES not in blobs:
        return blobs
    return {**blobs, OPTIMIZER_VALUES: with_names(blobs[OPTIMIZER_VALUES], made, checkpoint.top)}


def _demand_alike_groups(checkpoint: Checkpoint, name: str, parts: Sequence[str], groups: Mapping[str, str]) -> None:
    """Check that tensors that become one have the same hyper-parameters.

    Raises: UcplError E337.
    """
    from ucpl.files.groups import differences

    known = {group.name: group.hyper for group in checkpoint.state.groups}
    first, *others = parts
    for other in others:
        names = groups.get(first), groups.get(other)
        hypers = [known.get(group) if group is not None else None for group in names]
        if names[0] == names[1]:
            continue
        key = "whether an optimizer trains it"
        if hypers[0] is not None and hypers[1] is not None:
            key = next(iter(differences(hypers[0], hypers[1], checkpoint.carried_extents.values())), "")
        if key:
            fail(
                "E337",
                f"`{name}` is made of `{first}` and `{other}`, of parameter groups that differ in {key}",
                Label(str(checkpoint.top), f"group {names[0]}", where=first),
                Label(str(checkpoint.top), f"group {names[1]}", where=other),
            )


def _numbers(values: Mapping[str, Counted]) -> Callable[[str], object]:
    from ucpl.files.scalars import number_of

    return lambda name: number_of(values[name]) if name in values else None
