"""Names of an optimizer's states apart from ours: it may call one `weight` or `fp32`, as we call the parameter itself."""

from __future__ import annotations

TAKEN = frozenset({"weight", "fp32"})  # the parameter itself, and its master
_APART = "optimizer."


def named(state: str) -> str:
    """A state as it is called here, by its name in the files."""
    return _APART + state if state in TAKEN or state.startswith(_APART) else state


def in_file(state: str) -> str:
    """Its name in the files, by what it is called here."""
    return state.removeprefix(_APART)
