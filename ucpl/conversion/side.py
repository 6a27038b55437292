"""One side of a plan: a placed layout, with its inputs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import field

from ucpl.conversion.requests import Called, Given
from ucpl.records import frozen

if TYPE_CHECKING:
    from ucpl.conversion.changes import Changes
    from ucpl.files.checkpoint import Checkpoint
    from ucpl.inference.parallel import Note
    from ucpl.inference.sizes import Found
    from ucpl.language import nodes
    from ucpl.layout import Layout, Library
    from ucpl.placement import Placement
    from ucpl.placement.flats import Stated
    from ucpl.planning.plan import Passed

__all__ = ["Side", "located"]


@frozen(eq=False)
class Side:
    """One side of a plan: a placed layout, with its inputs."""

    called: Called
    given: Given
    placement: Placement
    checkpoint: Checkpoint | None = None  # of a source: its metadata, such as layers and experts
    found: Found = field(factory=dict)  # sizes that the spec leaves open, from a checkpoint's shapes
    changes: Changes | None = None  # of a target: dropped, frozen and newly trained parameters
    passes: tuple[Passed, ...] = ()  # of a source: the source passes that changed it

    @property
    def library(self) -> Library:
        return self.called.library

    @property
    def layout(self) -> Layout:
        return self.placement.layout

    @property
    def model(self) -> nodes.Model | None:
        """The layout's own model, or the given one."""
        return self.given.model if self.called.is_of_any else self.called.model(self.given)


def located(
    one: Called,
    given: Given,
    *,
    rank: int | None = None,
    stated: Stated | None = None,
    notes: tuple[Note, ...] = (),
) -> Side:
    """Resolve a layout, and place it for all ranks or for one.

    If `given.bare` is set, the placement is empty.
    """
    from ucpl.conversion.forms import demand_forms
    from ucpl.layout import resolve
    from ucpl.placement import Placement, locate

    layout = resolve(
        one.library,
        one.call,
        model=given.model if one.is_of_any else None,
        config=given.config,
        define_sizes=given.sizes,
        inherited=given.inherited,
        notes=notes,
        fold=given.folding is not None and rank is None,
    )
    demand_forms(layout)
    if given.bare:
        return Side(one, given, Placement(layout, tuple(layout.placed), ()))
    return Side(one, given, locate(layout, rank=rank, stated=stated))
