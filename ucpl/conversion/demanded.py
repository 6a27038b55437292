"""Check targets and checkpoints against their framework's own loader (files/demands)."""

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

__all__ = ["Found", "demand_complete", "demand_loadable", "found_in"]

_WEIGHTS = "model.safetensors"


@frozen(eq=False)
class Found:
    """Errors that a loader would raise, and notes on surprising results."""

    wrong: tuple[Diagnostic, ...] = ()
    notes: tuple[str, ...] = ()


def demand_loadable(plan: Plan, source: Side, target: Side) -> tuple[str, ...]:
    """Notes on texts written anew for the loader, and on its warnings.

    Raises: UcplError E388, E399, E549, and others that a framework demands.
    """
    found = _of_target(plan, source.checkpoint, target)
    if found.wrong:
        raise UcplError(*found.wrong)
    return found.notes


def demand_complete(plan: Plan, source: Checkpoint) -> None:
    """Check that a class has exactly the tensors of a target.

    Raises: UcplError E222.
    """
    from ucpl.errors import Label, fail
    from ucpl.inference.hf.families import missing_parts
    from ucpl.inference.hf.fitting import fitting

    config, _ = _config_written(plan, source)
    if config is None:
        return
    found = fitting(dict(config), _stored(plan))
    if found is None:
        lacks, _ = missing_parts(dict(config), _stored(plan))
        if lacks:
            text = f"layers of {config['model_type']} in config.json have `{lacks[0]}`, and no tensor of the source has"
            fail("E222", text, Label(str(source.top), where="config.json"))
        return
    for names, effect in (
        (found.missing, "the source has no such tensor, and from_pretrained would begin with random numbers"),
        (found.unexpected, f"{found.kind} has no such tensor, and from_pretrained would ignore it"),
    ):
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            remedy = "" if names is found.missing else f"leave it out: --drop '{names[0]}'"
            fail("E222", f"`{names[0]}`{more}: {effect}", Label(str(source.top), where=names[0]), remedy=remedy)


def found_in(checkpoint: Checkpoint, *, of_class: bool) -> Found:
    """Check a checkpoint that is read.

    of_class: also compare with the class of transformers that config.json names.
    """
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
        notes += _config_notes(plan, source) + _renamed(plan, source, side)
    if wrong or config is None or _is_as_it_was(seen, source, notes):
        return Found(wrong, notes)
    found = _of_class(config, seen)
    return Found(found.wrong, notes + found.notes)


def _config_notes(plan: Plan, source: Checkpoint) -> tuple[str, ...]:
    """Notes on a companion config.json that does not fit the target's tensors.

    The target is a folder of the same training framework.
    """
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
    """A note on kept names that no module of a job has.

    They are those of a Hugging Face folder, or of stored stacks.
    """
    here, there = format_named(source.format), format_named(plan.target.framework)
    if there.has_names_of_modules and (kept := here.stored_apart(t.name for t in plan.target.tensors)):
        return (kept,)
    if not here.has_model_files or there.has_model_files or not side.called.is_of_any:
        return ()
    from ucpl.files.model_texts import config_of

    config = config_of(source)
    note = here.renamed_at_load(config, _stored(plan)) if config is not None else ""
    return (note,) if note else ()


def _stored(plan: Plan) -> dict[str, tuple[int, ...]]:
    """Weights of a target by name.

    Names in a Hugging Face folder are those of the files, else those of the model.
    """
    if not format_named(plan.target.framework).has_model_files:
        return {t.name: t.shape for t in plan.target.tensors}
    return {"/".join(map(str, t.key)): t.shape for t in plan.targets if t.file == _WEIGHTS}


def _config_written(plan: Plan, source: Checkpoint) -> tuple[dict[str, Json] | None, tuple[str, ...]]:
    """config.json of a Hugging Face target, and notes on its changes."""
    target = format_named(plan.target.framework)
    if not target.has_model_files:
        return None, ()
    made = target.texts_written(source, plan.target_shelves)
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
    """True if a folder has the config and shapes of its source.

    Then the check against its class is not needed.
    """
    if not format_named(source.format).has_model_files or notes or not source.top.is_dir():
        return False
    from ucpl.files.model_texts import config_at

    if seen.config != config_at(source.top):  # --config has another one
        return False
    return {t.name: t.shape for t in source.state.tensors} == dict(seen.stored)


def _of_class(config: Mapping[str, Json], seen: LoaderView) -> Found:
    """Compare tensors with the class that config.json names.

    The result is empty if transformers cannot make the class.
    """
    from ucpl.errors import Label, catalogue
    from ucpl.inference.hf.families import missing_parts
    from ucpl.inference.hf.fitting import fitting

    found = fitting(dict(config), seen.stored)
    if found is None:
        lacks, has_others = missing_parts(dict(config), seen.stored)
        says = f"layers of {config.get('model_type')} in config.json have `{', '.join(lacks)}`, and no tensor has"
        if has_others or not seen.stored:
            return Found((), (says,) if lacks else ())
        return Found((Diagnostic("E399", says, (Label(seen.place),), remedy=catalogue()["E399"].remedy),))
    if found.mismatched:
        name, ours, theirs = found.mismatched[0]
        more = f" (and {len(found.mismatched) - 1} more)" if len(found.mismatched) > 1 else ""
        says = f"`{name}` is {list(ours)}, and {list(theirs)} in {found.kind} of config.json{more}"
        return Found((Diagnostic("E388", says, (Label(seen.place, where=name),), remedy=catalogue()["E388"].remedy),))
    if not found.common and seen.stored:
        first, theirs_first = next(iter(seen.stored)), next(iter(found.missing), "")
        says = f"{found.kind} of config.json has no `{first}` and no other one; its own are `{theirs_first}`, ..."
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
