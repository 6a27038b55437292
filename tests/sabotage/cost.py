"""The cost of work in numbers that no other load changes.

They are calls, and bytes that are held at once.
"""

from __future__ import annotations

import gc
import sys
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager

from attrs import define

from ucpl.errors import catalogue


@define
class Cost:
    calls: int = 0  # of functions, Python's and C's
    held: int = 0  # bytes, at most, above those held before


@contextmanager
def cost() -> Iterator[Cost]:
    """Counts until the end of the block, errors included."""
    found = Cost()

    def count(frame: object, event: str, arg: object) -> None:
        found.calls += event in ("call", "c_call")

    catalogue()  # the first error of a process reads it
    collecting = gc.isenabled()
    gc.disable()  # no earlier garbage is collected within the block, and its own garbage counts as held
    was, tracing = sys.getprofile(), tracemalloc.is_tracing()
    tracemalloc.start()
    tracemalloc.reset_peak()
    before = tracemalloc.get_traced_memory()[0]
    sys.setprofile(count)
    try:
        yield found
    finally:
        sys.setprofile(was)
        found.held = tracemalloc.get_traced_memory()[1] - before
        if not tracing:
            tracemalloc.stop()
        if collecting:
            gc.enable()


@contextmanager
def soon(size: int) -> Iterator[Cost]:
    """A block that is to end soon.

    Some calls and some hundred bytes for each of `size` bytes that are read.
    """
    with cost() as found:
        yield found
    assert found.calls <= 40 * size + 20_000, found
    assert found.held <= 400 * size + (4 << 20), found
