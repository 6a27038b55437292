"""Structures as JSON: flats of ranks that hold the same tensors name their members once."""

from __future__ import annotations

from typing import Any

import attrs

from ucpl.extents import Flat, NamedTensor, Section, Sharding, Structure

__all__ = ["structure_from", "structure_json"]

Json = Any  # what json.loads gives: checked as it is taken apart


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
    """Raises: ValueError, KeyError, TypeError, IndexError, AttributeError where it is no structure."""
    members = []
    for names, (kinds, which) in raw["members"]:
        shapes = [tuple(map(int, kinds[i])) for i in which]
        members.append(tuple(zip(map(str, names), shapes, strict=True)))
    starts = [tuple(map(int, s)) for s in raw["starts"]]
    return Structure(
        framework=str(raw["framework"]),
        settings=dict(raw["settings"]),
        tensors=tuple(
            NamedTensor(t["name"], tuple(t["shape"]), t["dtype"], t["kind"], tuple(t["states"])) for t in raw["tensors"]
        ),
        aliases=dict(raw["aliases"]),
        groups=tuple((name, tuple(of)) for name, of in raw["groups"]),
        flats=tuple(
            Flat(int(bucket), str(group), dict(coordinates), members[m], starts[s], int(numel), cut)
            for bucket, group, coordinates, m, s, numel, cut in raw["flats"]
        ),
        derived=dict(raw["derived"]),
        shardings={str(name): _sharding(s) for name, s in raw["shardings"].items()},
    )


def _sharding(raw: Json) -> Sharding:
    sections = tuple(Section(s["size"], None if s["widths"] is None else tuple(s["widths"])) for s in raw["sections"])
    stages = None if raw["stages"] is None else tuple(raw["stages"])
    return Sharding(tuple(raw["shape"]), raw["dim"], sections, raw["origin"], stages, raw["expert"])
