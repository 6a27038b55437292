"""Parts of names that wrapper modules add, recognised only here.

The wrappers are torch.compile, FSDP, activation checkpointing and DDP.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Set
from contextlib import contextmanager
from contextvars import ContextVar

__all__ = ["LOOSE", "WRAPPERS", "are_kept", "bare", "has_wraps", "keeping"]

WRAPPERS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
LOOSE = WRAPPERS | {"module"}  # as DDP and DataParallel have it: a model's own part may be called so, too

_KEPT: ContextVar[bool] = ContextVar("kept", default=False)


@contextmanager
def keeping(*, wraps: bool) -> Iterator[None]:
    """Have readers give names as they are in the files.

    A target has the wraps of its source's names; read without them, its names would differ from the source's.
    """
    token = _KEPT.set(wraps)
    try:
        yield
    finally:
        _KEPT.reset(token)


def are_kept() -> bool:
    """Test whether readers keep wraps in names."""
    return _KEPT.get()


def has_wraps(names: Iterable[str]) -> bool:
    """Test whether a name has a part that is a wrap."""
    return any(not WRAPPERS.isdisjoint(name.split(".")) for name in names)


def bare(name: str, words: Set[str] = WRAPPERS) -> str:
    """A name without the parts that are wraps, unless readers keep them."""
    if are_kept():
        return name
    return ".".join(step for step in name.split(".") if step not in words)
