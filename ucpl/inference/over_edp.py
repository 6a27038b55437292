"""Experts over `edp`, and AutoEP's stacks of stage 3.

At stage 3 a rank's experts of a layer are stacked. `"experts.w1@0" = ("experts.w1.0": expert_rows_8 + "experts.w1.1":
expert_rows_8) expert_columns_10  at ep[0]` describes the parameter of a rank; each slice is of that, even if an expert
ends within it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import TypeVar

from attrs import AttrsInstance, evolve

from ucpl.extents.experts import Experts
from ucpl.extents.sub_groups import pack
from ucpl.inference.parallel import Base
from ucpl.language import nodes
from ucpl.language.walk import inside, rewritten

Record = TypeVar("Record", bound=AttrsInstance)
Shape = tuple[int, ...]


def shapes_of(model: nodes.Model) -> dict[str, Shape]:
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


def stacks(base: Base, experts: Experts, ep: int) -> list[nodes.LayoutItem]:
    """A stack for each parameter of experts on each expert-parallel rank.

    No expert is stored alone.
    """
    tensors = {item.path: item for item in base.model.items if isinstance(item, nodes.Tensor)}
    ranked: dict[tuple[str, int], list[nodes.Tensor]] = {}
    out: list[nodes.LayoutItem] = []
    for name, one in experts.of.items():
        if name in tensors:
            ranked.setdefault((one.fused, experts.rank(name, ep)), []).append(tensors[name])
            out.append(nodes.Entry(name, (), None))
    for (fused, rank), members in ranked.items():
        first, *rest = ([nodes.Dim(d.name or "") for d in item.dims] for item in members)
        rows = [first[0], *(dims[0] for dims in rest)]
        stack = nodes.Stack(tuple(nodes.Term(item.path, (row,)) for item, row in zip(members, rows, strict=True)))
        at = (nodes.Clause("at", ("ep", nodes.Number(rank))),) if ep > 1 else ()
        where = (nodes.Clause("in", ("weights",)), nodes.Clause("as", (fused,)))
        out.append(nodes.Entry(f"{fused}@{rank}", (), (stack, *first[1:]), (*at, *where)))
    return out


def groups_of_stacks(
    base: Base, experts: Experts, ep: int, own: Sequence[nodes.LayoutItem]
) -> Iterator[nodes.LayoutItem]:
    """The sub-groups of experts, behind those of all other parameters."""
    shapes = shapes_of(base.model)
    size, dp = base.asked("sub_group_size"), base.asked("dp")
    at = 0
    for group in (item for item in base.model.items if isinstance(item, nodes.Group)):
        members = group.members or ()
        if not members or members[0] not in experts.of:
            at += len(pack([shapes[name] for name in members], dp, size))
            continue
        fused: dict[str, Shape] = {}
        for name in members:
            one = experts.of[name]
            fused[one.fused] = (one.count // ep, *shapes[name])
        packed = pack([*fused.values()], dp // ep, size)
        for i, (first, last) in enumerate(zip([0, *accumulate(packed)], accumulate(packed), strict=False)):
            called = group.name if len(packed) == 1 else f"{group.name}.{i}"
            names = tuple(f"{name}@{rank}" for name in [*fused][first:last] for rank in range(ep))
            yield nodes.Group(called, members=names)
            yield from states_of(own, called, at + i)
        at += len(packed)
