"""Parts of a stored tensor that are easily mistaken for each other.

If parts of one size are swapped, they pass checks of shapes and every round trip. If one of two like parts is not cut, each
rank has all of it, and a plan accepts that, since copies are allowed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import pairwise, permutations
from math import prod

from ucpl.layout import Entry, Layout
from ucpl.layout import axes as ax
from ucpl.layout.by_index import whole_name
from ucpl.records import frozen

__all__ = ["SwappableParts", "swappable_parts", "swappable_text", "unlike_cuts"]

NAMED_MAX = 4  # of a message


@frozen
class SwappableParts:
    """Parts of one entry that could be swapped.

    `tensors`: their names in the model.
    """

    entry: str
    tensors: tuple[str, ...]

    def __str__(self) -> str:
        return f"{', '.join(self.tensors[:-1])} and {self.tensors[-1]} in {self.entry}"


def swappable_parts(layout: Layout) -> tuple[SwappableParts, ...]:
    """All parts of one size, entry by entry.

    A part without a size here (a config leaves it open) does not count.
    """
    found = (SwappableParts(e.path, t) for e in layout.entries if len(e.targets) > 1 for t in _alike(e, layout))
    return tuple(dict.fromkeys(found))


def swappable_text(twins: tuple[SwappableParts, ...]) -> str:
    """Name the parts; layers of different sizes are one line."""
    said = list(
        dict.fromkeys(str(SwappableParts(whole_name(t.entry), tuple(map(whole_name, t.tensors)))) for t in twins)
    )
    more = f", and so in {len(said) - NAMED_MAX} more" if len(said) > NAMED_MAX else ""
    return ", ".join(said[:NAMED_MAX]) + more


def _alike(entry: Entry, layout: Layout) -> Iterator[tuple[str, ...]]:
    for axis in ax.walk(*entry.shape):
        if not isinstance(axis, ax.Stack):
            continue
        by_size: dict[int, list[str]] = {}
        for term in axis.terms:
            if term.label in entry.targets:
                size = prod(ax.longest(a, lambda name: layout.sizes.get(name, 0)) for a in term.axes)
                by_size.setdefault(size, []).append(entry.targets[term.label])
        yield from (tuple(p) for size, p in by_size.items() if size and len(p) > 1 and not _in_order(p))


def _in_order(paths: Sequence[str]) -> bool:
    """Return True if they are numbered in order: experts.0, experts.1.

    No other order is likely.
    """
    said = [re.split(r"(\d+)", path) for path in paths]
    numbers = [tuple(map(int, one[1::2])) for one in said]
    return len({tuple(one[::2]) for one in said}) == 1 and all(a < b for a, b in pairwise(numbers))


def unlike_cuts(layout: Layout) -> Iterator[str]:
    """Remarks on such parts, one for each line of a layout."""
    for line, (name, cut, complete, axis) in _unlike(layout).items():
        yield (
            f"{layout.name}: in `{name}` (line {line}), `{cut}` is cut over `{axis}` and `{complete}` of the same dims is not:"
            f" each rank has all of it. If that is not meant, write `@{axis}` in both"
        )


def _unlike(layout: Layout) -> dict[int, tuple[str, str, str, str]]:
    """The first pair of each line: entry, parts, and mesh axis."""
    found: dict[int, tuple[str, str, str, str]] = {}
    for entry in layout.entries:
        for axis in ax.walk(*entry.shape):
            for one, other in permutations(axis.terms, 2) if isinstance(axis, ax.Stack) else ():
                cuts = _cuts(one)
                if one.label and other.label and cuts and not _cuts(other) and _dims(one) == _dims(other):
                    found.setdefault(entry.span.line, (whole_name(entry.path), one.label, other.label, cuts[0]))
    return found


def _cuts(term: ax.Term) -> tuple[str, ...]:
    return tuple(split.mesh_axis for axis in ax.walk(*term.axes) if isinstance(axis, ax.Cut) for split in axis.splits)


def _dims(term: ax.Term) -> tuple[str, ...]:
    return tuple(ax.dims_of(*term.axes))
