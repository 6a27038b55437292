"""Source values of each blob of the target, by its policy.

They are found before anything is opened.
"""

from __future__ import annotations

from typing import NoReturn

from ucpl.errors import fail
from ucpl.extents import BlobWay, CarriedBlob
from ucpl.layout.scope import at
from ucpl.placement import Placement
from ucpl.placement.placement import Blob, BlobPlace

__all__ = ["carried_blobs"]

SHOWN = 6  # coordinates that a plan lists
Coordinate = tuple[int, ...]


def carried_blobs(
    source: Placement, target: Placement, drop: tuple[str, ...] = ()
) -> tuple[tuple[CarriedBlob, ...], tuple[str, ...]]:
    """Sentences on carried blobs, and on those left out.

    Raises: UcplError E332 for a policy that cannot be, E333 for a value that the source does not have.
    """
    here = {b.name: b for b in source.blobs}
    there = {b.name: b for b in target.blobs}
    carried, dropped = [], []
    for blob in there.values():
        own = here.get(blob.name)
        if blob.name in drop or blob.rule.fate == "drop" or not blob.places:
            if own is not None:
                why = "dropped by name" if blob.name in drop else "its line in the target says drop"
                dropped.append(f"blob of {blob.name}: {why if blob.places else 'the target stores none'}")
        elif own is None or own.rule.fate == "drop" or not own.places:
            _lacking(blob, own, source)
        else:
            carried.append(_BlobPair(own, blob).carried())
    for name in here:
        if name not in there:
            dropped.append(f"blob of {name}: {'dropped by name' if name in drop else 'the target names no such blob'}")
    return tuple(carried), tuple(dropped)


def _lacking(blob: Blob, own: Blob | None, source: Placement) -> NoReturn:
    fail(
        "E333",
        f"the target stores `blob {blob.name}`, and the source "
        + ("names none" if own is None else "drops it" if own.rule.fate == "drop" else "stores none"),
        *(() if own is None else (at(own.rule.span, "source"),)),
        at(blob.rule.span, "target"),
        remedy=f"name its file in {source.layout.call}: `{_line(blob)}`; or write `drop` in the target",
    )


def _line(blob: Blob, fate: str = "keep") -> str:
    axes = "".join(f" @{a}" for a in blob.rule.mesh_axes)
    return f'blob {blob.name}{axes} {fate} in {blob.rule.file} as "{blob.rule.key.text}"'


class _BlobPair:
    """A blob of both sides."""

    def __init__(self, own: Blob, blob: Blob) -> None:
        self.own, self.blob = own, blob
        self.at: dict[Coordinate, list[BlobPlace]] = {}
        for place in own.places:
            self.at.setdefault(place.at, []).append(place)

    def carried(self) -> CarriedBlob:
        fate = self.blob.rule.fate
        if fate == "keep" and self.own.degrees != self.blob.degrees:
            self.refuse("and `keep` keeps one value for each")
        if fate == "remap" and len(self.own.degrees) != len(self.blob.degrees):
            self.refuse("and `remap` needs the same axes on both sides")
        ways, alike = [], []
        for place in self.blob.places:
            origin = self.origin(place.at)
            if origin not in self.at:
                self.refuse(f"and the source has no value at {self.named(origin)}")
            first = self.at[origin][0]
            ways.append(BlobWay(first.file, first.key, place.file, place.key))
            if fate != "first":  # which takes one value, whatever the others are
                alike += [BlobWay(first.file, first.key, p.file, p.key) for p in self.at[origin][1:]]
        return CarriedBlob(self.blob.name, fate, self.text(), tuple(ways), tuple(dict.fromkeys(alike)))

    def origin(self, at_: Coordinate) -> Coordinate:
        """The source's coordinate whose value a coordinate of the target gets."""
        match self.blob.rule.fate:
            case "first":
                return (0,) * len(self.own.degrees)
            case "remap":
                return tuple(c % n for c, n in zip(at_, self.own.degrees, strict=True))
        return at_

    def text(self) -> str:
        name, own, blob = self.blob.name, self.own, self.blob
        match blob.rule.fate:
            case "keep":
                return f"{name}: kept, " + (f"one for each of {blob.axes_text}" if blob.degrees else "one for all")
            case "first":
                of = f"the value at {self.named((0,) * len(own.degrees))}" if own.degrees else "the value"
                return f"{name}: {of}, for " + (f"each of {blob.axes_text}" if blob.degrees else "all")
        new = sorted({p.at for p in blob.places if self.origin(p.at) != p.at})
        gone = sorted(set(self.at) - {self.origin(p.at) for p in blob.places})
        texts = [f"{self.named(c)} gets the value of {self.named(self.origin(c))}" for c in new[:SHOWN]]
        texts += [f"and {len(new) - SHOWN} more likewise"] if len(new) > SHOWN else []
        texts += [f"{len(gone)} of the source's values are left out"] if gone else []
        rule = f"{own.axes_text} to {blob.axes_text}, each coordinate modulo the source's"
        return f"{name}: {rule}" + (f": {', '.join(texts)}" if texts else "")

    def named(self, at_: Coordinate) -> str:
        axes = self.own.rule.mesh_axes if len(at_) == len(self.own.rule.mesh_axes) else self.blob.rule.mesh_axes
        return " ".join(f"{a}={c}" for a, c in zip(axes, at_, strict=True)) or "no coordinate"

    def refuse(self, why: str) -> NoReturn:
        own, blob = self.own, self.blob
        sides = [b.axes_text or "no axis, one for all" for b in (own, blob)]
        fail(
            "E332",
            f"`blob {blob.name}` is of {sides[0]} in the source and of {sides[1]} in the target, {why}",
            at(own.rule.span, "source"),
            at(blob.rule.span, "target"),
            remedy="write in the target `first` (the value at coordinate 0, for all)"
            + (
                ", `remap` (coordinate modulo the source's degree), or `drop`"
                if own.rule.mesh_axes == blob.rule.mesh_axes
                else " or `drop`, or give it the source's axes"
            ),
        )
