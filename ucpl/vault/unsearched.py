"""No search for garbage while a job stands still.

What a save makes are tens of thousands of small records, of which none is garbage, and Python would look through all that a
trainer holds, again and again, as they come to be.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["unsearched"]


@contextmanager
def unsearched() -> Iterator[None]:
    """As a decorator: for each call. Who has it off anyway keeps it off."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()
