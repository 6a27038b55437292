"""locate: every stored tensor of a layout, and which box of which logical tensor lies where in it.

Nothing is enumerated but the coordinates that change something: layers and experts that are stored alike are one box, and
states of one line share theirs. Not here: files, bytes, torch.
"""

from __future__ import annotations

from ucpl.errors import fail
from ucpl.layout import Layout
from ucpl.regions import flats as fl
from ucpl.regions.blobs import blobs_of
from ucpl.regions.bytes_of_two import demand_whole_bytes
from ucpl.regions.entry_parts import EntryParts
from ucpl.regions.flat_parts import FlatParts
from ucpl.regions.meeting import Wanted
from ucpl.regions.placement import Part, Placement
from ucpl.regions.site import Site

__all__ = ["locate"]


def locate(
    layout: Layout,
    *,
    rank: int | None = None,
    stated: fl.Stated | None = None,
    wanted: Wanted | None = None,
) -> Placement:
    """Place every tensor of a layout.

    rank:   only what this rank holds (other ranks are not enumerated).
    stated: (file rule, key, coordinates) -> flats as a checkpoint states them, for groups `from FILE "key"`.
    wanted: only where something of these boxes is: every place of an element of them is there, and few others are.

    Raises UcplError E2xx.
    """
    site = Site.of(layout, rank, wanted)
    if rank is not None and not 0 <= rank < site.ranks.count:
        fail("E213", f"rank {rank} of {site.ranks.count}", remedy=f"ranks are 0 to {site.ranks.count - 1}")
    singles, flats = EntryParts(site), FlatParts(site, stated)
    parts: list[Part] = []
    for placer in site.placers:
        rule = layout.files[placer.entry.storing.file]
        if rule.form is not None and placer.entry.storing.key is not None:
            parts.append(singles.weight(placer, rule, placer.entry.storing.key))
    for line in layout.state_lines:
        rule = layout.files[line.storing.file]
        if rule.form is None:
            continue
        parts += singles.like(line, rule) if line.shape == "like" else flats.parts(line, rule)
    blobs = blobs_of(site) if wanted is None else ()
    placement = Placement(layout, tuple(layout.tensors), tuple(parts), tuple(flats.records.values()), blobs)
    demand_whole_bytes(placement)
    return placement
