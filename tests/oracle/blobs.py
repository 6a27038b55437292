"""Values that are no tensors.

The place for each rank, and the value of each place of a target.
"""

from __future__ import annotations

from tests.oracle.names import Meaning, Refused
from ucpl.language import nodes

__all__ = ["carried", "places"]

Place = tuple[str, str]
Coordinates = tuple[int, ...]


def places(meaning: Meaning, blob: nodes.Blob) -> dict[Coordinates, list[Place]]:
    """The places of each coordinate of a blob, in rank order."""
    said = {c.word: c.args[0] for c in blob.clauses if c.word in ("in", "as")}
    rule = meaning.files[said.get("in", "meta" if "meta" in meaning.files else "weights")]
    out: dict[Coordinates, list[Place]] = {}
    for rank in range(meaning.ranks):
        here = {"rank": rank}
        for mesh in meaning.meshes:
            rest = rank
            for axis in reversed(mesh.axes):
                rest, at = divmod(rest, meaning.degree(axis))
                here.setdefault(axis, at)
        stands = [c.args for c in blob.clauses if c.word == "at"]
        if rule.form is None or any(here[a] != meaning.numbers.value(n) % meaning.degree(a) for a, n in stands):
            continue
        key = meaning.numbers.render(said.get("as", blob.name), here)
        if rule.key:
            key = meaning.numbers.render(rule.key, {**here, "key": key})
        held = out.setdefault(tuple(here[a] for a in blob.mesh_axes), [])
        place = (meaning.numbers.render(rule.template, {**here, "key": key}), key)
        if place not in held:
            held.append(place)
    everywhere = [place for held in out.values() for place in held]
    if len(set(everywhere)) < len(everywhere):
        raise Refused("two values in one place")
    return out


def carried(source: Meaning, target: Meaning) -> dict[Place, Place]:
    """The source's place for each place of the target."""
    ours = {b.name: b for b in source.blobs}
    out: dict[Place, Place] = {}
    for blob in target.blobs:
        there = places(target, blob)
        if blob.fate == "drop" or not there:
            continue
        own = ours.get(blob.name)
        here = places(source, own) if own is not None and own.fate != "drop" else {}
        if own is None or not here:
            raise Refused("the source has no such value")
        before, after = ([m.degree(a) for a in b.mesh_axes] for m, b in ((source, own), (target, blob)))
        if (blob.fate == "keep" and before != after) or (blob.fate == "remap" and len(before) != len(after)):
            raise Refused("other coordinates")
        for at, held in there.items():
            match blob.fate:
                case "first":
                    origin = tuple(0 for _ in before)
                case "remap":
                    origin = tuple(c % n for c, n in zip(at, before, strict=True))
                case _:
                    origin = at
            if origin not in here:
                raise Refused("no value there")
            out |= dict.fromkeys(held, here[origin][0])
    return out
