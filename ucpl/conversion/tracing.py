"""Traces an element of a target to its source in a plan.

The result has file, key and position on both sides, for every state.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np
from attrs import evolve

from ucpl.errors import Label, fail
from ucpl.extents import key_text
from ucpl.layout.by_index import whole_dim, whole_name
from ucpl.layout.name_remedies import nearest
from ucpl.records import frozen

if TYPE_CHECKING:
    from ucpl.layout import Layout, LogicalTensor
    from ucpl.placement import Placement
    from ucpl.planning.plan import Plan
    from ucpl.planning.runs import Runs
    from ucpl.tables.operations import Kind

__all__ = ["End", "Traced", "traced"]

_ELEMENT = re.compile(r"(?P<name>[^\[\]]+)(?:\[(?P<index>[^\[\]]*)\])?")
_NUMBER = re.compile(r"[0-9]{1,18}")
_SHOWN = 10  # of the names that a plan has
_CALLED = "<command line>"  # the place of the requested element

Spot = tuple[str, int, int]  # a state, the number of a target, a position in it


@frozen
class End:
    """A place of one side."""

    file: str
    key: str
    index: tuple[int, ...]


@frozen
class Traced:
    """Source and target of a run of elements, or of one."""

    element: str  # of a run: the tensor
    state: str
    kind: Kind
    rounded: bool
    elements: int
    source: End
    target: End


def traced(plan: Plan, file: str, asked: str, state: str | None) -> tuple[str, list[Traced]]:
    """The requested tensor and its runs, or the runs of one element.

    file: path of the plan, for messages. asked: `wte.weight`, `wte.weight[3, 17]`, `wte.weight[v=3, h=17]`. state: only this
    one. Raises: UcplError E181, E182, E351.
    """
    whole, families = asked.strip(), {name: path for path, of in plan.families.items() for name in of}
    names = [name for path in plan.tensors for name in plan.families.get(path, (path,))]
    found = _ELEMENT.fullmatch(whole)
    if found is None:
        fail("E181", f"`{asked}` is no tensor with an index", Label(_CALLED, where=asked))
    known = {*names}
    name = whole if whole in known else found["name"].strip()
    name = plan.target.aliases.get(name, name)
    said = [name] if name in known else [t for t in names if whole_name(t) == name]
    if not said:
        close = nearest(name, [*names, *map(whole_name, names)])
        has = f"it has {', '.join(names[:_SHOWN])}" + (", ..." if len(names) > _SHOWN else "")
        remedy = f"did you mean `{close}`?" if close else has
        fail("E182", f"the plan has no tensor `{name}`", Label(file, where=name), remedy=remedy)
    if found["index"] is None or name == whole:
        if name in families:
            return name, list(_runs_of_member(plan, file, families[name], name, state))
        return name, [one for tensor in said for one in _runs(plan, tensor, state)]
    return name, _of_element(plan, file, said, found["index"], state)


def _runs(plan: Plan, name: str, state: str | None) -> Iterator[Traced]:
    """Every run of a tensor, as the plan moves it."""
    number = plan.tensors.index(name)
    for m in plan.moves:
        if state is None or m.state == state:
            for i in (m.tensor == number).nonzero()[0].tolist():
                yield _traced(
                    plan, m, i, int(m.source_offset[i]), int(m.target_offset[i]), name, int(m.shape[i].prod())
                )


def _runs_of_member(plan: Plan, file: str, family: str, name: str, state: str | None) -> Iterator[Traced]:
    """The runs of one tensor of a family.

    They are the parts of moves in its places. A move of another tensor may also fill a place that has no gaps.
    """
    from ucpl.placement import locate
    from ucpl.tables import clip

    number, layout = plan.tensors.index(family), _layout(plan, file, [name], "")
    placement = locate(layout)
    tensor, places = placement.tensors.index(name), _numbers_of(plan)
    spans: dict[tuple[str, int], list[tuple[int, int, bool]]] = {}
    for part in placement.parts:
        mine = part.pieces.take(part.pieces.tensor == tensor)
        ends = mine.offset + ((mine.high - mine.low - 1) * mine.stride).sum(axis=1) + 1
        is_solid = ends - mine.offset == mine.volume
        columns = (mine.home.tolist(), mine.offset.tolist(), ends.tolist(), is_solid.tolist())
        for home, low, high, solid in zip(*columns, strict=True):
            one = part.homes.home(home)
            target = places.get((one.file, tuple(map(str, one.key))))
            if target is not None:
                spans.setdefault((part.state, target), []).append((low, high, solid))
    for m in plan.moves:
        if state is not None and m.state != state:
            continue
        there = [target for place, target in spans if place == m.state]
        for i in np.isin(m.target, there).nonzero()[0].tolist():
            for low, high, solid in spans[m.state, int(m.target[i])]:
                if not solid and m.tensor[i] != number:
                    continue
                span = np.array([low], np.int64), np.array([high], np.int64)
                one_row = m.target_offset[i : i + 1], m.shape[i : i + 1], m.target_stride[i : i + 1]
                _, first, last = clip(*one_row, *span)
                for begin, end in zip(first, last, strict=True):
                    source = int(m.source_offset[i] + (begin * m.source_stride[i]).sum())
                    target = int(m.target_offset[i] + (begin * m.target_stride[i]).sum())
                    yield _traced(plan, m, i, source, target, name, int((end - begin).prod()))


def _of_element(plan: Plan, file: str, said: list[str], text: str, state: str | None) -> list[Traced]:
    """The moves that put one element where the target stores it.

    `said`: the tensor. If a dim has a size for each layer: one tensor for each size; one of them has the element.
    """
    from ucpl.placement import locate
    from ucpl.placement.placement import element_name

    layout = _layout(plan, file, said, text)
    name, index = _chosen(text, [layout.tensors[one] for one in said])
    named = element_name(layout, name, index)
    out: list[Traced] = []
    members: set[tuple[int, tuple[int, ...] | None]] = set()  # of each target: the parts that are combined there
    for its_state, target, position in _spots(plan, locate(layout), name, index):
        if state is not None and its_state != state:
            continue
        for m in plan.moves:
            for i in (m.target == target).nonzero()[0].tolist():
                at = _within(position, int(m.target_offset[i]), m.target_stride[i].tolist(), m.shape[i].tolist())
                if at is None:
                    continue
                source = int(m.source_offset[i]) + sum(a * int(s) for a, s in zip(at, m.source_stride[i], strict=True))
                one = _traced(plan, m, i, source, position, named, 1)
                member = _member(plan, m, i)
                is_copy = member is not None and (target, member) in members
                out.append(evolve(one, kind="check") if is_copy else one)
                members.add((target, member))
    return out


def _layout(plan: Plan, file: str, said: list[str], text: str) -> Layout:
    """The target's layout in the plan.

    Raises: E181 if it has none, E351.
    """
    from ucpl.language import nodes
    from ucpl.layout import load, resolve

    name = whole_name(said[0])
    if not plan.layout_text:
        fail(
            "E181",
            f"this plan's target is a layout of a model of its own: {name} has no index here",
            Label(file, where=f"{name}[{text}]"),
            remedy=f"`ucpl why {file} '{name}'` lists all its runs",
        )
    layout = resolve(load(("layout.ucpl", plan.layout_text)), nodes.Call("stored"))
    lost = next((one for one in said if one not in layout.tensors), None)
    if lost is not None:
        fail("E351", f"{file} is damaged: its layout has no tensor `{lost}`", Label(file, where=lost))
    return layout


def _spots(plan: Plan, placement: Placement, name: str, index: tuple[int, ...]) -> Iterator[Spot]:
    """Places of an element in the target."""
    from ucpl.verification.elements import spots_of

    homes = [(p.state, h) for p in placement.parts for h in p.homes]
    first = [0, *accumulate(len(p.homes) for p in placement.parts)]
    numbers = _numbers_of(plan)
    for spot in spots_of(placement, name, index):
        state, home = homes[first[spot.part] + spot.home]
        target = numbers.get((home.file, tuple(map(str, home.key))))
        if target is not None:
            yield state, target, spot.position


def _numbers_of(plan: Plan) -> dict[tuple[str, tuple[str, ...]], int]:
    """The number of each stored tensor of the target, by its place."""
    return {(t.file, tuple(map(str, t.key))): i for i, t in enumerate(plan.targets)}


def _member(plan: Plan, m: Runs, i: int) -> tuple[int, ...] | None:
    """The rank coordinates of a row along the reduced axes.

    None: the row is not part of a mean or sum.
    """
    rank = plan.sources[int(m.source[i])].rank
    return tuple(rank // divisor % degree for divisor, degree in m.over) or None


def _traced(plan: Plan, m: Runs, i: int, source: int, target: int, element: str, elements: int) -> Traced:
    s, t = plan.sources[int(m.source[i])], plan.targets[int(m.target[i])]
    here = End(s.file, key_text(s.key), _unravel(source, s.shape))
    there = End(t.file, key_text(t.key), _unravel(target, t.shape))
    return Traced(element, m.state, m.kind, bool(m.lossy), elements, here, there)


def _unravel(position: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    out = []
    for n in reversed(shape):
        out.append(position % n)
        position //= n
    return tuple(out[::-1])


def _within(position: int, offset: int, stride: list[int], shape: list[int]) -> list[int] | None:
    """Index of a position in a strided box; None: outside."""
    left = position - offset
    at = [0] * len(shape)
    if left < 0:
        return None
    for dim in sorted(range(len(shape)), key=lambda d: -stride[d]):
        if stride[dim] > 0:
            at[dim] = min(left // stride[dim], shape[dim] - 1)
            left -= at[dim] * stride[dim]
    return at if left == 0 else None


# ---- an index, as it is written --------------------------------------------------------------------------------------


def _chosen(text: str, tensors: list[LogicalTensor]) -> tuple[str, tuple[int, ...]]:
    """The tensor with an element, and the element's index in it.

    text: `3, 17` or `h=3, d=17`, in indices of unsplit dims. Raises: E181, E182.
    """
    name = whole_name(tensors[0].path)
    where = Label(_CALLED, where=f"{name}[{text}]")
    values = _numbers(text, tensors[0], where)
    for tensor in tensors:
        at = [
            indices.index(value) if value in indices else -1
            for indices, value in zip(tensor.indices, values, strict=False)
        ]
        if len(values) == len(tensor.indices) and -1 not in at:
            return tensor.path, tuple(at)
    dims = [whole_dim(d) if "#" not in d else "" for d in tensors[0].dims]
    there = max((_there(values, tensor) for tensor in tensors), key=lambda one: one[0])[1]
    form = ", ".join(f"{d}={n}" if d else str(n) for d, n in zip(dims, there, strict=True))
    sizes = " or ".join(f"{list(t.counts)}" for t in tensors)
    fail(
        "E182",
        f"`{name}` is {sizes}: it has no element {values}",
        where,
        remedy=f"give an index of each dim, as in '{name}[{form}]'; or '{name}' for all its runs",
    )


def _there(values: list[int], tensor: LogicalTensor) -> tuple[int, list[int]]:
    """Count of leading numbers that fit, and an element with these."""
    count = 0
    while count < min(len(values), len(tensor.indices)) and values[count] in tensor.indices[count]:
        count += 1
    return count, [*values[:count], *(next(iter(indices), 0) for indices in tensor.indices[count:])]


def _numbers(text: str, tensor: LogicalTensor, where: Label) -> list[int]:
    """The numbers of an index, by the dims' order."""
    parts = [p.strip() for p in text.split(",")] if text.strip() else []
    dims = [whole_dim(d) for d in tensor.dims]
    out: list[int] = []
    for n, part in enumerate(parts):
        dim, equals, number = part.rpartition("=")
        if not _NUMBER.fullmatch(number.strip()) or (equals and (n >= len(dims) or dim.strip() != dims[n])):
            known = ", ".join(f"{d}=0" if "#" not in d else "0" for d in dims)
            remedy = f"write its dims in their order, as in '{whole_name(tensor.path)}[{known}]'"
            fail("E181", f"`{part}` is no index of `{whole_name(tensor.path)}`", where, remedy=remedy)
        out.append(int(number))
    return out
