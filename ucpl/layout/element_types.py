"""Names of element types, held against those that the language has."""

from __future__ import annotations

from ucpl.errors import fail
from ucpl.extents.dtypes import BY_TORCH, DTYPES
from ucpl.layout.scope import at, nearest
from ucpl.syntax import nodes

__all__ = ["demand_dtype"]


def demand_dtype(name: str | None, span: nodes.Span) -> str | None:
    """The name, if it is one. Raises: UcplError E307, with what torch's name for a type is called here."""
    if name is None or name in DTYPES:
        return name
    bare = name.rpartition(".")[2]
    here = BY_TORCH[bare].name if bare in BY_TORCH else nearest(bare, DTYPES)
    fail(
        "E307",
        f"no element type is called `{name}`",
        at(span),
        remedy=f"write `{here}`" if here else f"one of {', '.join(DTYPES)}",
    )
