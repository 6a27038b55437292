"""Structures as JSON: flats of ranks that hold the same tensors name their members once."""

from __future__ import annotations

import attrs

from ucpl.extents import BlobWay, CarriedBlob, Flat, Key, NamedTensor, Section, Sharding, Structure
from ucpl.schedule.parsed import Json, items, plain, table, text, texts, whole, wholes

__all__ = ["structure_from", "structure_json"]


def structure_json(structure: Structure) -> Json:
    out = attrs.asdict(attrs.evolve(structure, flats=()))
    members: dict[tuple[tuple[str, tuple[int, ...]], ...], int] = {}
    known: dict[int, int] = {}  # most flats share the very object: hashed once
    starts: dict[tuple[int, ...], int] = {}
    flats = []
    for f in structure.flats:
        if id(f.members) not in known:
            known[id(f.members)] = members.setdefault(f.members, len(members))
        begins = starts.setdefault(f.starts, len(starts))
        flats.append([f.bucket, f.group, f.coordinates, known[id(f.members)], begins, f.numel, f.cut])
    out["flats"] = flats
    out["members"] = [[[name for name, _ in m], _shapes([shape for _, shape in m])] for m in members]
    out["starts"] = [list(s) for s in starts]
    return out


def _shapes(shapes: list[tuple[int, ...]]) -> Json:
    """Shapes that are met, and which of them each member has."""
    kinds = {s: i for i, s in enumerate(dict.fromkeys(shapes))}
    return [[list(s) for s in kinds], [kinds[s] for s in shapes]]


def structure_from(raw: Json) -> Structure:
    """Raises: ValueError, KeyError, TypeError, IndexError where it is no structure."""
    members = []
    for names, (kinds, which) in items(raw["members"]):
        shapes = [wholes(kinds[whole(i)]) for i in items(which)]
        members.append(tuple(zip(texts(names), shapes, strict=True)))
    starts = [wholes(s) for s in items(raw["starts"])]
    if any(len(members[whole(flat[3])]) != len(starts[whole(flat[4])]) for flat in items(raw["flats"])):
        raise ValueError("a flat buffer with another number of members than of places")
    return Structure(
        framework=text(raw["framework"]),
        settings={name: plain(value) for name, value in table(raw["settings"]).items()},
        tensors=tuple(_tensor(t) for t in items(raw["tensors"])),
        aliases=_named(raw["aliases"]),
        groups=tuple((text(name), texts(of)) for name, of in items(raw["groups"])),
        flats=tuple(
            Flat(
                whole(bucket),
                text(group),
                {axis: whole(at) for axis, at in table(coordinates).items()},
                members[whole(m)],
                starts[whole(s)],
                whole(numel),
                None if cut is None else text(cut),
            )
            for bucket, group, coordinates, m, s, numel, cut in items(raw["flats"])
        ),
        derived=_named(raw["derived"]),
        shardings={name: _sharding(s) for name, s in table(raw["shardings"]).items()},
        blobs=tuple(_blob(b) for b in items(raw["blobs"])),
    )


def _blob(raw: Json) -> CarriedBlob:
    ways, alike = (tuple(_way(w) for w in items(raw[name])) for name in ("ways", "alike"))
    return CarriedBlob(text(raw["name"]), text(raw["fate"]), text(raw["said"]), ways, alike)


def _way(raw: Json) -> BlobWay:
    source, target = (_key(raw[name]) for name in ("source_key", "key"))
    return BlobWay(text(raw["source_file"]), source, text(raw["file"]), target)


def _key(raw: Json) -> Key:
    return tuple(whole(step) if isinstance(step, int) else text(step) for step in items(raw))


def _named(raw: Json) -> dict[str, str]:
    return {name: text(value) for name, value in table(raw).items()}


def _tensor(raw: Json) -> NamedTensor:
    return NamedTensor(
        text(raw["name"]), wholes(raw["shape"]), text(raw["dtype"]), text(raw["kind"]), texts(raw["states"])
    )


def _sharding(raw: Json) -> Sharding:
    sections = tuple(
        Section(whole(s["size"]), None if s["widths"] is None else wholes(s["widths"])) for s in items(raw["sections"])
    )
    shape, dim = wholes(raw["shape"]), raw["dim"]
    dim = None if dim is None else whole(dim, high=len(shape))
    return Sharding(shape, dim, sections, text(raw["origin"]))
