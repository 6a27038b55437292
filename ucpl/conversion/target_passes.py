"""Target passes: from the source's metadata to the target's.

A plan has their parameters (`Recipe`), so that `apply` runs them on the source of that time. Not here: the bytes of tensors,
which the graph of the plan moves, and their dtypes (module `training`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

from attrs import evolve

from ucpl.conversion.dropping import (
    reject_schedules_of_one,
    with_changed_groups,
    with_trained_members,
    without_dropped,
    without_frozen,
)
from ucpl.conversion.regrouping import group_notes, regrouped, with_empty_groups, with_model_names
from ucpl.conversion.source_passes import few
from ucpl.records import frozen

if TYPE_CHECKING:
    from ucpl.extents import Counted
    from ucpl.files.checkpoint import Checkpoint
    from ucpl.planning.plan import Recipe

__all__ = ["TARGET_PASSES", "AfterPasses", "TargetPass", "apply_target_passes", "decide_target_passes"]

K = TypeVar("K")
T = TypeVar("T")


def _same(checkpoint: Checkpoint, recipe: Recipe) -> Recipe:
    """The parameters of this pass are known before."""
    return recipe


@frozen(eq=False)
class TargetPass:
    """One change from the source's metadata to the target's.

    did: a text of each change; none: the pass changes nothing. decide: completes the recipe while a plan is made, from the
    metadata that comes to this pass.
    """

    name: str
    text: str
    apply: Callable[[Checkpoint, Recipe], Checkpoint]
    did: Callable[[Checkpoint, Recipe], Sequence[str]]
    decide: Callable[[Checkpoint, Recipe], Recipe] = _same


def _leave_out(checkpoint: Checkpoint, recipe: Recipe) -> Checkpoint:
    """Without values, numbers and files that are dropped by name."""
    from ucpl.formats.leaving import without_states

    names = recipe.left_out
    if checkpoint.container is not None:
        checkpoint = evolve(checkpoint, container=checkpoint.container.without({*names}))
    known = without_states(checkpoint.state, names)
    if names.isdisjoint(known.carried) and names.isdisjoint(known.scalars):
        return evolve(checkpoint, state=known)

    def rest(values: Mapping[K, T]) -> dict[K, T]:
        return {key: value for key, value in values.items() if key not in names}

    callers = known.parallel.carried_by_rank
    parallel = evolve(known.parallel, carried_by_rank=evolve(callers, of=tuple(map(rest, callers.of))))
    less = evolve(known, carried=rest(known.carried), scalars=rest(known.scalars), parallel=parallel)
    return evolve(checkpoint, state=less)


def _rename(checkpoint: Checkpoint, recipe: Recipe) -> Checkpoint:
    if not recipe.renamed:
        return checkpoint
    from ucpl.conversion.renaming import renamed

    return renamed(checkpoint, recipe.renamed, recipe.target.tensors, recipe.target.aliases)


def _fill(checkpoint: Checkpoint, recipe: Recipe) -> Checkpoint:
    """With numbers (`step`) of parameters that have none."""
    if not recipe.begun:
        return checkpoint
    known = checkpoint.state
    scalars = {**known.scalars}
    for state, mine in recipe.begun.items():
        whole: dict[str, Counted] = {path: int(v) if v.is_integer() else v for path, v in mine.items()}
        scalars[state] = {**whole, **known.scalars.get(state, {})}
    begun = {state: frozenset(mine) for state, mine in recipe.begun.items()}
    return evolve(checkpoint, state=evolve(known, scalars=scalars, initial_scalars=begun))


def _listed(kind: str) -> Callable[[Checkpoint, Recipe], Sequence[str]]:
    """The names of one kind that the recipe has."""
    return lambda _, recipe: [few(recipe.gone[kind])] if recipe.gone.get(kind) else []


def _lines_of_names(_: Checkpoint, recipe: Recipe) -> Sequence[str]:
    made = [f"{name} of {', '.join(of)}" for name, of in recipe.renamed.items() if of != (name,)]
    return [few(made)] if made else []


def _lines_of_frozen(_: Checkpoint, recipe: Recipe) -> Sequence[str]:
    names = [name for name in recipe.gone.get("numbers", ()) if name not in recipe.gone["names"]]
    return [few(names)] if names else []


def _lines_of_new(_: Checkpoint, recipe: Recipe) -> Sequence[str]:
    gone = recipe.gone
    made = zip(gone.get("new", ()), gone.get("like", ()), strict=True)
    return [
        *(f"group {name} is left out" for name in gone.get("groups", ())),
        *(f"group {new} is new, like {like}" for new, like in made),
    ]


def _lines_of_fill(_: Checkpoint, recipe: Recipe) -> Sequence[str]:
    return [f"{state} of {few([*numbers])}" for state, numbers in recipe.begun.items()]


def _with_changed_groups(checkpoint: Checkpoint, recipe: Recipe) -> Checkpoint:
    made = with_changed_groups(checkpoint, recipe.gone)
    if made is not checkpoint:
        reject_schedules_of_one(checkpoint)
    return made


TARGET_PASSES = (
    TargetPass(
        "leave-out",
        "leave out values of client_state, numbers and files that are dropped by name",
        _leave_out,
        lambda _, recipe: [few(sorted(recipe.left_out))] if recipe.left_out else [],
    ),
    TargetPass("rename", "give groups, numbers and states the target's names of tensors", _rename, _lines_of_names),
    TargetPass(
        "drop",
        "leave out the tensors that are dropped by name, and their numbers",
        lambda checkpoint, recipe: without_dropped(checkpoint, recipe.gone),
        _listed("names"),
    ),
    TargetPass(
        "freeze",
        "leave out the optimizer's numbers of parameters that are frozen by name",
        lambda checkpoint, recipe: without_frozen(checkpoint, recipe.gone),
        _lines_of_frozen,
    ),
    TargetPass(
        "groups",
        "leave out groups without a parameter, and add new groups, each like another one",
        _with_changed_groups,
        _lines_of_new,
    ),
    TargetPass(
        "train",
        "put parameters that are trained from here on into their groups",
        lambda checkpoint, recipe: with_trained_members(checkpoint, recipe.gone),
        _listed("trained"),
    ),
    TargetPass("fill", "give numbers to parameters that have none in the source", _fill, _lines_of_fill),
    TargetPass(
        "regroup",
        "give each group of the target the hyper-parameters and schedules of its members",
        regrouped,
        group_notes,
        with_empty_groups,
    ),
)


@frozen(eq=False)
class AfterPasses:
    """A source's metadata after the target passes."""

    final: Checkpoint  # rendered by the target's writer
    ungrouped: Checkpoint  # before `regroup`: the source's groups, with the target's names


def apply_target_passes(checkpoint: Checkpoint, recipe: Recipe) -> AfterPasses:
    """The metadata for the target of a finished recipe.

    Raises: UcplError E328, E337, E482, E483.
    """
    before = checkpoint
    for each in TARGET_PASSES:
        before, checkpoint = checkpoint, each.apply(checkpoint, recipe)
    return AfterPasses(checkpoint, with_model_names(before, recipe))


def decide_target_passes(checkpoint: Checkpoint, recipe: Recipe) -> tuple[AfterPasses, Recipe]:
    """The metadata for the target, and the finished recipe.

    It has the passes that change something. Raises: UcplError as `apply_target_passes`.
    """
    from ucpl.planning.plan import Passed

    did, before = [], checkpoint
    for each in TARGET_PASSES:
        recipe = each.decide(checkpoint, recipe)
        did += [Passed(each.name, text) for text in each.did(checkpoint, recipe)]
        before, checkpoint = checkpoint, each.apply(checkpoint, recipe)
    return AfterPasses(checkpoint, with_model_names(before, recipe)), evolve(recipe, passes=(*recipe.passes, *did))
