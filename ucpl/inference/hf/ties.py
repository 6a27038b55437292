"""Second names that a class ties and a folder leaves out.

DeepSpeed requests all names of a module.
"""

from __future__ import annotations

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
    from ucpl.inference.hf.networks import network_of

    try:
        network = network_of(config)
    except UcplError:
        return model, ()
    return with_ties(model, network)


def pairs(config: Config) -> dict[str, str]:
    """Second names of the config's class, each with the first.

    Empty if the class cannot be made.
    """
    from ucpl.inference.hf.networks import network_of

    try:
        return dict(network_of(config).owners)
    except UcplError:
        return {}


def with_ties(model: nodes.Model, network: Network) -> tuple[nodes.Model, tuple[Note, ...]]:
    """The model with second names of the class that it lacks.

    The model may have either of two names.
    """
    paths = {item.path for item in model.items if isinstance(item, nodes.Tensor | nodes.Alias)}
    each = [pair if pair[1] in paths else pair[::-1] for pair in network.owners.items()]
    lacking = {alias: owner for alias, owner in each if alias not in paths and owner in paths}
    items = (*model.items, *(nodes.Alias(alias, owner) for alias, owner in lacking.items()))
    said = f"tied in {network.root.class_name}"
    notes = tuple(("alias", f"{alias} of {owner}", said) for alias, owner in lacking.items())
    return evolve(model, items=items), notes
