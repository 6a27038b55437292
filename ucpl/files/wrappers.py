"""Parts of names that wrapper modules add, recognised only here.

The wrappers are torch.compile, FSDP, activation checkpointing and DDP.
"""

from __future__ import annotations

from collections.abc import Set

__all__ = ["LOOSE", "WRAPPERS", "bare"]

WRAPPERS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
LOOSE = WRAPPERS | {"module"}  # as DDP and DataParallel have it: a model's own part may be called so, too


def bare(name: str, words: Set[str] = WRAPPERS) -> str:
    """A name without the parts that are wraps."""
    return ".".join(step for step in name.split(".") if step not in words)
