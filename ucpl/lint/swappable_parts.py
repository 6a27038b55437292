"""Parts of one size, side by side in a stored tensor.

If swapped, they pass checks of shapes and every round trip.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import prod

from ucpl.layout import Entry, Layout
from ucpl.layout import axes as ax
from ucpl.layout.by_index import whole_name
from ucpl.records import frozen

__all__ = ["SwappableParts", "swappable_parts", "swappable_text"]

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
