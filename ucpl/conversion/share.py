"""One rank's share of a plan: its target tensors and their sources.

The target is placed for this rank only, and the source only where it overlaps. The shares of all ranks together are the plan: a
tensor that several ranks hold is in the share of each.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import evolve

from ucpl.conversion.logical import placements
from ucpl.conversion.planning import described, dtype_of, folded, spec_digest
from ucpl.conversion.requests import Given, is_checkpoint
from ucpl.conversion.training import placements_in_dtype
from ucpl.errors import Label, fail
from ucpl.layout import axes as ax
from ucpl.records import frozen

if TYPE_CHECKING:
    from ucpl.conversion.dialects import Names
    from ucpl.conversion.planning import Asked
    from ucpl.conversion.side import Side
    from ucpl.layout import Layout
    from ucpl.placement import Placement
    from ucpl.planning.plan import Plan

__all__ = ["Share", "Shares", "demand_rank", "has_live_rows", "share_of", "shares_of"]


@frozen(eq=False)
class Share:
    """The share of one target rank.

    `plan` has only this rank's stored tensors, and the source's tensors that overlap them.
    """

    rank: int
    plan: Plan
    source: Side
    target: Side


@frozen(eq=False)
class Shares:
    """Both sides of a plan, described once for all ranks' shares."""

    asked: Asked
    source: Side
    target: Side
    names: Names | None
    of_specs: bool  # no checkpoint and no changes by name: the source is placed anew where a share overlaps it

    def of(self, rank: int) -> Share:
        """Plan one target rank's share, without the plan of all ranks.

        The share has moves only. It omits facts of the complete target: blobs, masters to compare, the closed layout. Tensors
        of the source outside the share are not checked.

        Raises: UcplError as `engine.planned`; E180 if there is no such rank.
        """
        demand_rank(rank, self.target.layout)
        return _share(self, rank)


def shares_of(asked: Asked, given: Given, *, checked: bool = False) -> Shares:
    """Describe both sides of a plan.

    checked: place both sides for all ranks, too, which finds faults between ranks of a spec. Raises: UcplError.
    """
    source_text = asked.source if isinstance(asked.source, str) else ""
    is_apart = asked.source is not None and not is_checkpoint(source_text) and asked.checkpoint is None
    of_specs = is_apart and not (asked.called or given.drop or given.freeze or given.train or _is_named(asked))
    source, target, names = described(asked, evolve(given, bare=of_specs and not checked))
    return Shares(asked, source, target, names, of_specs)


def share_of(asked: Asked, given: Given, rank: int) -> Share:
    """Plan one target rank's share, see `Shares.of`."""
    return folded(lambda how: shares_of(asked, how).of(rank), asked, given)


def demand_rank(rank: int, layout: Layout) -> None:
    """Raises: UcplError E180 if the layout has no such rank."""
    ranks = max(1, layout.ranks)
    if not 0 <= rank < ranks:
        fail(
            "E180",
            f"--rank {rank}: {layout.call} has ranks 0 to {ranks - 1}",
            Label("<command line>", where=f"--rank {rank}"),
        )


def _is_named(asked: Asked) -> bool:
    from ucpl.conversion.dialects import split_names

    return any(isinstance(text, str) and split_names(text)[1] is not None for text in (asked.source, asked.target))


def _share(shares: Shares, rank: int) -> Share:
    from ucpl.graph import build
    from ucpl.graph.build import RankShare as OfOne
    from ucpl.placement import locate
    from ucpl.placement.rank_ranges import Wanted
    from ucpl.planning import order, recipe_of

    whole, names = (shares.source, shares.target), shares.names
    source = shares.source
    target = evolve(shares.target, placement=locate(shares.target.layout, rank=rank))
    if shares.of_specs:
        source = evolve(source, placement=locate(source.layout, wanted=Wanted.of(target.placement)))
    here, there, said = _seen(source, target, names)
    live: tuple[Placement, Placement] | None = None
    if all(map(has_live_rows, (here.layout, there.layout))):
        of_source, of_target = (evolve(s, placement=locate(s.layout)) if s.given.bare else s for s in whole)
        live = _seen(of_source, of_target, names)[:2]
    changes = target.changes
    drop = tuple(d for d in changes.drop if d not in changes.values) if changes is not None else ()
    known = {p.state for p in here.parts} | {s.name for s in here.layout.states} | set(here.tensors)
    graph = build(
        here,
        there,
        drop=tuple(d for d in drop if d in known),
        freeze=changes.frozen if changes is not None else frozenset(),
        dtype_of=dtype_of(source.checkpoint),
        share=OfOne(live),
    )
    alone = recipe_of(graph)
    recipe = evolve(alone, derived=said + alone.derived)
    made = order(graph, recipe, name=shares.asked.name, spec_digest=spec_digest(source, target), rank=rank)
    return Share(rank, made, source, target)


def _seen(source: Side, target: Side, names: Names | None) -> tuple[Placement, Placement, tuple[str, ...]]:
    return placements_in_dtype(source, target) if names is None else (*placements(names, source, target), ())


def has_live_rows(layout: Layout) -> bool:
    """True if a layout pads a dim with trained rows."""
    return any(isinstance(a, ax.Pad) and a.kind == "live" for entry in layout.entries for a in ax.walk(*entry.shape))
