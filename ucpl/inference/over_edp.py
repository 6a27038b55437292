"""The lines of a shipped layout with `edp` for `dp`: what experts' groups and flat buffers are cut over."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

from attrs import AttrsInstance, evolve

from ucpl.language import nodes
from ucpl.language.walk import inside, rewritten

Record = TypeVar("Record", bound=AttrsInstance)


def shapes_of(model: nodes.Model) -> dict[str, tuple[int, ...]]:
    """Of every tensor of a model that a checkpoint gave: sizes of dims that have names are beside them."""
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
    """The state lines of the base with edp for dp, of one group and its flat buffer of that number."""
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
    """The same with edp where dp stands, as an axis or in an expression, and with the ways of dealing among edp."""
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
