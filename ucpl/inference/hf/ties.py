"""Second names that a class ties and a Hugging Face folder leaves out: DeepSpeed asks for all names of a module."""

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
    """The model with the second names of the class that its config names; as it is where that cannot be asked."""
    from ucpl.inference.hf.networks import network_of

    try:
        network = network_of(config)
    except UcplError:
        return model, ()
    return with_ties(model, network)


def pairs(config: Config) -> dict[str, str]:
    """Second names of the class that a config names, each with the first; none where the class cannot be asked."""
    from ucpl.inference.hf.networks import network_of

    try:
        return dict(network_of(config).owners)
    except UcplError:
        return {}


def with_ties(model: nodes.Model, network: Network) -> tuple[nodes.Model, tuple[Note, ...]]:
    """The model with the second names that a class has and the model lacks, whichever of two names it has."""
    paths = {item.path for item in model.items if isinstance(item, nodes.Tensor | nodes.Alias)}
    each = [pair if pair[1] in paths else pair[::-1] for pair in network.owners.items()]
    lacking = {alias: owner for alias, owner in each if alias not in paths and owner in paths}
    items = (*model.items, *(nodes.Alias(alias, owner) for alias, owner in lacking.items()))
    said = f"tied in {network.root.class_name}"
    notes = tuple(("alias", f"{alias} of {owner}", said) for alias, owner in lacking.items())
    return evolve(model, items=items), notes
