"""A pause of the garbage collector during a save.

A save creates tens of thousands of small live records. Without the pause, Python would search all objects of the
trainer again and again meanwhile.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["no_gc"]


@contextmanager
def no_gc() -> Iterator[None]:
    """Pause the collector for a `with` block or a decorated function.

    If it was off before, it stays off.
    """
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()
