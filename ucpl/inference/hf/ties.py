"""Second names that a class ties and a folder leaves out.

DeepSpeed and torch's loaders request all names of a module.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from attrs import evolve

from ucpl.errors import UcplError
from ucpl.inference.hf.records import Config
from ucpl.language import nodes

if TYPE_CHECKING:
    from ucpl.inference.hf.modules import Network
    from ucpl.inference.parallel import Note

__all__ = ["pairs", "tied", "with_ties"]


def tied(model: nodes.Model, config: Config) -> tuple[nodes.Model, tuple[Note, ...]]:
    """The model with the second names of its config's class.

    It is unchanged if the class cannot be made.
    """
    owners, class_name = _of_class(config)
    return _with_names(model, owners, class_name)


def pairs(config: Config) -> Mapping[str, str]:
    """Second names of the config's class, each with the first.

    Empty if the class cannot be made.
    """
    return _of_class(config)[0]


def with_ties(model: nodes.Model, network: Network) -> tuple[nodes.Model, tuple[Note, ...]]:
    """The model with second names of the class that it lacks."""
    return _with_names(model, network.owners, network.root.class_name)


def _of_class(config: Config) -> tuple[Mapping[str, str], str]:
    """Second names, and the name of the class.

    Common classes need no transformers.
    """
    from ucpl.inference.hf.families import HEAD, KINDS, WORDS, shapes_of
    from ucpl.inference.hf.networks import network_of

    if shapes_of(config) is not None:
        return ({HEAD: WORDS} if config.get("tie_word_embeddings") else {}), KINDS[str(config["model_type"])]
    try:
        network = network_of(config)
    except UcplError:
        return {}, ""
    return network.owners, network.root.class_name


def _with_names(model: nodes.Model, owners: Mapping[str, str], class_name: str) -> tuple[nodes.Model, tuple[Note, ...]]:
    """The model may have either of two names."""
    paths = {item.path for item in model.items if isinstance(item, nodes.Tensor | nodes.Alias)}
    each = [pair if pair[1] in paths else pair[::-1] for pair in owners.items()]
    lacking = {alias: owner for alias, owner in each if alias not in paths and owner in paths}
    items = (*model.items, *(nodes.Alias(alias, owner) for alias, owner in lacking.items()))
    text = f"tied in {class_name}"
    notes = tuple(("alias", f"{alias} of {owner}", text) for alias, owner in lacking.items())
    return evolve(model, items=items), notes
