"""Lines of a layout or model that extends another, and that say what the base says, word for word: remarks, no faults."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence

from ucpl.errors import UcplError
from ucpl.layout import Library
from ucpl.layout.bases import statements_of
from ucpl.layout.overlay import each_state, left_side
from ucpl.layout.statements import items_of
from ucpl.syntax import nodes

__all__ = ["repeated_lines"]

_NUMBERS = (nodes.Let, nodes.Dims, nodes.Assert, nodes.Gone, nodes.Use)


def repeated_lines(library: Library, file: nodes.File) -> Iterator[str]:
    """Of each left side all lines or none: of two homes in the base, one that stands here again takes the other back."""
    for node in file.statements:
        if not isinstance(node, nodes.Model | nodes.Layout) or node.extends is None:
            continue
        try:
            own, base = _both(library, node)
        except UcplError:  # what is wrong with the base is said elsewhere
            continue
        theirs = _by_side(base)
        for side, lines in _by_side(own).items():
            there = theirs.get(side, [])
            if Counter(lines) != Counter(there) or isinstance(lines[0], _NUMBERS):
                continue
            here, other = (getattr(one[0], "span", nodes.NOWHERE) for one in (lines, there))
            of = "" if other.file == here.file else f" of {other.file}"
            yield (
                f"{node.name}: line {here.line} says what {node.extends.name} says in line {other.line}{of}, word for word."
                " Take it out: what is extended holds without it"
            )


def _both(library: Library, node: nodes.Model | nodes.Layout) -> tuple[Sequence[nodes.Record], Sequence[nodes.Record]]:
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
