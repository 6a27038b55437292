"""Counts of calls and comparisons.

Other load of the machine changes none of them.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from itertools import count
from types import FrameType


def calls(work: Callable[[], object]) -> int:
    """Number of called functions, of ours or of libraries.

    Those in threads that the work starts are among them.
    """
    number = count()

    def seen(frame: FrameType, event: str, arg: object) -> None:
        if event in ("call", "c_call"):
            next(number)

    before = sys.getprofile()
    threading.setprofile(seen)
    sys.setprofile(seen)
    try:
        work()
    finally:
        sys.setprofile(before)
        threading.setprofile(None)
    return next(number)


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
