"""The values of a plan's picture: moves, kinds, and amounts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
from attrs import field
from numpy.typing import NDArray

from ucpl.extents import size_of
from ucpl.records import frozen
from ucpl.tables import I64
from ucpl.tables.operations import Derive, Fill, Flow, Lane

if TYPE_CHECKING:
    from ucpl.extents import Shelves
    from ucpl.planning.plan import Plan

__all__ = ["EntryFlow", "FlowGrid", "PlanPicture", "StateFlow", "grids", "plan_picture", "ranks_text"]

GROUPS = 16  # of ranks, along one side of a grid
GRIDS = 5
NOTES_MAX = 12

Reals = NDArray[np.float64]
Amounts = I64  # bytes, or elements where a type is not known


@frozen(eq=False)
class StateFlow:
    """The moves of one state of one kind."""

    state: str
    kind: str  # copy, derive, scale, mean, sum, max, check, fill
    runs: int
    elements: int
    amount: int


@frozen(eq=False)
class EntryFlow:
    """The moves into one entry of the target.

    It is a tensor, several that are stored as one, or a group's flat buffers.
    """

    label: str
    tensors: tuple[str, ...]  # whose elements a run begins with; in flat buffers a run continues into the next ones
    states: tuple[str, ...]
    kinds: tuple[str, ...]
    amount: int  # written
    runs: int
    sources: int  # ranks that it comes from
    targets: int
    own: int  # of the amount: from a rank to the rank of the same number


@frozen(eq=False)
class FlowGrid:
    """The amounts from ranks of the source to ranks of the target."""

    sources: tuple[tuple[int, int], ...]  # runs of ranks: the first, and the one behind the last
    targets: tuple[tuple[int, int], ...]
    amount: Amounts = field(repr=False)  # (sources, targets)


@frozen(eq=False)
class PlanPicture:
    name: str
    source: str
    target: str
    unit: str  # "B", or "elements" where a type is not known
    stored: tuple[int, int]  # tensors of both sides
    ranks: tuple[int, int]
    ways: tuple[StateFlow, ...]
    entries: tuple[EntryFlow, ...]
    grids: tuple[FlowGrid, ...]  # of all ranks; then of the cell with the most, and so on down to single ranks
    written: int
    own: int  # of it: from a rank to the rank of the same number
    notes: tuple[str, ...]


@frozen(eq=False)
class _Rows:
    """Runs of one state of a flow."""

    label: str
    kind: str
    state: str
    tensor: I64
    source: I64  # ranks
    target: I64
    elements: I64
    amount: I64


def plan_picture(plan: Plan) -> PlanPicture:
    ranks = _ranks(plan.source_shelves), _ranks(plan.target_shelves)
    sizes = _sizes(plan.target_shelves)
    unit = "B" if (sizes > 0).all() else "elements"
    rows = [r for flow in plan.flows for lane in flow.lanes for r in _rows(plan, flow, lane, ranks, sizes)]
    moved = [r for r in rows if r.kind != "check"]
    none = np.zeros(0, dtype=np.int64)
    s, t, n = (np.concatenate([none, *(getattr(r, c) for r in moved)]) for c in ("source", "target", "amount"))
    counts = tuple(int(r.max(initial=0)) + 1 for r in ranks)
    return PlanPicture(
        plan.name,
        plan.source_call,
        plan.target_call,
        unit,
        (len(plan.source_shelves), len(plan.target_shelves)),
        (counts[0], counts[1]),
        tuple(_ways(plan, rows, unit)),
        tuple(_entries(plan, moved)),
        tuple(grids(s, t, n, (counts[0], counts[1]))),
        int(n.sum()),
        int(n[s == t].sum()),
        tuple(_notes(plan)),
    )


def _ranks(shelves: Shelves) -> I64:
    """Of each stored tensor, the first rank that holds it."""
    found = [np.repeat(s.block.rank, s.block.choices) for s in shelves.shelves]
    return np.concatenate([np.zeros(0, dtype=np.int64), *found])


def _sizes(shelves: Shelves) -> Reals:
    """The bytes of an element of each stored tensor; 0 if unknown."""
    out = [np.zeros(0)]
    for s in shelves.shelves:
        each = [size_of(d, 2) / 2 if d else 0.0 for d in s.dtypes]
        out.append(np.array(each) if len(each) > 1 else np.full(len(s), each[0] if each else 0.0))
    return np.concatenate(out)


def _rows(plan: Plan, flow: Flow, lane: Lane, ranks: tuple[I64, I64], sizes: Reals) -> Iterator[_Rows]:
    m = (
        flow.moves
    )  # a row that runs over several stored tensors runs over the choices of one coordinate, and so of one rank
    if not len(m):
        return
    here, there = plan.spaces[0].home(m.source) + lane.source, plan.spaces[1].home(m.target) + lane.target
    kind = "derive" if isinstance(flow.way, Derive) else flow.kind
    known = (sizes > 0).all()
    amount = (m.numel * sizes[there]).astype(np.int64) if known else m.numel
    yield _Rows(flow.place.label, kind, lane.state, m.tensor, ranks[0][here], ranks[1][there], m.numel, amount)


def _ways(plan: Plan, rows: list[_Rows], unit: str) -> Iterator[StateFlow]:
    found: dict[tuple[str, str], list[int]] = {}
    for r in rows:
        total = found.setdefault((r.state, r.kind), [0, 0, 0])
        for i, n in enumerate((len(r.elements), int(r.elements.sum()), int(r.amount.sum()))):
            total[i] += n
    size = {s.state: size_of(s.dtypes[0], 2) / 2 for s in plan.target_shelves.shelves if s.dtypes and s.dtypes[0]}
    for node in plan.nodes:
        if isinstance(node, Fill) and node.elements:
            kind = "fill, which the source lacks" if node.lacking else "fill of padding"
            total = found.setdefault((node.state, kind), [0, 0, 0])
            total[1] += node.elements
            total[2] += int(node.elements * (size.get(node.state, 1) if unit == "B" else 1))
    order = {s: n for n, s in enumerate(plan.states)}
    for (state, kind), (runs, elements, amount) in sorted(
        found.items(), key=lambda one: order.get(one[0][0], len(order))
    ):
        yield StateFlow(state, kind, runs, elements, amount)


def _entries(plan: Plan, rows: list[_Rows]) -> Iterator[EntryFlow]:
    found: dict[str, list[_Rows]] = {}
    for r in rows:
        found.setdefault(r.label, []).append(r)
    for label, parts in found.items():
        tensors = np.unique(np.concatenate([r.tensor for r in parts]))
        yield EntryFlow(
            label,
            tuple(plan.tensors[n] for n in tensors.tolist()),
            tuple(dict.fromkeys(r.state for r in parts)),
            tuple(dict.fromkeys(r.kind for r in parts)),
            sum(int(r.amount.sum()) for r in parts),
            sum(len(r.amount) for r in parts),
            len(np.unique(np.concatenate([r.source for r in parts]))),
            len(np.unique(np.concatenate([r.target for r in parts]))),
            sum(int(r.amount[r.source == r.target].sum()) for r in parts),
        )


def grids(source: I64, target: I64, amount: Amounts, ranks: tuple[int, int]) -> Iterator[FlowGrid]:
    """All ranks, in at most sixteen groups a side.

    Then the cell with the most, cut further, down to single ranks.
    """
    low, high = (0, 0), ranks
    for _ in range(GRIDS):
        here, there = _cuts(low[0], high[0]), _cuts(low[1], high[1])
        inside = (source >= low[0]) & (source < high[0]) & (target >= low[1]) & (target < high[1])
        i = np.searchsorted(here, source[inside], side="right") - 1
        j = np.searchsorted(there, target[inside], side="right") - 1
        total = np.zeros((len(here) - 1, len(there) - 1), dtype=np.int64)
        np.add.at(total, (i, j), amount[inside])
        runs = [tuple(zip(c.tolist(), c[1:].tolist(), strict=False)) for c in (here, there)]
        yield FlowGrid(runs[0], runs[1], total)
        a, b = (int(n) for n in np.unravel_index(int(total.argmax()), total.shape))
        low, high = (runs[0][a][0], runs[1][b][0]), (runs[0][a][1], runs[1][b][1])
        if high[0] - low[0] == 1 and high[1] - low[1] == 1:
            return


def _cuts(low: int, high: int) -> I64:
    """Ends of at most `GROUPS` runs of equal length.

    The length divides the total, if there is such a length near.
    """
    count = high - low
    least = -(-count // GROUPS)
    step = next((n for n in range(least, 2 * least) if count % n == 0), least)
    return np.array([*range(low, high, step), high], dtype=np.int64)


def _notes(plan: Plan) -> Iterator[str]:
    texts = [f"changed: {text}" for text in plan.changed]
    texts += [f"derived: {text}" for text in plan.derived]
    texts += [f"filled: {text}" for text in plan.filled]
    texts += [f"carried: {blob.said}" for blob in plan.target.blobs]
    texts += [f"dropped: {text}" for text in plan.dropped]
    yield from texts[:NOTES_MAX]
    if len(texts) > NOTES_MAX:
        yield f"and {len(texts) - NOTES_MAX:,} lines more, which ucpl show prints"


def ranks_text(run: tuple[int, int]) -> str:
    """`3`, or `0..512`, without the one behind the last."""
    return str(run[0]) if run[1] - run[0] == 1 else f"{run[0]}..{run[1]}"
