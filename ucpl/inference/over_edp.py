"""A shipped layout's lines with `edp` for `dp`, for experts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

from attrs import AttrsInstance, evolve

from ucpl.language import nodes
from ucpl.language.walk import inside, rewritten

Record = TypeVar("Record", bound=AttrsInstance)


def shapes_of(model: nodes.Model) -> dict[str, tuple[int, ...]]:
    """Shapes of all tensors of a checkpoint's model, with named dims resolved."""
    known = {
        b.name: b.value.value
        for i in model.items
        if isinstance(i, nodes.Dims)
        for b in i.bindings
        if isinstance(b.value, nodes.Number)
    }
    return {
        item.path: tuple(d.size or int(known.get(d.name or "", 1)) for d in item.dims)
        for item in model.items
        if isinstance(item, nodes.Tensor)
    }


def states_of(own: Sequence[nodes.LayoutItem], group: str, number: int) -> Iterator[nodes.LayoutItem]:
    """The base's state lines of one group, with edp."""
    for item in own:
        if isinstance(item, nodes.States) and item.groups == ("*",) and not isinstance(item.shape, str):
            clauses = [
                evolve(c, args=tuple(_numbered(a, number) for a in c.args)) if c.word == "as" else c
                for c in item.clauses
            ]
            shape = None if item.shape is None else tuple(edp_for_dp(axis) for axis in item.shape)
            yield evolve(item, groups=(group,), shape=shape, clauses=(nodes.Clause("on", ("expert",)), *clauses))


def _numbered(text: object, number: int) -> object:
    return text.replace("{bucket}", str(number)) if isinstance(text, str) else text


def edp_for_dp(node: Record) -> Record:
    """The record with edp in place of dp.

    Ways of dealing are then those among edp.
    """
    return rewritten(node, _change)


def _change(node: AttrsInstance) -> AttrsInstance | None:
    match node:
        case nodes.Name(path="dp"):
            return evolve(node, path="edp")
        case nodes.Name(path="ways"):
            return evolve(node, path="expert_ways")
        case nodes.Split(mesh_axis="dp"):
            return evolve(inside(node, _change), mesh_axis="edp")
        case _:
            return None
