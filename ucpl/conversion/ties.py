"""Tied weights from the class of a Hugging Face folder's config.

transformers stores a tied tensor once; its Trainer under DeepSpeed stores it under both names, as two tensors. For an engine of
DeepSpeed they are one parameter with two names in either case. Other loaders of a job request both names, too. If the class
cannot be loaded, as without transformers, no ties are found.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import evolve

from ucpl.conversion.requests import Called
from ucpl.registry import format_named

if TYPE_CHECKING:
    from ucpl.conversion.requests import Config, Given
    from ucpl.conversion.side import Side
    from ucpl.files.checkpoint import Checkpoint
    from ucpl.inference.parallel import Note

__all__ = ["framework_of", "of_ties", "with_ties"]


def of_ties(
    checkpoint: Checkpoint, source: Called | None, target: Called, config: Config | None
) -> tuple[Checkpoint, Called | None]:
    """Describe both copies of a tied tensor as one with an alias.

    Other folders are unchanged. A run of the plan compares both copies.
    """
    if (
        source is not None
        or not config
        or not _may_tie(checkpoint, config)
        or not format_named(framework_of(target)).has_engine
    ):
        return checkpoint, source
    from ucpl.inference.hf.ties import pairs
    from ucpl.language import parse_call
    from ucpl.language.words import quote
    from ucpl.layout import load

    here = {t.name: (t.shape, t.dtype) for t in checkpoint.state.tensors}
    twice = {
        alias: owner for alias, owner in pairs(dict(config)).items() if alias in here and here[alias] == here.get(owner)
    }
    if not twice:
        return checkpoint, source
    lines = "\n".join(f"  {quote(alias)} = ... as {quote(alias)}" for alias in twice)
    text = f'ucpl 2\nlayout tied(shard = "5GB") of any extends safetensors(shard = shard) {{\n{lines}\n}}\n'
    tensors = tuple(t for t in checkpoint.state.tensors if t.name not in twice)
    state = evolve(checkpoint.state, tensors=tensors, aliases={**checkpoint.state.aliases, **twice})
    return evolve(checkpoint, state=state), Called(load(("tied.ucpl", text)), parse_call("tied()"))


def with_ties(made: Side, source: Side, given: Given) -> tuple[Given, tuple[Note, ...]]:
    """The target's model with second names that the folder leaves out."""
    checkpoint = source.checkpoint
    if checkpoint is None or given.model is None or not given.config or not made.called.is_of_any:
        return given, ()
    if (
        made.layout.aliases
        or not _may_tie(checkpoint, given.config)
        or not format_named(made.layout.framework).has_names_of_modules
    ):
        return given, ()
    from ucpl.inference.hf.ties import tied

    model, notes = tied(given.model, dict(given.config))
    return evolve(given, model=model), notes


def _may_tie(checkpoint: Checkpoint, config: Config) -> bool:
    return format_named(checkpoint.format).has_model_files and config.get("tie_word_embeddings") is not False


def framework_of(one: Called) -> str:
    """The framework of a layout or of one that it extends."""
    from ucpl.language import nodes

    for link in one.library.chain(one.call.name):
        found = next((i.call.name for i in link.node.items if isinstance(i, nodes.Framework)), None)
        if found is not None:
            return found
    return ""
