"""Names of an optimizer's states that differ from ucpl's.

An optimizer can call a state `weight` or `fp32`, which are ucpl's names of the parameter itself.
"""

from __future__ import annotations

TAKEN = frozenset({"weight", "fp32"})  # the parameter itself, and its master
_APART = "optimizer."


def named(state: str) -> str:
    """ucpl's name of a state, from its name in the files."""
    return _APART + state if state in TAKEN or state.startswith(_APART) else state


def in_file(state: str) -> str:
    """A state's name in the files, from ucpl's name."""
    return state.removeprefix(_APART)


def is_taken(state: str) -> bool:
    """Test for ucpl's name of a state whose own name is taken."""
    return state.startswith(_APART)
