"""Tensors that a layout stores twice because it extends another.

Its own line packs them, and the base's line still applies. Two homes of one tensor are good (a tied embedding on two
stages), and copies are compared. A likely mistake is a
home from the base alone together with one from the extension alone: `qkv = ...` without `q = none`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from itertools import pairwise, product

import numpy as np

from ucpl.errors import UcplError
from ucpl.language import nodes
from ucpl.language.nodes import Span
from ucpl.layout import Layout, Library
from ucpl.layout import axes as ax
from ucpl.layout.bases import each_state, left_side, statements_of
from ucpl.layout.statements import items_of
from ucpl.placement import Part, Pieces, Placement

__all__ = ["overlapping_parts", "repeated_lines", "stored_twice"]

BOXES_MAX = 1_024  # of one tensor in one part: those of more are not looked at


def stored_twice(placement: Placement) -> tuple[str, ...]:
    """One remark per pair of lines of a layout and its base."""
    extended = placement.layout.extended
    if not extended:
        return ()
    own: dict[int, list[Part]] = {}
    base: dict[int, list[Part]] = {}
    for part in placement.parts:
        if part.state == "weight" and not part.is_alias and part.span.line:
            for number in part.tensors:
                (base if part.span in extended else own).setdefault(number, []).append(part)
    found: dict[tuple[str, str], list[str]] = {}
    for number in sorted(own.keys() & base.keys()):
        for one, other in product(own[number], base[number]):
            if _overlap(one, other, number):
                places = _place(one.span), _place(other.span)
                found.setdefault(places, []).append(placement.tensors[number])
    return tuple(_remark(placement.layout.name, paths, places) for places, paths in found.items())


def _remark(layout: str, paths: Sequence[str], places: tuple[str, str]) -> str:
    named = ", ".join(f"`{path}`" for path in paths[:6]) + (f" and {len(paths) - 6} more" if len(paths) > 6 else "")
    return (
        f"{layout} stores {named} twice: {places[0]} does, and {places[1]} of the layout that it extends."
        f" If one is meant, write `{paths[0]} = none`"
    )


def _place(span: Span) -> str:
    return f"line {span.line} of {span.file}"


def _overlap(one: Part, other: Part, tensor: int) -> bool:
    """Return True if both have a home of one element."""
    a, b = (p.folded.take(np.flatnonzero(p.folded.tensor == tensor)) for p in (one, other))
    if max(len(a), len(b)) > BOXES_MAX:
        return False
    return any(_meet(a, i, b, j) for i in range(len(a)) for j in range(len(b)))


def _meet(a: Pieces, i: int, b: Pieces, j: int) -> bool:
    return bool((np.maximum(a.low[i], b.low[j]) < np.minimum(a.high[i], b.high[j])).all())


def overlapping_parts(layout: Layout) -> Iterator[tuple[Span, str, int, int]]:
    """Overlapping parts of one sum, `(n[..3] + n[2..])`: place, dim, range.

    The place is the entry's.
    """
    for entry in layout.entries:
        for stack in (a for a in ax.walk(*entry.shape) if isinstance(a, ax.Stack)):
            said = [
                (t.label, {d.name: (d.low, d.high) for d in ax.walk(*t.axes) if isinstance(d, ax.Dim)})
                for t in stack.terms
                if not ax.is_copied(*t.axes)
            ]
            parts = [(label, ends) for label, ends in said if any(high is not None for _, high in ends.values())]
            for (label, one), (other, two) in pairwise(said if parts else []):
                if label != other or one.keys() != two.keys() or not one:
                    continue
                shared = {dim: _both(one[dim], two[dim], layout.sizes[dim]) for dim in one}
                if all(low < high for low, high in shared.values()):
                    dim = next((d for d in one if one[d] != two[d]), next(iter(one)))
                    yield entry.span, dim, *shared[dim]


def _both(one: tuple[int, int | None], two: tuple[int, int | None], size: int) -> tuple[int, int]:
    stops = [size if high is None else high for high in (one[1], two[1])]
    return max(one[0], two[0]), min(stops)


# --- Lines that repeat the line of a base, word for word ------------------------------------------------------------

_NUMBERS = (nodes.Let, nodes.Dims, nodes.Assert, nodes.Gone, nodes.Use)


def repeated_lines(library: Library, file: nodes.File) -> Iterator[str]:
    """Lines that repeat the base's.

    All lines of a left side, or none: a home that is written again replaces the base's other ones.
    """
    for node in file.statements:
        if not isinstance(node, nodes.Model | nodes.Layout) or node.extends is None:
            continue
        try:
            own, base = _own_and_base(library, node)
        except UcplError:  # another check reports the faults of the base
            continue
        theirs = _by_side(base)
        for side, lines in _by_side(own).items():
            there = theirs.get(side, [])
            if Counter(lines) != Counter(there) or isinstance(lines[0], _NUMBERS):
                continue
            here, other = (getattr(one[0], "span", nodes.NOWHERE) for one in (lines, there))
            of = "" if other.file == here.file else f" of {other.file}"
            yield (
                f"{node.name}: line {here.line} repeats line {other.line} of {node.extends.name}{of}, word for word."
                " Take it out: the extended line applies without it"
            )


def _own_and_base(
    library: Library, node: nodes.Model | nodes.Layout
) -> tuple[Sequence[nodes.Record], Sequence[nodes.Record]]:
    assert node.extends is not None
    if isinstance(node, nodes.Layout):
        return node.items, items_of(library, node.extends)
    base = library.model(node.extends.name, node.extends.span)
    return each_state(node.items), each_state(statements_of(library, base, list))


def _by_side(items: Sequence[nodes.Record]) -> dict[Hashable, list[nodes.Record]]:
    out: dict[Hashable, list[nodes.Record]] = {}
    for item in items:
        out.setdefault(left_side(item), []).append(item)
    return out
