"""Parameter groups of a target: hyper-parameters and schedules, found by parameter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from attrs import evolve

from ucpl.conversion.dropping import noted, reject_schedules_of_one, with_places
from ucpl.errors import Label, UcplError, fail
from ucpl.files.groups import has_groups_alone, matched, sources_of, with_empty
from ucpl.registry import Format, format_named

if TYPE_CHECKING:
    from ucpl.extents import ParameterGroup, StoredTensor, Structure
    from ucpl.extents.containers import Container
    from ucpl.files.checkpoint import Checkpoint
    from ucpl.planning.plan import Recipe

__all__ = ["with_model_names", "regrouped", "group_notes", "with_empty_groups"]


def regrouped(checkpoint: Checkpoint, recipe: Recipe) -> Checkpoint:
    """The checkpoint with the groups of the target, which its writer renders.

    If the format has a rule of its own, or the target has weights alone, the groups stay those of the source. Raises:
    UcplError E482 and E483, see files/groups.
    """
    target, of = recipe.target, format_named(recipe.target.framework)
    has_alone = of.has_groups_alone and has_groups_alone(checkpoint)
    is_silent = not checkpoint.state.groups
    if not of.takes_plan_groups(checkpoint) or not (is_silent or has_alone or _has_states(of, checkpoint, target)):
        return checkpoint
    known = with_model_names(checkpoint, recipe)
    made = _with_frozen_members(known, target)
    state = known.state
    places = _places(known, target) if state.groups else None
    if places is not None:
        reject_schedules_of_one(known)
        state = evolve(
            state,
            blobs={key: _dealt(held, places, known, key) for key, held in state.blobs.items()},
            carried={key: _dealt(held, places, known, str(key)) for key, held in state.carried.items()},
        )
    if places is not None or recipe.gone.get("groups") or recipe.gone.get("new"):
        _demand_no_files_by_group(known.container, of)
    return evolve(known, state=evolve(state, groups=made))


def _with_frozen_members(checkpoint: Checkpoint, target: Structure) -> tuple[ParameterGroup, ...]:
    """The target's groups, with frozen names of the model's group lines."""
    frozen = {t.name for t in target.tensors if t.kind == "frozen"}
    stated = {name: members for name, members in target.groups if not frozen.isdisjoint(members)}
    made = matched(checkpoint, [(name, tuple(m for m in ms if m not in frozen)) for name, ms in target.groups])
    if not stated:
        return made
    said = {member for members in stated.values() for member in members}
    out = []
    for group in made:
        listed = stated.get(group.name, tuple(name for name in group.listed if name not in said))
        out.append(evolve(group, listed=listed if listed != group.members else ()))
    return tuple(out)


def with_empty_groups(checkpoint: Checkpoint, recipe: Recipe) -> Recipe:
    """The recipe with the source's empty groups in its target.

    Loaders expect as many groups as the job has. The recipe lists the empty groups without a place, and the groups of the
    target that differ from those of the source.
    """
    target = recipe.target
    if not _has_groups(checkpoint, target):
        return recipe
    known = with_model_names(checkpoint, recipe).state
    groups, lost = with_empty(known.groups, target.groups)
    names = {name for name, _ in target.groups}
    listed = {group.name: bool(group.listed) for group in known.groups}
    why = dict.fromkeys(lost, "the target groups parameters otherwise")
    of, origin = format_named(target.framework), format_named(known.framework)
    for name, _ in groups:
        reason = name not in names and of.group_dropped(target.settings, origin, is_listed=listed.get(name, False))
        if reason:
            why[name] = reason
    left = tuple(f"group of {name}: it trains no parameter, and {reason}" for name, reason in why.items())
    made = evolve(target, groups=tuple(group for group in groups if group[0] not in why))
    recipe = evolve(recipe, target=made, dropped=(*recipe.dropped, *left))
    return evolve(recipe, changed=(*recipe.changed, *group_notes(checkpoint, recipe)))


def group_notes(checkpoint: Checkpoint, recipe: Recipe) -> tuple[str, ...]:
    """A line for each group, if the target regroups parameters."""
    target = recipe.target
    if not _has_groups(checkpoint, target):
        return ()
    known = with_model_names(checkpoint, recipe)
    groups = known.state.groups
    if _places(known, target) is None:
        return ()
    out = []
    for number, ((name, _), found) in enumerate(zip(target.groups, sources_of(groups, target.groups), strict=True)):
        of = ", ".join(groups[i].name for i in found)
        out.append(
            f"group {number} ({name}) has the hyper-parameters of the source's group{'s' * (len(found) > 1)} {of}"
        )
    return tuple(out)


def _has_groups(checkpoint: Checkpoint, target: Structure) -> bool:
    """True if the target gets the plan's groups and the source's hyper-parameters."""
    of = format_named(target.framework)
    return of.has_plan_groups and bool(checkpoint.state.groups) and _has_states(of, checkpoint, target)


def _has_states(of: Format, checkpoint: Checkpoint, target: Structure) -> bool:
    """True if a target's files have groups.

    It has more than weights, or its format groups weights, too.
    """
    return of.has_groups_of_weights or bool(checkpoint.state.scalars) or any(t.states for t in target.tensors)


def _has_unknown(checkpoint: Checkpoint, target: Structure) -> bool:
    known = {member for group in checkpoint.state.groups for member in group.members}
    return any(member not in known for _, members in target.groups for member in members)


def with_model_names(checkpoint: Checkpoint, recipe: Recipe) -> Checkpoint:
    """The checkpoint with the model's tensor names in its groups.

    A spec's names may differ from the names in the files.
    """
    target = recipe.target
    if not _has_unknown(checkpoint, target):
        return checkpoint
    wanted = {member for _, members in target.groups for member in members}
    held = {member for group in checkpoint.state.groups for member in group.members}
    unknown, open_ = wanted - held, held - wanted
    called: dict[str, dict[str, None]] = {}  # a name in the files -> names of the model
    for shelf in recipe.source_shelves.shelves:
        names = shelf.block.owners or (shelf.label,)
        if shelf.state == "weight" and open_ and not unknown.isdisjoint(names):
            for tensor in shelf.each:
                if tensor.label in unknown:
                    for name in _names_in(tensor):
                        if name in open_:
                            called.setdefault(name, {})[tensor.label] = None
    if not called:
        return checkpoint

    def renamed(group: ParameterGroup) -> ParameterGroup:
        return evolve(
            group, members=tuple(dict.fromkeys(one for m in group.members for one in called.get(m, {m: None})))
        )

    state = checkpoint.state
    return evolve(checkpoint, state=evolve(state, groups=tuple(map(renamed, state.groups))))


def _names_in(tensor: StoredTensor) -> list[str]:
    """Possible names of a stored weight in its file.

    They are the steps of its key, and the rest of a step after each dot.
    """
    out = []
    for step in map(str, tensor.key):
        parts = step.split(".")
        out += [".".join(parts[i:]) for i in range(len(parts))]
    return out


# ---- schedules ---------------------------------------------------------------------------------------------------------


def _places(checkpoint: Checkpoint, target: Structure) -> list[list[int]] | None:
    """The source's groups behind each group of the target.

    None: both sides have the same groups in the same order.
    """
    groups = checkpoint.state.groups
    found = sources_of(groups, target.groups)
    return None if found == [[i] for i in range(len(groups))] else found


def _dealt(held: object, places: Sequence[Sequence[int]], checkpoint: Checkpoint, where: str) -> object:
    """A value whose schedule lists have a place for each target group."""

    def chosen(values: Sequence[object], place: str) -> list[object]:
        return [_one(values, of, checkpoint, place) for of in places]

    return with_places(held, len(checkpoint.state.groups), chosen, where)


def _demand_no_files_by_group(container: Container | None, target: Format) -> None:
    """Check that no carried file has a schedule of the source's groups.

    Raises: UcplError E482.
    """
    from ucpl.files.torch_files import read_torch_file

    if container is None or not container.kind.holds(target):
        return
    for file in container.files:
        if file.holds != "pickle" or file.rank >= 0:
            continue
        try:
            value = read_torch_file(container.top, file.name).value
        except UcplError as error:
            if error.is_of_the_disk:
                raise
            continue  # of another kind
        found: list[str] = []
        with_places(value, None, noted(found), "")
        if found:
            place = found[0].lstrip("/")
            fail(
                "E482",
                f"{file.name} has {place} with a value for each group of the source, and the target has other groups",
                Label(str(container.top / file.name), where=place),
                remedy=f"--drop {file.name}, and put that of a job with the target's groups there before"
                f" {container.kind.resumes_by} loads it",
            )


def _one(values: Sequence[object], of: Sequence[int], checkpoint: Checkpoint, where: str) -> object:
    """Raises: UcplError E482 if merged groups have different values in a schedule."""
    if not of:
        return None
    for other in of[1:]:
        if values[other] != values[of[0]]:
            names = [checkpoint.state.groups[i].name for i in (of[0], other)]
            fail(
                "E482",
                f"groups {names[0]} and {names[1]} of the source become one, and {where} has {values[of[0]]} and"
                f" {values[other]} for them",
                Label(str(checkpoint.top), where=where),
            )
    return values[of[0]]
