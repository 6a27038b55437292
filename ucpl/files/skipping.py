"""What a call leaves out of an optimizer: readers skip it, so that states that nobody can read stop no weights.

What is skipped is collected as it is met; who opened the checkpoint adds it to what the reader passes by.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from attrs import field

from ucpl.records import define

__all__ = ["ALL", "SKIP", "Skipped", "skipped_states", "skipping", "skips", "skips_optimizer"]


ALL, SKIP = "*", "skip"  # of a plan: the fate of what is not read, by name; all of the optimizer


@define
class Skipped:
    """What is asked to be left out: all of an optimizer, or states by name. `met`: what was there, and its kind."""

    optimizer: bool = False
    states: frozenset[str] = frozenset()
    met: dict[str, str] = field(factory=dict)  # name of a state, a value or a file -> "value" or "file"


_NOTHING = Skipped()
_ASKED: ContextVar[Skipped] = ContextVar("skipped", default=_NOTHING)


@contextmanager
def skipping(*, optimizer: bool = False, states: frozenset[str] = frozenset()) -> Iterator[Skipped]:
    """Have readers skip what is named. Gives what they met of it."""
    asked = Skipped(optimizer, states)
    token = _ASKED.set(asked)
    try:
        yield asked
    finally:
        _ASKED.reset(token)


def skips(state: str, *, needed: bool = False) -> bool:
    """Whether a state is left out. `needed`: weights are made of it, so only its own name leaves it out."""
    asked = _ASKED.get()
    if not (state in asked.states or (asked.optimizer and not needed)):
        return False
    asked.met.setdefault(state, "value")
    return True


def skips_optimizer(*met: str, kind: str = "value") -> bool:
    """Whether all of the optimizer is left out. `met`: names of what there is of it."""
    asked = _ASKED.get()
    if asked.optimizer:
        asked.met.update((name, kind) for name in met if name not in asked.met)
    return asked.optimizer


def skipped_states(states: dict[str, str]) -> dict[str, str]:
    """The states that are read, of those that a parameter has."""
    return {state: entry for state, entry in states.items() if not skips(state)}
