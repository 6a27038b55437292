"""Compare two plans: stored tensors, their sources, and other statements."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator

import numpy as np
from attrs import field

from ucpl.extents import Key, StoredTensor, key_text
from ucpl.planning.cost import Cost, cost_of
from ucpl.planning.plan import Plan
from ucpl.records import frozen
from ucpl.tables.operations import Fill

__all__ = ["PlanDifference", "Stores", "difference"]

Place = tuple[str, Key]
_SAID = ("derived", "dropped", "changed", "filled")


@frozen
class Stores:
    """Stored tensors of one side that differ or that one plan lacks."""

    first: tuple[str, ...]  # only the first plan has them
    second: tuple[str, ...]
    other: tuple[str, ...]  # of another shape or dtype

    def __bool__(self) -> bool:
        return bool(self.first or self.second or self.other)


@frozen(eq=False)
class PlanDifference:
    """All differences of two plans, except for their names.

    False if they do the same.
    """

    calls: tuple[
        tuple[str, str, str], ...
    ]  # (subject, in the first plan, in the second): printed, and no difference alone
    reads: Stores
    writes: Stores
    made: tuple[str, ...]  # stored tensors that both write, of other elements or in another way
    tallies: tuple[tuple[str, str, tuple[int, int], tuple[int, int]], ...]  # (state, kind, runs and elements in each)
    said: tuple[tuple[str, str, str], ...]  # (subject, "first" or "second", a sentence that only that one has)
    settings: tuple[tuple[str, str, str], ...]  # (side and name, in the first plan, in the second)
    costs: tuple[Cost, Cost] = field(repr=False)

    def __bool__(self) -> bool:
        return bool(self.reads or self.writes or self.made or self.tallies or self.said or self.settings)


def difference(one: Plan, two: Plan) -> PlanDifference:
    calls = (
        ("name", one.name, two.name),
        ("source", one.source_call, two.source_call),
        ("target", one.target_call, two.target_call),
        ("rank", _share(one), _share(two)),
    )
    theirs, ours = _by_place(two.targets), _by_place(one.targets)
    both = [place for place in ours if place in theirs]
    made = _made(one), _made(two)
    return PlanDifference(
        tuple(row for row in calls if row[1] != row[2]),
        _stores(one.sources, two.sources),
        _stores(one.targets, two.targets),
        tuple(_text(place) for place in both if made[0].get(place) != made[1].get(place)),
        tuple(_tallies(one, two)),
        tuple(_statements(one, two)),
        tuple(_settings(one, two)),
        (cost_of(one), cost_of(two)),
    )


def _share(plan: Plan) -> str:
    return "all" if plan.rank is None else f"{plan.rank} alone"


def _by_place(tensors: Iterable[StoredTensor]) -> dict[Place, StoredTensor]:
    return {(t.file, t.key): t for t in tensors}


def _text(place: Place) -> str:
    return f"{place[0]}: {key_text(place[1])}"


def _stores(one: Iterable[StoredTensor], two: Iterable[StoredTensor]) -> Stores:
    ours, theirs = _by_place(one), _by_place(two)
    return Stores(
        tuple(_text(place) for place in ours if place not in theirs),
        tuple(_text(place) for place in theirs if place not in ours),
        tuple(
            f"{_text(place)} is {_form(t)}, and {_form(theirs[place])}"
            for place, t in ours.items()
            if place in theirs and _form(t) != _form(theirs[place])
        ),
    )


def _form(tensor: StoredTensor) -> str:
    return f"{tensor.dtype or '?'} {list(tensor.shape)}"


def _made(plan: Plan) -> dict[Place, bytes]:
    """A digest of the sources of each stored tensor of the target.

    Element by element or run by run.

    The same for plans that name their tables otherwise: sources count by their places, and rows by their offsets.
    """
    held: dict[int, list[bytes]] = {}
    places = [_text((s.file, s.key)) for s in plan.sources]
    for m in plan.moves:
        way = f"{m.kind} {m.state} {m.source_value} {m.target_value} {m.lossy} {m.over} {m.half}"
        columns = np.concatenate(
            [m.source_offset[:, None], m.target_offset[:, None], m.shape, m.source_stride, m.target_stride], axis=1
        )
        for row, (source, target) in enumerate(zip(m.source.tolist(), m.target.tolist(), strict=True)):
            text = f"{way} {places[source]} {columns[row].tolist()}"
            held.setdefault(target, []).append(text.encode())
    space = plan.spaces[1]
    for node in plan.nodes:
        if isinstance(node, Fill) and node.lacking:
            for offset, *box in zip(
                node.boxes.offset.tolist(), node.boxes.shape.tolist(), node.boxes.stride.tolist(), strict=True
            ):
                home = np.array([offset], dtype=np.int64)
                text = f"fill {node.value} {int(space.position(home)[0])} {box}"
                held.setdefault(int(space.home(home)[0]), []).append(text.encode())
    targets = plan.targets
    return {
        (targets[n].file, targets[n].key): hashlib.sha256(b"\n".join(sorted(rows))).digest() for n, rows in held.items()
    }


def _tallies(one: Plan, two: Plan) -> Iterator[tuple[str, str, tuple[int, int], tuple[int, int]]]:
    ours, theirs = (_counted(plan) for plan in (one, two))
    for state, kind in dict.fromkeys((*ours, *theirs)):
        a, b = ours.get((state, kind), (0, 0)), theirs.get((state, kind), (0, 0))
        if a[1] != b[1]:  # runs alone may come from other tables
            yield state, kind, a, b


def _counted(plan: Plan) -> dict[tuple[str, str], tuple[int, int]]:
    out: dict[tuple[str, str], tuple[int, int]] = {}
    for t in plan.tallies:
        runs, elements = out.get((t.state, t.kind), (0, 0))
        out[t.state, t.kind] = (runs + t.runs, elements + t.elements)
    return out


def _statements(one: Plan, two: Plan) -> Iterator[tuple[str, str, str]]:
    for name in _SAID:
        ours, theirs = getattr(one, name), getattr(two, name)
        yield from ((name, "first", text) for text in ours if text not in theirs)
        yield from ((name, "second", text) for text in theirs if text not in ours)
    for name, a, b in (("carry", one.carry, two.carry), ("begun", one.begun, two.begun)):
        if a != b:
            yield from ((name, "first", f"{k} = {v}") for k, v in a.items() if b.get(k) != v)
            yield from ((name, "second", f"{k} = {v}") for k, v in b.items() if a.get(k) != v)


def _settings(one: Plan, two: Plan) -> Iterator[tuple[str, str, str]]:
    for side, ours, theirs in (("source", one.source, two.source), ("target", one.target, two.target)):
        if ours.framework != theirs.framework:
            yield f"{side} framework", ours.framework, theirs.framework
        for name in dict.fromkeys((*ours.settings, *theirs.settings)):
            a, b = ours.settings.get(name), theirs.settings.get(name)
            if a != b:
                yield f"{side} {name}", str(a), str(b)
