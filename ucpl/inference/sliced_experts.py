"""AutoEP's experts at stage 3 in the language: stacks, cut over `edp`.

A rank's experts of a layer are stacked. `"experts.w1@0" = ("experts.w1.0": expert_rows_8 + "experts.w1.1":
expert_rows_8) expert_columns_10  at ep[0]` describes the parameter of a rank; each slice is of that, even if an expert
ends within it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

from ucpl.extents.experts import Experts
from ucpl.extents.sub_groups import pack
from ucpl.inference.over_edp import shapes_of, states_of
from ucpl.inference.parallel import Base
from ucpl.language import nodes

Shape = tuple[int, ...]


def entries(base: Base, experts: Experts, ep: int) -> list[nodes.LayoutItem]:
    """A stack for each parameter of experts on each expert-parallel rank.

    No expert is stored alone.
    """
    tensors = {item.path: item for item in base.model.items if isinstance(item, nodes.Tensor)}
    stacks: dict[tuple[str, int], list[nodes.Tensor]] = {}
    out: list[nodes.LayoutItem] = []
    for name, one in experts.of.items():
        if name in tensors:
            stacks.setdefault((one.fused, experts.rank(name, ep)), []).append(tensors[name])
            out.append(nodes.Entry(name, (), None))
    for (fused, rank), members in stacks.items():
        first, *rest = ([nodes.Dim(d.name or "") for d in item.dims] for item in members)
        rows = [first[0], *(dims[0] for dims in rest)]
        stack = nodes.Stack(tuple(nodes.Term(item.path, (row,)) for item, row in zip(members, rows, strict=True)))
        at = (nodes.Clause("at", ("ep", nodes.Number(rank))),) if ep > 1 else ()
        where = (nodes.Clause("in", ("weights",)), nodes.Clause("as", (fused,)))
        out.append(nodes.Entry(f"{fused}@{rank}", (), (stack, *first[1:]), (*at, *where)))
    return out


def groups(base: Base, experts: Experts, ep: int, own: Sequence[nodes.LayoutItem]) -> Iterator[nodes.LayoutItem]:
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
