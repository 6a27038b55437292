"""Source passes: changes of an opened source, before planning.

Each changes the metadata of the checkpoint in one way, and with it the call that describes it, if that is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from attrs import evolve

from ucpl.conversion.requests import Called
from ucpl.conversion.ties import of_ties
from ucpl.files.skipping import skipping
from ucpl.records import frozen
from ucpl.registry import format_named

if TYPE_CHECKING:
    from ucpl.conversion.requests import Config, Given
    from ucpl.files.checkpoint import Checkpoint
    from ucpl.planning.plan import Passed

__all__ = ["SOURCE_PASSES", "OpenedSource", "SourcePass", "config_of", "few", "apply_source_passes"]

_SHOWN = 3


@frozen(eq=False)
class OpenedSource:
    """A source and the request, between two source passes."""

    checkpoint: Checkpoint
    source: Called | None  # None: the checkpoint describes itself
    target: Called
    given: Given


@frozen
class SourcePass:
    """One change of an opened source."""

    name: str
    text: str
    apply: Callable[[OpenedSource], OpenedSource]


def _with_stored_names(opened: OpenedSource) -> OpenedSource:
    checkpoint, given = opened.checkpoint, opened.given
    there = format_named(checkpoint.format).file_format
    if opened.source is not None or not there or not opened.target.format.shows_stored:
        return opened
    from ucpl.formats.opening import framework

    with skipping(optimizer=given.weights_alone, states=given.skipped):
        made = evolve(framework(there).open(checkpoint.root), not_read=checkpoint.not_read)
    return evolve(opened, checkpoint=made)


def _unstacked(opened: OpenedSource) -> OpenedSource:
    """A tensor for each layer and expert, if the target needs them."""
    checkpoint, target = opened.checkpoint, opened.target
    if opened.source is not None or not format_named(checkpoint.format).has_layers_stacked:
        return opened
    if not target.format.asks_modules(target.layout, target.call):
        return opened
    return evolve(opened, checkpoint=format_named(checkpoint.format).in_modules(checkpoint))


def _resized(opened: OpenedSource) -> OpenedSource:
    """With the rows of the vocabulary that the target keeps.

    A layout that states more of the source than its cuts is about all rows.
    """
    checkpoint, target = opened.checkpoint, opened.target
    if not checkpoint.state.parallel.vocabulary or not target.is_of_any:
        return opened
    from ucpl.inference import parallel, vocabulary
    from ucpl.inference.infer import inherited_settings
    from ucpl.language import nodes

    base = parallel.Base(*target, nodes.Model("", ()), inherited_settings(checkpoint))
    want = vocabulary.asked(base, checkpoint)
    if want is None or (opened.source is not None and not parallel.says_cuts_alone(*opened.source)):
        return opened
    if vocabulary.is_universal(base):  # entire tensors, which need no lines
        target = Called(target.library, vocabulary.without(target.call))
    return evolve(opened, checkpoint=vocabulary.lessened(checkpoint, want.rows), target=target)


def _tied(opened: OpenedSource) -> OpenedSource:
    config = config_of(opened.checkpoint, opened.given.config)
    checkpoint, source = of_ties(opened.checkpoint, opened.source, opened.target, config)
    return evolve(opened, checkpoint=checkpoint, source=source)


SOURCE_PASSES = (
    SourcePass(
        "stored-names", "use the names in the files, for a target that shows the stored tensors", _with_stored_names
    ),
    SourcePass("unstack", "make one tensor for each layer and expert of a stack, for a target of modules", _unstacked),
    SourcePass("resize", "keep the rows of the vocabulary that the target has", _resized),
    SourcePass("tie", "make one tensor with two names from two tensors that the model's class ties", _tied),
)


def apply_source_passes(opened: OpenedSource) -> tuple[OpenedSource, tuple[Passed, ...]]:
    """The source after all source passes, and the passes that changed it.

    Raises: UcplError.
    """
    from ucpl.planning.plan import Passed  # `check` describes sides, and makes no plan

    did = []
    for each in SOURCE_PASSES:
        before, opened = opened, each.apply(opened)
        if opened.checkpoint is not before.checkpoint:
            did += [Passed(each.name, text) for text in _differences(before.checkpoint, opened.checkpoint)]
    return opened, tuple(did)


def _differences(before: Checkpoint, after: Checkpoint) -> list[str]:
    old, new = {t.name: t.shape for t in before.state.tensors}, {t.name: t.shape for t in after.state.tensors}
    if old.keys() == new.keys():
        resized = [f"{name} {list(old[name])} to {list(new[name])}" for name in old if old[name] != new[name]]
        return [few(resized)] if resized else []
    if second := [name for name in old if name in after.state.aliases]:
        return [few([f"{name} is {after.state.aliases[name]}" for name in second])]
    return [f"{len(old):,} tensors become {len(new):,}, the first is {next(iter(new), 'none')}"]


def few(texts: Sequence[str]) -> str:
    """Some texts, and the number of the others."""
    more = f" and {len(texts) - _SHOWN:,} more" if len(texts) > _SHOWN else ""
    return ", ".join(texts[:_SHOWN]) + more


def config_of(checkpoint: Checkpoint, config: Config | None) -> Config | None:
    """The given config.json, else one in the checkpoint or its folder."""
    from ucpl.files.model_texts import config_at
    from ucpl.files.model_texts import config_of as own

    if config is not None:
        return config
    container = checkpoint.container
    found = own(checkpoint)
    if found is None and container is not None and any(f.name == "config.json" for f in container.files):
        return config_at(container.top)
    return found or format_named(checkpoint.format).config_made(checkpoint.root)
