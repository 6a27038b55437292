"""Counts of calls and comparisons.

Other load of the machine changes none of them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType


def calls(work: Callable[[], object]) -> int:
    """Number of called functions, of ours or of libraries."""
    count = 0

    def seen(frame: FrameType, event: str, arg: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(seen)
    try:
        work()
    finally:
        sys.setprofile(before)
    return count


class Asked(str):
    """A name; `Asked.times` counts comparisons of all of them.

    A search through all names for each is quadratic.
    """

    __slots__ = ()
    __hash__ = str.__hash__
    times = 0

    def __eq__(self, other: object) -> bool:
        Asked.times += 1
        return str.__eq__(self, other)
