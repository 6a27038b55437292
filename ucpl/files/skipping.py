"""Optimizer states that a call leaves out, so that readers skip them.

So states that cannot be read do not stop weights. Skipped names are collected; the caller adds them to the checkpoint's
list of data that was not read.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from attrs import field

from ucpl.records import define

__all__ = ["ALL", "SKIP", "Skipped", "skipped_states", "skipping", "skips", "skips_optimizer"]


ALL, SKIP = "*", "skip"  # fate in a plan of data that was not read, by name; all of the optimizer


@define
class Skipped:
    """The parts that a call leaves out.

    All of an optimizer, or named states.
    `met`: names that were found, and their kind.
    """

    optimizer: bool = False
    states: frozenset[str] = frozenset()
    met: dict[str, str] = field(factory=dict)  # name of a state, a value or a file -> "value" or "file"


_NOTHING = Skipped()
_ASKED: ContextVar[Skipped] = ContextVar("skipped", default=_NOTHING)


@contextmanager
def skipping(*, optimizer: bool, states: frozenset[str]) -> Iterator[Skipped]:
    """Have readers skip these, and give the names that they found."""
    asked = Skipped(optimizer, states)
    token = _ASKED.set(asked)
    try:
        yield asked
    finally:
        _ASKED.reset(token)


def skips(state: str, *, needed: bool = False) -> bool:
    """Test whether a state is left out.

    `needed`: weights are made of it, so only its own name leaves it out.
    """
    asked = _ASKED.get()
    if not (state in asked.states or (asked.optimizer and not needed)):
        return False
    asked.met.setdefault(state, "value")
    return True


def skips_optimizer(*met: str, kind: str = "value") -> bool:
    """Test whether all of the optimizer is left out.

    `met`: names of its existing parts.
    """
    asked = _ASKED.get()
    if asked.optimizer:
        asked.met.update((name, kind) for name in met if name not in asked.met)
    return asked.optimizer


def skipped_states(states: dict[str, str]) -> dict[str, str]:
    """The states that are read, of those that a parameter has."""
    return {state: entry for state, entry in states.items() if not skips(state)}
