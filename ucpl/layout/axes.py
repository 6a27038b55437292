"""Patterns with every number filled in: what the tree of a pattern becomes once its layout is resolved.

Dims and mesh axes are still names; their sizes stand in `Layout.sizes`.
"""

from __future__ import annotations

from typing import Literal

from attrs import frozen

PadKind = Literal["zero", "live", "undefined"]


@frozen
class Dim:
    """A dim, or positions low..high of it (`d[..24]`; None: to its end)."""

    name: str
    low: int = 0
    high: int | None = None


@frozen
class Split:
    """One cut over a mesh axis. `sizes` for explicit pieces, `grain` for chunk and spread."""

    mesh_axis: str
    kind: Literal["equal", "sizes", "chunk", "spread"] = "equal"
    sizes: tuple[int, ...] = ()
    grain: int = 1


@frozen
class Cut:
    axis: Axis
    splits: tuple[Split, ...]


@frozen
class Term:
    label: str | None
    axes: tuple[Axis, ...]


@frozen
class Stack:
    terms: tuple[Term, ...]


@frozen
class Pad:
    axis: Axis
    multiple: int
    kind: PadKind = "zero"


@frozen
class Trim:
    axis: Axis


@frozen
class Flat:
    axis: Axis


@frozen
class Each:
    pass


Axis = Dim | Cut | Stack | Pad | Trim | Flat | Each


def piece_of(split: Split, length: int, ways: int, here: int) -> tuple[int, int]:
    """The half-open range of positions of an axis of `length` that coordinate `here` of `ways` keeps.

    Raises ValueError where the cut leaves a remainder or the sizes do not add up; the caller knows the place.
    """
    match split.kind:
        case "sizes":
            if len(split.sizes) != ways or sum(split.sizes) != length:
                raise ValueError(
                    f"{len(split.sizes)} sizes that add up to {sum(split.sizes)} do not cut {length}"
                    f" over {split.mesh_axis} = {ways}"
                )
            start = sum(split.sizes[:here])
            return start, start + split.sizes[here]
        case "spread":
            if length % split.grain:
                raise ValueError(f"{length} is not a whole number of units of {split.grain}")
            step, extra = divmod(length // split.grain, ways)
            start = here * step + min(here, extra)
            return start * split.grain, (start + step + (here < extra)) * split.grain
        case "chunk":
            step = -(-length // (ways * split.grain)) * split.grain
            return min(here * step, length), min((here + 1) * step, length)
        case "equal":
            if length % ways:
                raise ValueError(f"{length} does not divide by {split.mesh_axis} = {ways}")
            step = length // ways
            return here * step, (here + 1) * step


def mesh_axes_of(axis: Axis) -> tuple[str, ...]:
    """Mesh axes that cut anything inside `axis`, in order of appearance."""
    found: dict[str, None] = {}

    def walk(node: Axis) -> None:
        match node:
            case Cut(axis=inner, splits=splits):
                walk(inner)
                found.update((s.mesh_axis, None) for s in splits)
            case Stack(terms=terms):
                for term in terms:
                    for inner in term.axes:
                        walk(inner)
            case Pad(axis=inner) | Trim(axis=inner) | Flat(axis=inner):
                walk(inner)
            case _:
                pass

    walk(axis)
    return tuple(found)


def partly_cut(axes: tuple[Axis, ...]) -> frozenset[str]:
    """Mesh axes that cut some terms of a sum and not others: each piece holds all of the others, as declared copies."""
    found: set[str] = set()

    def walk(node: Axis) -> None:
        match node:
            case Stack(terms=terms):
                each = [frozenset(a for inner in term.axes for a in mesh_axes_of(inner)) for term in terms]
                if each:
                    found.update(frozenset[str]().union(*each) - each[0].intersection(*each))
                for term in terms:
                    for inner in term.axes:
                        walk(inner)
            case Cut(axis=inner) | Pad(axis=inner) | Trim(axis=inner) | Flat(axis=inner):
                walk(inner)
            case _:
                pass

    for axis in axes:
        walk(axis)
    return frozenset(found)


def labels_of(axes: tuple[Axis, ...]) -> tuple[str | None, ...]:
    """Labels of the outermost labelled terms; (None,) where nothing is labelled."""
    found: dict[str, None] = {}

    def walk(node: Axis) -> None:
        match node:
            case Stack(terms=terms):
                for term in terms:
                    if term.label is not None:
                        found[term.label] = None
                    else:
                        for inner in term.axes:
                            walk(inner)
            case Cut(axis=inner) | Pad(axis=inner) | Trim(axis=inner) | Flat(axis=inner):
                walk(inner)
            case _:
                pass

    for axis in axes:
        walk(axis)
    return tuple(found) or (None,)


def digits_of(axis: Axis) -> tuple[str, ...]:
    """Names of the digits of an index axis, major first: (lap stage slot)."""
    match axis:
        case Dim(name=name):
            return (name,)
        case Cut(axis=inner) | Pad(axis=inner) | Trim(axis=inner):
            return digits_of(inner)
        case Stack(terms=(term,)):
            return tuple(d for inner in term.axes for d in digits_of(inner))
        case _:
            return ()
