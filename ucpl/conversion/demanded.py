"""A target, or a checkpoint that is read, held against the demands of its framework's own loader (files/demands)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING

from ucpl.errors import Diagnostic, UcplError
from ucpl.records import frozen
from ucpl.registry import format_named, format_of_models

if TYPE_CHECKING:
    from ucpl.conversion.side import Side
    from ucpl.files.checkpoint import Checkpoint
    from ucpl.files.demands import LoaderView
    from ucpl.planning.plan import Plan
    from ucpl.texts import Json

__all__ = ["Found", "demand_loadable", "found_in"]

_WEIGHTS = "model.safetensors"


@frozen(eq=False)
class Found:
    """What a loader would refuse, and what it would read otherwise than it is meant."""

    wrong: tuple[Diagnostic, ...] = ()
    notes: tuple[str, ...] = ()


def demand_loadable(plan: Plan, source: Side, target: Side) -> tuple[str, ...]:
    """Notes on what is written anew for the loader, and on what it will say of the target.

    Raises: UcplError E388, E399, E549, and others that a framework demands.
    """
    found = _of_target(plan, source.checkpoint, target)
    if found.wrong:
        raise UcplError(*found.wrong)
    return found.notes


def found_in(checkpoint: Checkpoint, *, of_class: bool) -> Found:
    """A checkpoint as it is read. of_class: whether the class of transformers that config.json names is asked, too."""
    from ucpl.files.demands import LoaderView, unmet
    from ucpl.files.model_texts import config_of
    from ucpl.formats.opening import framework

    stored = {str(key[0]): e.shape for (_, key), e in checkpoint.extents.items() if len(key) == 1}
    config = config_of(checkpoint) if format_named(checkpoint.format).has_model_files else None
    seen = LoaderView(str(checkpoint.top), stored, config, checkpoint.state.groups)
    wrong = unmet(framework(checkpoint.format).demands, seen)
    if not of_class or config is None or wrong:
        return Found(wrong)
    return _of_class(config, seen)


def _of_target(plan: Plan, source: Checkpoint | None, side: Side) -> Found:
    """A plan's target, as it will be written."""
    if source is None:
        return Found()
    from ucpl.files.demands import LoaderView, unmet
    from ucpl.formats.opening import framework

    target = plan.target
    config, notes = _config_written(plan, source)
    groups = source.state.groups
    seen = LoaderView(side.layout.call, _stored(plan), config, groups, source.format, side.called.is_of_any)
    wrong = unmet(framework(target.framework).demands, seen)
    if config is None:
        notes += _beside(plan, source) + _renamed(plan, source, side)
    if wrong or config is None or _is_as_it_was(seen, source, notes):
        return Found(wrong, notes)
    found = _of_class(config, seen)
    return Found(found.wrong, notes + found.notes)


def _beside(plan: Plan, source: Checkpoint) -> tuple[str, ...]:
    """Notes on the config.json of a training framework's folder, if it does not fit the tensors of a target of that kind."""
    container = source.container
    if container is None or not container.kind.holds(format_named(plan.target.framework)):
        return ()
    from ucpl.files.demands import LoaderView, unmet
    from ucpl.files.model_texts import config_at

    if all(file.name != "config.json" for file in container.files) or (config := config_at(container.top)) is None:
        return ()
    return tuple(
        one.message
        for one in unmet(format_of_models().store().demands, LoaderView(str(container.top), _stored(plan), config))
    )


def _renamed(plan: Plan, source: Checkpoint, side: Side) -> tuple[str, ...]:
    """A note on names of a Hugging Face folder that a job's module does not have, if the target keeps them."""
    here, there = format_named(source.format), format_named(plan.target.framework)
    if not here.has_model_files or there.has_model_files or not side.called.is_of_any:
        return ()
    from ucpl.files.model_texts import config_of

    config = config_of(source)
    note = here.renamed_at_load(config, _stored(plan)) if config is not None else ""
    return (note,) if note else ()


def _stored(plan: Plan) -> dict[str, tuple[int, ...]]:
    """Weights of a target by their names: in a Hugging Face folder those of the files, else the model's."""
    if not format_named(plan.target.framework).has_model_files:
        return {t.name: t.shape for t in plan.target.tensors}
    return {"/".join(map(str, t.key)): t.shape for t in plan.targets if t.file == _WEIGHTS}


def _config_written(plan: Plan, source: Checkpoint) -> tuple[dict[str, Json] | None, tuple[str, ...]]:
    """config.json of a Hugging Face target, and notes on what is written anew in it."""
    target = format_named(plan.target.framework)
    if not target.has_model_files:
        return None, ()
    made = target.texts_written(source, plan.targets)
    notes = (*made.notes, *(f"{name} is left out: {why}" for name, why in made.left.items()))
    text = made.texts.get("config.json")
    if text is None or not _stored(plan):
        return None, notes
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None, notes
    return (value if isinstance(value, dict) else None), notes


def _is_as_it_was(seen: LoaderView, source: Checkpoint, notes: tuple[str, ...]) -> bool:
    """Whether a folder keeps names and shapes of the folder that it comes from: its class need not be asked."""
    if not format_named(source.format).has_model_files or notes:
        return False
    return {t.name: t.shape for t in source.state.tensors} == dict(seen.stored)


def _of_class(config: Mapping[str, Json], seen: LoaderView) -> Found:
    """The tensors against the class that config.json names, where transformers can make it."""
    from ucpl.errors import Label, catalogue
    from ucpl.inference.hf.fitting import fitting

    found = fitting(dict(config), seen.stored)
    if found is None:
        return Found()
    if found.mismatched:
        name, ours, theirs = found.mismatched[0]
        more = f" (and {len(found.mismatched) - 1} more)" if len(found.mismatched) > 1 else ""
        says = f"`{name}` is {list(ours)}, and {found.kind} of config.json has it as {list(theirs)}{more}"
        return Found((Diagnostic("E388", says, (Label(seen.place, where=name),), remedy=catalogue()["E388"].remedy),))
    if not found.common and seen.stored:
        first, theirs_first = next(iter(seen.stored)), next(iter(found.missing), "")
        says = f"{found.kind} of config.json has no tensor `{first}` and none of the others; its own are `{theirs_first}`, ..."
        return Found((Diagnostic("E399", says, (Label(seen.place, where=first),), remedy=catalogue()["E399"].remedy),))
    notes = []
    if found.missing:
        notes.append(_listed(f"from_pretrained begins with random numbers, since {found.kind} has", found.missing))
    if found.unexpected:
        notes.append(_listed(f"from_pretrained leaves out, since {found.kind} does not have", found.unexpected))
    return Found((), tuple(notes))


def _listed(text: str, names: tuple[str, ...], most: int = 3) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"{text}: {', '.join(names[:most])}{more}"
