"""Both sides of a plan with different tensor names for one model.

Each side names its dialect after `of`. The module also finds the order of the tensors in a target's files.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from attrs import evolve

from ucpl.conversion.dialects import Names, dialect, names_of, refuse
from ucpl.conversion.renaming import renamed
from ucpl.conversion.requests import Called, Config, Given, called
from ucpl.conversion.side import Side, located
from ucpl.conversion.sides import source_side, target_side
from ucpl.conversion.ties import framework_of
from ucpl.conversion.training import change_of
from ucpl.registry import Format, format_named

if TYPE_CHECKING:
    from ucpl.extents import NamedTensor
    from ucpl.files.checkpoint import Checkpoint

__all__ = ["named_sides"]

_LAYER = re.compile(r"\.layers\.\d+\.")
# Settings of cuts and ranks; they refer to the source's own names, and are not inherited by other names.
_OF_RANKS = frozenset({"tp", "pp", "ep", "vpp", "optimizer", "shaped", "tp_rule"})


def tensors_of(checkpoint: Checkpoint, names: Names) -> tuple[NamedTensor, ...]:
    """The target's tensors.

    Shapes come from its dialect; dtypes, kinds and states from the source's tensors.
    """
    held = {t.name: t for t in checkpoint.state.tensors}
    return tuple(
        evolve(held[names.made[name][0]], name=name, shape=named.shape) for name, named in names.target.named.items()
    )


def as_named(source: Side, names: Names) -> Side:
    """The source with unpartitioned tensors under the target's names, for its layout."""
    from ucpl.inference.infer import model_of, state_dtypes

    assert source.checkpoint is not None
    made = renamed(source.checkpoint, names.made, tensors_of(source.checkpoint, names), names.aliases)
    model = model_of(made, state_dtypes(source.checkpoint, source.placement))
    inherited = {n: v for n, v in source.given.inherited.items() if n not in _OF_RANKS}
    given = evolve(source.given, model=model, inherited=inherited)
    there = located(called("plain()"), evolve(given, inherited={}))
    return evolve(there, given=given, checkpoint=made)


def _by_modules(names: Names, target: Called, of: Format) -> Names | None:
    """Names in the order of the format's own modules.

    None: the format has no modules. Raises: UcplError E335 for stacked layers if the format needs modules.
    """
    named = names.target.named
    order = of.registered(tuple(named))
    if order is None:
        return None
    if (
        not any(_LAYER.search(name) for name in named)
        and of.has_layers_stacked
        and of.asks_modules(target.layout, target.call)
    ):
        refuse(names.target.call, "buckets are of modules: say their names, as llama.ucpl:megatron(tp = 1) has them")
    return evolve(
        names,
        target=evolve(names.target, named={name: named[name] for name in order}),
        made={name: names.made[name] for name in order},
    )


def _as_registered(names: Names, target: Called, config: Config | None, checkpoint: Checkpoint) -> Names:
    """The target's names in the registration order of its class, with aliases.

    The order changes only for a format that depends on it. Raises: UcplError E335 if no class gives the order, E396 if the
    class cannot be loaded.
    """
    from ucpl.inference.hf.networks import network_of

    framework = framework_of(target)
    of = format_named(framework)
    if (made := _by_modules(names, target, of)) is not None:
        return made
    if not of.has_engine:
        return names
    if not format_named(names.target.placement.layout.framework).has_model_files or not config:
        refuse(
            names.target.call,
            f"{framework} holds parameters in the order in which modules register them: it is known of transformers' classes",
        )
    network = network_of(dict(config or {}))
    held = {t.name for t in checkpoint.state.tensors if t.kind == "buffer"}
    buffers = {name for name, made in names.made.items() if made[0] in held}
    order = {name: i for i, name in enumerate(network.shapes)}
    unknown = next((name for name in names.target.named if name not in order and name not in buffers), None)
    if unknown is not None:
        refuse(
            names.target.call,
            f"{network.root.class_name} has no parameter `{unknown}`: `architectures` of the config names the class",
        )
    named = dict(sorted(names.target.named.items(), key=lambda item: order.get(item[0], len(order))))
    aliases = {alias: owner for alias, owner in network.owners.items() if owner in named and alias not in named}
    kept = {name: names.made[name] for name in named}
    return evolve(names, target=evolve(names.target, named=named), made=kept, aliases=aliases)


def named_sides(
    checkpoint: Checkpoint | None,
    described: Called | None,
    target: Called,
    said: tuple[str | None, str | None],
    given: Given,
) -> tuple[Side, Side, Names]:
    """Both sides of a plan with a dialect each.

    Raises: UcplError E335 to E337.
    """
    mine, other = said
    if mine is None or other is None or checkpoint is None:
        there = "the source" if mine is None else "the target"
        why = f"{there} gives none" if checkpoint is not None else "the source is no checkpoint"
        refuse(mine or other or "", f"both sides have to give names for the tensors of one model, and {why}")
    for word, texts in (("fill", given.fill), ("drop", given.drop), ("freeze", given.freeze), ("train", given.train)):
        if texts:
            refuse(other, f"--{word} speaks of names of one side: convert first, then {word}")
    for one, call in ((described, mine), (target, other)):
        if one is not None and not one.is_of_any:
            refuse(
                call,
                f"`{one.call.name}` before `of` has a model of its own: name a layout of any model there",
            )
    sizes = given.sizes  # of the model that both sides name: the layouts of any model have none of it
    given = evolve(given, sizes={})
    here = source_side(checkpoint, described, evolve(given, model=None))
    config = here.given.config
    names = names_of(dialect(mine, config, sizes), dialect(other, config, sizes), checkpoint)
    names = _as_registered(names, target, config, checkpoint)
    aimed = target_side(target, as_named(here, names), given)
    change = change_of(here, aimed.layout)
    if change is not None and any(
        t.kind != "buffer" and change.concerns(t.name, t.dtype) for t in checkpoint.state.tensors
    ):
        refuse(other, f"the target trains in {change.now}, the source in {change.was}: convert that first")
    return here, aimed, names
