"""The refusal of what the source lacks and nothing fills: which line to write, and where."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

from ucpl.errors import Label, fail
from ucpl.graph.lacking import itself_of, line_to_write
from ucpl.regions import Placement

__all__ = ["refuse_absent"]


def refuse_absent(source: Placement, target: Placement, state: str, missing: Sequence[str]) -> NoReturn:
    """Tensors of which the source has nothing of a state that the target stores. Raises: UcplError E303."""
    fail(
        "E303",
        f"the target stores {state} of `{missing[0]}`"
        + (f" and {len(missing) - 1} more" if len(missing) > 1 else "")
        + ", and the source has none",
        Label(source.layout.call, "source", where=f"{missing[0]}/{state}"),
        Label(target.layout.call, "target", where=f"{missing[0]}/{state}"),
        remedy=_entry_to_write(source, target, state, missing[0]),
    )


def _entry_to_write(source: Placement, target: Placement, state: str, tensor: str) -> str:
    """The line that the target's layout lacks, or the source's."""
    layout, itself = source.layout, itself_of(source, target)
    line = line_to_write(state, tensor, itself)
    if state != "weight":
        if state in itself and _has_weight(source, tensor):
            line = f"fill state {state} = weight"
        return (
            f"for what the source never had, write `{line}` in the layout of the target;"
            f" else `state {state} = like in FILE` in that of the source, or `derive {state} from ...`;"
            f" or choose a target that does not store {state}"
        )
    dims = layout.tensors[tensor].dims if tensor in layout.tensors else ()
    axes = " ".join(dims) if dims and not any("#" in d for d in dims) else "..." if dims else "()"
    name = tensor if all(part.isidentifier() for part in tensor.split(".")) else f'"{tensor}"'
    return (
        f'write an entry for it in {layout.call}: `{name} = {axes}  as "{tensor}"`; where the source has no weights, '
        f"`derive weight from fp32`; where the target needs none, `{name} = none` there; where it is new, `{line}` there"
    )


def _has_weight(source: Placement, tensor: str) -> bool:
    number = source.tensors.index(tensor) if tensor in source.tensors else -1
    return any(p.state == "weight" and number in p.tensors for p in source.parts)
