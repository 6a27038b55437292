"""Checks of both sides' model, its tensors, and dropped names."""

from __future__ import annotations

from pathlib import PurePath

from ucpl.errors import Label, fail
from ucpl.graph.missing_elements import line_to_write
from ucpl.layout import LogicalTensor
from ucpl.layout.by_index import whole_name
from ucpl.layout.indices import Indices
from ucpl.layout.name_remedies import for_dropped
from ucpl.layout.scope import at
from ucpl.placement import Placement

__all__ = ["check_drops", "check_models"]

SHOWN = 6  # indices that a message lists


def check_drops(source: Placement, drop: tuple[str, ...]) -> None:
    """Every name to be dropped is one of the source's. E300."""
    held = {p.state for p in source.parts}
    for name in drop:
        known = held | set(source.tensors) | set(map(whole_name, source.tensors)) | set(source.layout.aliases)
        if name not in known and not any(s.name == name for s in source.layout.states):
            fail(
                "E300",
                f"--drop {name}: no tensor or state of that name",
                Label("<command line>", where=f"--drop {name}"),
                remedy=for_dropped(name, sorted(held), list(source.tensors)),
            )


def check_models(source: Placement, target: Placement, drop: set[str]) -> None:
    """Check that both sides have one model and the same tensors.

    E301, E302, E319.
    """
    here, there = source.layout, target.layout
    if here.model_name == there.model_name and here.model_arguments and there.model_arguments:
        if here.model_call != there.model_call and not there.fillings:  # else a tensor says if it has grown
            fail(
                "E319",
                f"the source is of {here.model_call}, the target of {there.model_call}",
                Label(here.call, where="source"),
                Label(there.call, where="target"),
            )
    _check_tensors(source, target, drop)


def _for_absent(path: str, source: Placement, target: Placement) -> str:
    """Remedy for a tensor of the target that the source's model lacks."""
    if {*source.layout.tensors}.isdisjoint(target.layout.tensors):  # names of two dialects
        file = PurePath(target.layout.tensors[path].span.file).name or "FILE.ucpl"
        return f"the names of source and target differ: give the source's, as in --from {file}:hf"
    fill = line_to_write("weight", path, frozenset({"weight"}))
    return f"source and target must be layouts of one model; fill new tensors: {fill}"


def _check_tensors(source: Placement, target: Placement, drop: set[str]) -> None:
    ours = source.layout.tensors
    filled = {path for line in target.layout.fillings if line.states is None for path in line.names}
    for path, tensor in target.layout.tensors.items():
        other = ours.get(path)
        if other is not None and (other.counts, other.dims, other.indices) == (
            tensor.counts,
            tensor.dims,
            tensor.indices,
        ):
            continue
        there = at(tensor.span, "target") if tensor.span.line else Label(target.layout.call, where=path)
        if other is None:
            if path in drop or path in filled:
                continue
            fail(
                "E301",
                f"the target stores `{path}`, which the source's model lacks",
                at(tensor.span) if tensor.span.line else there,
                remedy=_for_absent(path, source, target),
            )
        if path in filled and _grows(other, tensor):
            continue
        named = all("#" not in d for d in (*tensor.dims, *other.dims))
        if other.counts != tensor.counts or (named and (other.dims, other.indices) != (tensor.dims, tensor.indices)):
            fail(
                "E302",
                f"`{path}` is {_shape(other)} in the source and {_shape(tensor)} in the target",
                at(other.span, "source") if other.span.line else Label(source.layout.call, where=path),
                there,
                remedy=f"fill the elements by which it has grown: {line_to_write('weight', path, frozenset({'weight'}))}"
                if _grows(other, tensor)
                else "",
            )


def _grows(old: LogicalTensor, new: LogicalTensor) -> bool:
    """True if a tensor is the other one, extended along some dims."""
    if len(old.counts) != len(new.counts):
        return False
    named = all("#" not in d for d in (*old.dims, *new.dims))
    begins = all(len(a) <= len(b) and b[: len(a)] == a for a, b in zip(old.indices, new.indices, strict=True))
    return begins and (not named or old.dims == new.dims)


def _shape(tensor: LogicalTensor) -> str:
    """`[l=2 (3, 5), h=8]`: dims, with the indices if only some are there."""
    return "[" + ", ".join(map(_side, tensor.dims, tensor.counts, tensor.indices)) + "]"


def _side(dim: str, count: int, indices: Indices) -> str:
    shown = str(count) if "#" in dim else f"{dim}={count}"
    if indices == range(count):
        return shown
    first = ", ".join(map(str, indices[:SHOWN]))
    return f"{shown} ({first}{', ...' if count > SHOWN else ''})"
