"""locate: stored tensors of a layout, as boxes of logical tensors.

Only coordinates that change something are enumerated: layers and experts that are stored alike are one box, and states
of one line share theirs. Not here: files, bytes, torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ucpl.errors import fail
from ucpl.extents import Key
from ucpl.layout import BlobRule, Layout
from ucpl.layout.scope import at
from ucpl.placement import flats as fl
from ucpl.placement.bytes_of_two import check_whole_bytes
from ucpl.placement.entry_parts import EntryParts
from ucpl.placement.families import FamilyOrder
from ucpl.placement.flat_parts import FlatParts
from ucpl.placement.names import Variables
from ucpl.placement.placement import Blob, BlobPlace, Part, Placement
from ucpl.placement.site import Site
from ucpl.tables.blocks import is_whole, name_text

if TYPE_CHECKING:
    from ucpl.placement.rank_ranges import Wanted

__all__ = ["locate"]


def locate(
    layout: Layout,
    *,
    rank: int | None = None,
    stated: fl.Stated | None = None,
    wanted: Wanted | None = None,
) -> Placement:
    """Place every tensor of a layout.

    rank:   only the part of this rank (other ranks are not enumerated).
    stated: (file rule, key, coordinates) -> flats as a checkpoint states them, for groups `from FILE "key"`.
    wanted: only places with elements of these boxes: all of them, and few others.

    Raises UcplError E2xx.
    """
    site = Site.of(layout, rank, wanted)
    if rank is not None and not 0 <= rank < site.ranks.count:
        fail("E213", f"rank {rank} of {site.ranks.count}", remedy=f"ranks are 0 to {site.ranks.count - 1}")
    singles, flats = EntryParts(site), FlatParts(site, stated)
    parts: list[Part] = []
    order = FamilyOrder(layout)
    for number, placer in enumerate(site.placers):
        rule = layout.files[placer.entry.storing.file]
        if rule.form is not None and placer.entry.storing.key is not None:
            parts.append(singles.weight(placer, rule, placer.entry.storing.key))
            order.weight(parts[-1], number)
    for line in layout.state_lines:
        rule = layout.files[line.storing.file]
        if rule.form is None:
            continue
        found = singles.like(line, rule) if isinstance(line.shape, str) else flats.parts(line, rule)
        order.states(found, line)
        parts += found
    parts = order.ordered(parts)
    blobs = _blobs_of(site) if wanted is None else ()
    placement = Placement(layout, tuple(layout.placed), tuple(parts), tuple(flats.records.values()), blobs)
    check_whole_bytes(placement)
    return placement


# --- Places of blobs ------------------------------------------------------------------------------------------------


def _blobs_of(site: Site) -> tuple[Blob, ...]:
    """Raises: UcplError E236 where two values have one place."""
    held: dict[tuple[str, Key], tuple[Blob, BlobPlace]] = {}
    out = []
    for rule in site.layout.blobs:
        blob = Blob(rule, tuple(site.ranks.degrees[a] for a in rule.mesh_axes), _places(rule, site))
        for place in blob.places:
            known = held.setdefault((place.file, place.key), (blob, place))
            if known != (blob, place):
                _refuse(known[0], blob, place)
        out.append(blob)
    return tuple(out)


def _places(rule: BlobRule, site: Site) -> tuple[BlobPlace, ...]:
    file = site.layout.files[rule.file]
    if file.form is None or file.path is None:
        return ()
    named = site.names_of(file, rule.key)
    axes = site.mesh_names(named | set(rule.mesh_axes) | {a for a, _ in rule.at})
    found: dict[BlobPlace, None] = {}
    for here, rank in site.combinations((*axes, "rank") if "rank" in named else axes, rule.at):
        known = Variables({**here, "rank": rank, "name": rule.name}, {}, {}, 1, 1)
        path, steps, counted = site.namer.place(file.path, file.key, rule.key, known)
        texts = [(name_text(step, 0, 0), count) for step, count in zip(steps, counted, strict=True)]
        key = tuple(int(text) if count and is_whole(text) else text for text, count in texts)
        found[BlobPlace(tuple(here[a] for a in rule.mesh_axes), name_text(path, 0, 0), key)] = None
    return tuple(found)


def _refuse(one: Blob, other: Blob, place: BlobPlace) -> None:
    same = one.name == other.name and one.rule == other.rule
    fail(
        "E236",
        f"{place} is `{one.name}` of two coordinates" if same else f"{place} is `{one.name}` and `{other.name}`",
        at(one.rule.span, "this one"),
        *(() if same else (at(other.rule.span, "and this one"),)),
        remedy=f"name the axis in the key or the file: {{{other.rule.mesh_axes[0]}}}; or take `@{other.rule.mesh_axes[0]}`"
        " out, if the value is the same on all of its ranks"
        if other.rule.mesh_axes
        else "give each a key of its own",
    )
