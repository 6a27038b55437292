"""Names that count how often they are compared.

A search through all of them for each is quadratic.
"""

from __future__ import annotations


class Asked(str):
    """A name; `Asked.times` counts comparisons of all of them."""

    __slots__ = ()
    __hash__ = str.__hash__
    times = 0

    def __eq__(self, other: object) -> bool:
        Asked.times += 1
        return str.__eq__(self, other)
