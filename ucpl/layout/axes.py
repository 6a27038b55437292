"""Patterns with every number filled in: the pattern of a resolved layout.

Dims and mesh axes are still names; their sizes are in `Layout.sizes`.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping
from math import prod
from typing import Literal, assert_never

from attrs import evolve

from ucpl.records import define, frozen

PadKind = Literal["zero", "live", "undefined"]


@frozen
class Dim:
    """A dim, or positions low..high of it (`d[..24]`; None: to its end)."""

    name: str
    low: int = 0
    high: int | None = None


@frozen
class Split:
    """One cut over a mesh axis.

    `sizes` for explicit pieces, `grain` for chunk and spread.
    """

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
class Copies:
    """A factor whose positions hold equal elements."""

    count: int


@frozen
class Flat:
    axis: Axis


@frozen
class Each:
    pass


Axis = Dim | Cut | Stack | Pad | Trim | Copies | Flat | Each


@define
class UnevenCut(ValueError):
    """A cut with a remainder, or with sizes that do not fit.

    The caller knows the place.
    """

    reason: str
    split: Split
    length: int
    ways: int

    def __str__(self) -> str:
        return self.reason


def piece_of(split: Split, length: int, ways: int, here: int) -> tuple[int, int]:
    """Range of positions of an axis that coordinate `here` of `ways` keeps.

    The axis has `length` positions; the range is half-open. Raises UnevenCut if the cut leaves a remainder or the sizes
    do not add up; the caller knows the place.
    """
    match split.kind:
        case "sizes":
            if len(split.sizes) != ways or sum(split.sizes) != length:
                text = f"{len(split.sizes)} sizes that add up to {sum(split.sizes)} do not cut {length}"
                raise UnevenCut(f"{text} over {split.mesh_axis} = {ways}", split, length, ways)
            start = sum(split.sizes[:here])
            return start, start + split.sizes[here]
        case "spread":
            if length % split.grain:
                raise UnevenCut(f"{length} is not a whole number of units of {split.grain}", split, length, ways)
            step, extra = divmod(length // split.grain, ways)
            start = here * step + min(here, extra)
            return start * split.grain, (start + step + (here < extra)) * split.grain
        case "chunk":
            step = -(-length // (ways * split.grain)) * split.grain
            return min(here * step, length), min((here + 1) * step, length)
        case "equal":
            if length % ways:
                raise UnevenCut(f"{length} does not divide by {split.mesh_axis} = {ways}", split, length, ways)
            step = length // ways
            return here * step, (here + 1) * step


# ---- walking ---------------------------------------------------------------------------------------------------------


def children(axis: Axis) -> tuple[Axis, ...]:
    """Axes directly inside an axis, in order.

    Of a sum, those of all terms.
    """
    match axis:
        case Cut(axis=inner) | Pad(axis=inner) | Trim(axis=inner) | Flat(axis=inner):
            return (inner,)
        case Stack(terms=terms):
            return tuple(a for term in terms for a in term.axes)
        case Dim() | Copies() | Each():
            return ()
        case _:
            assert_never(axis)


def walk(*roots: Axis) -> Iterator[Axis]:
    """Each axis, then all inside it, depth first."""
    for axis in roots:
        yield axis
        yield from walk(*children(axis))


def rewritten(axis: Axis, change: Callable[[Axis], Axis | None]) -> Axis:
    """The axis with inner axes replaced by the results of `change`.

    If it gives None, the contents of an axis are walked. An axis that is replaced is not walked again.
    """
    made = change(axis)
    if made is not None:
        return made
    match axis:
        case Cut(axis=inner) | Pad(axis=inner) | Trim(axis=inner) | Flat(axis=inner):
            return evolve(axis, axis=rewritten(inner, change))
        case Stack(terms=terms):
            return Stack(tuple(evolve(t, axes=tuple(rewritten(a, change) for a in t.axes)) for t in terms))
        case Dim() | Copies() | Each():
            return axis
        case _:
            assert_never(axis)


def renamed(axis: Axis, names: Mapping[str, str]) -> Axis:
    """The axis with other names of its dims."""
    return rewritten(axis, lambda a: evolve(a, name=names.get(a.name, a.name)) if isinstance(a, Dim) else None)


def uncut(axis: Axis) -> Axis:
    """The axis as no rank cuts it."""
    return rewritten(axis, lambda a: uncut(a.axis) if isinstance(a, Cut) else None)


def mesh_axes_of(*axes: Axis) -> tuple[str, ...]:
    """Mesh axes that cut anything inside, the innermost cuts first."""
    found: dict[str, None] = {}
    for axis in axes:
        found.update(dict.fromkeys(mesh_axes_of(*children(axis))))
        if isinstance(axis, Cut):
            found.update((s.mesh_axis, None) for s in axis.splits)
    return tuple(found)


def partly_cut(axes: tuple[Axis, ...]) -> frozenset[str]:
    """Mesh axes that cut some terms of a sum and not others.

    Each piece holds all of the others, as declared copies.
    """
    found: set[str] = set()
    for node in walk(*axes):
        if isinstance(node, Stack):
            each = [frozenset(mesh_axes_of(*term.axes)) for term in node.terms]
            if each:
                found.update(frozenset[str]().union(*each) - each[0].intersection(*each))
    return frozenset(found)


def is_copied(*axes: Axis) -> bool:
    """True if elements may have several places in one stored tensor."""
    return any(isinstance(node, Copies) for node in walk(*axes))


def labels_of(axes: tuple[Axis, ...]) -> tuple[str | None, ...]:
    """Labels of the outermost labelled terms; (None,) where nothing is labelled."""
    return tuple(dict.fromkeys(_labels(axes))) or (None,)


def tensor_of_label(path: str, label: str, names: Container[str]) -> str:
    """Tensor that a label means in the entry of `path`.

    It is next to the entry's, below it, or farther and farther out. The last is that very name; a definition under a
    prefix so finds its own tensors before those around it.
    """
    steps = path.split(".")[:-1]
    around = [".".join([*steps[:n], label]) for n in range(len(steps), -1, -1)]
    return next((c for c in (around[0], f"{path}.{label}", *around[1:]) if c in names), around[0])


def _labels(axes: tuple[Axis, ...]) -> Iterator[str]:
    for axis in axes:
        if not isinstance(axis, Stack):
            yield from _labels(children(axis))
            continue
        for term in axis.terms:
            if term.label is not None:
                yield term.label
            else:
                yield from _labels(term.axes)


def dims_of(*axes: Axis) -> tuple[str, ...]:
    """Names of the dims inside, in order, as often as they occur."""
    return tuple(node.name for node in walk(*axes) if isinstance(node, Dim))


def longest(axis: Axis, size_of: Callable[[str], int]) -> int:
    """Number of cells of an axis before any cut.

    No rank holds more of it.
    """
    match axis:
        case Dim(name=name, low=low, high=high):
            return (size_of(name) if high is None else high) - low
        case Stack(terms=terms):
            return sum(prod(longest(a, size_of) for a in term.axes) for term in terms)
        case Pad(axis=inner, multiple=multiple):
            return -(-longest(inner, size_of) // multiple) * multiple
        case Cut(axis=inner) | Trim(axis=inner) | Flat(axis=inner):
            return longest(inner, size_of)
        case Copies(count=count):
            return count
        case Each():
            return 0
        case _:
            assert_never(axis)


def digits_of(axis: Axis) -> tuple[str, ...]:
    """Names of an index axis' digits, major first: (lap stage slot).

    A sum has none.
    """
    if isinstance(axis, Dim):
        return (axis.name,)
    if isinstance(axis, Flat) or (isinstance(axis, Stack) and len(axis.terms) != 1):
        return ()
    return tuple(digit for inner in children(axis) for digit in digits_of(inner))


def leaves_of(dim: str, indices: Mapping[str, Axis]) -> tuple[str, ...]:
    """Digits that a dim consists of, in the end.

    A dim without digits is its own. `indices`: rules by dim.
    """
    digits = digits_of(indices[dim]) if dim in indices else (dim,)
    if digits == (dim,):
        return (dim,)
    return tuple(leaf for digit in digits for leaf in leaves_of(digit, indices))
