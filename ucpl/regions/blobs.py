"""Where the values of blobs lie: one place for each coordinate of the mesh axes that they differ along, and its copies."""

from __future__ import annotations

from ucpl.columns.blocks import is_whole, name_text
from ucpl.errors import fail
from ucpl.extents import Key
from ucpl.layout import BlobRule
from ucpl.layout.scope import at
from ucpl.regions.names import Variables
from ucpl.regions.placement import Blob, BlobPlace
from ucpl.regions.site import Site

__all__ = ["blobs_of"]


def blobs_of(site: Site) -> tuple[Blob, ...]:
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
