"""Read the moves of graphs and plans, and plant mistakes in them.

This is the one place that knows their columns.

Laws speak of `Fill`s: one element's way from a position of one stored tensor to a position of another. When the form of a plan
or of a graph changes, this file changes and no law does.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from attrs import evolve, frozen
from numpy.typing import NDArray

from tests.oracle import Home, Meaning, Padding, homes
from ucpl.extents import key_text
from ucpl.graph import Graph
from ucpl.planning import Plan, Runs, order
from ucpl.planning.plan import Kind
from ucpl.planning.runs import sole
from ucpl.tables.operations import Fill as Filling

Place = tuple[str, str]  # (file, key)
Cell = tuple[str, str, tuple[int, ...]]  # (state, tensor, index in positions of the tensor)
Cells = dict[Place, list[Cell | None]]  # None: padding

SIDES = ("source", "target")
NOWHERE: Place = ("", "")


@frozen
class Fill:
    """One element that moves: `kind` is copy, check, mean or sum."""

    kind: str
    state: str
    source: tuple[Place, int]
    target: tuple[Place, int]


def fills(plan: Plan) -> list[Fill]:
    """Every element that a plan moves, one by one."""
    sources = [(s.file, key_text(s.key)) for s in plan.sources]
    targets = [(t.file, key_text(t.key)) for t in plan.targets]
    out = []
    for m in plan.moves:
        for row in range(len(m)):
            ends = zip(
                _positions(m.source_offset[row], m.shape[row], m.source_stride[row]),
                _positions(m.target_offset[row], m.shape[row], m.target_stride[row]),
                strict=True,
            )
            place, goal = sources[int(m.source[row])], targets[int(m.target[row])]
            out += [Fill(m.kind, m.state, (place, int(a)), (goal, int(b))) for a, b in ends]
    return out


def filled(plan: Plan) -> dict[tuple[str, str, int], list[float]]:
    """(file, key, position) -> the numbers of elements that the source lacks."""
    targets = [(t.file, key_text(t.key)) for t in plan.targets]
    space = plan.spaces[1]
    out: dict[tuple[str, str, int], list[float]] = {}
    for node in plan.nodes:
        if isinstance(node, Filling) and node.lacking:
            for row in range(len(node.boxes)):
                for at in _positions(node.boxes.offset[row], node.boxes.shape[row], node.boxes.stride[row]):
                    place = targets[int(space.home(at))]
                    out.setdefault((*place, int(space.position(at))), []).append(node.value)
    return out


def second_names(plan: Plan) -> dict[Place, Place]:
    """Stored tensors that are a second name of another, and that other."""
    names = [(t.file, key_text(t.key)) for t in plan.targets]
    return {names[i]: names[t.shares] for i, t in enumerate(plan.targets) if t.shares is not None}


def fills_of(graph: Graph) -> Iterator[tuple[tuple[int, int], list[Fill]]]:
    """The same of a graph, move by move.

    (batch, row) and its elements. Positions may be outside of a tensor.
    """
    sources = [(s.file, key_text(s.key)) for s in graph.sources]
    targets = [(t.file, key_text(t.key)) for t in graph.targets]
    for b, f in enumerate(told(graph)):
        for row in range(len(f)):
            ends = zip(
                _positions(f.source_offset[row], f.shape[row], f.source_stride[row]),
                _positions(f.target_offset[row], f.shape[row], f.target_stride[row]),
                strict=True,
            )
            place, goal = _place(sources, int(f.source[row])), _place(targets, int(f.target[row]))
            yield (b, row), [Fill(f.kind, f.state, (place, int(x)), (goal, int(y))) for x, y in ends]


def _place(names: list[Place], number: int) -> Place:
    """A mistaken move may go past the last stored tensor."""
    return names[number] if 0 <= number < len(names) else NOWHERE


_told: list[tuple[Graph, tuple[Runs, ...]]] = []  # of the graph that was asked for last, which is asked for again


def told(graph: Graph) -> list[Runs]:
    """The graph's moves, tensor by tensor."""
    if not _told or _told[0][0] is not graph:
        _told[:] = [(graph, order(graph).moves)]
    return list(_told[0][1])


def _plant(graph: Graph, runs: list[Runs]) -> None:
    """Give the graph other moves, tensor by tensor."""
    _told.clear()  # a graph is changed in its place here, and nowhere else
    other = sole(runs, graph.sources, graph.targets, graph.spaces)
    graph.net.clear()
    graph.net.add_nodes_from(other)
    graph.net.add_edges_from(other.edges)


def _positions(offset: Any, shape: NDArray[np.int64], stride: NDArray[np.int64]) -> NDArray[np.int64]:
    out = np.array(offset, dtype=np.int64)
    for n, step in zip(shape.tolist(), stride.tolist(), strict=True):
        out = out[..., None] + np.arange(n) * step
    return out.ravel()


# ---- the oracle's answers ----------------------------------------------------------------------------------------------


def cells(meaning: Meaning) -> Cells:
    """Every position of every stored tensor, as the oracle has it."""
    return {(h.file, h.key): [_cell(h, c) for c in h.cells] for h in homes(meaning)}


def parts(meaning: Meaning) -> dict[Cell, list[tuple[Place, int]]]:
    """The positions with a part or a copy of each combined element.

    Elements of a mean, a sum or a maximum are combined.
    """
    out: dict[Cell, set[tuple[Place, int]]] = {}
    for home in homes(meaning):
        for i, held in enumerate(home.cells):
            cell = _cell(home, held)
            if cell is not None and home.policy[cell[1]].split()[0] in ("mean", "sum", "max"):
                out.setdefault(cell, set()).add(((home.file, home.key), i))
    return {cell: sorted(ends) for cell, ends in out.items()}


def _cell(home: Home, cell: Any) -> Cell | None:
    """A live row is an element whose index is behind the dim."""
    held = cell.of if isinstance(cell, Padding) else cell
    return None if held is None else (home.state, held[0], tuple(held[1]))


def without_lone_rows(sides: tuple[Cells, Cells], counts: dict[str, tuple[int, ...]]) -> tuple[Cells, Cells]:
    """Live rows of both sides are carried, in every state.

    The others are padding.
    """

    def is_live(cell: Cell) -> bool:
        return any(i >= n for i, n in zip(cell[2], counts[cell[1]], strict=True))

    held = [{c for cells in side.values() for c in cells if c is not None} for side in sides]
    states = [{(c[0], c[1]) for c in of} for of in held]

    def is_kept(cell: Cell) -> bool:
        mine = [[state for state, path in known if path == cell[1]] for known in states]
        return all(of and all((s, *cell[1:]) in cells for s in of) for of, cells in zip(mine, held, strict=True))

    kept = {c for of in held for c in of if is_live(c) and is_kept(c)}
    first, second = (
        {p: [None if c is not None and is_live(c) and c not in kept else c for c in cells] for p, cells in side.items()}
        for side in sides
    )
    return first, second


# ---- planted mistakes --------------------------------------------------------------------------------------------------
# Each takes the place of a move, (which of the runs that the graph has, row), and changes the graph.

Where = tuple[int, int]


def _change(graph: Graph, batch: int, **columns: Any) -> None:
    runs = told(graph)
    runs[batch] = runs[batch].replace(**columns)
    _plant(graph, runs)


def shift(graph: Graph, where: Where, side: int, by: int) -> None:
    """One end of a move begins elsewhere."""
    name = f"{SIDES[side]}_offset"
    column = getattr(told(graph)[where[0]], name).copy()
    column[where[1]] += by
    _change(graph, where[0], **{name: column})


def swap(graph: Graph, one: Where, other: Where, side: int) -> None:
    """Two moves of one kind and state exchange ends, with strides."""
    f = told(graph)[one[0]]
    names = (SIDES[side], f"{SIDES[side]}_offset", f"{SIDES[side]}_stride")
    columns = {name: getattr(f, name).copy() for name in names}
    for column in columns.values():
        column[[one[1], other[1]]] = column[[other[1], one[1]]]
    _change(graph, one[0], **columns)


def turn(graph: Graph, where: Where, side: int) -> None:
    """Two strides of one end of a move exchanged."""
    name = f"{SIDES[side]}_stride"
    column = getattr(told(graph)[where[0]], name).copy()
    column[where[1]][:2] = column[where[1]][1::-1]
    _change(graph, where[0], **{name: column})


def drop(graph: Graph, where: Where) -> None:
    """A move is left out."""
    _rows(graph, where[0], [r for r in range(len(told(graph)[where[0]])) if r != where[1]])


def instead(graph: Graph, lost: Where, twice: Where) -> None:
    """Leave out a move and do another one twice.

    With equal sizes, every count stays.
    """
    rows = list(range(len(told(graph)[lost[0]])))
    rows[lost[1]] = twice[1]
    _rows(graph, lost[0], rows)


def rename(graph: Graph, batch: int, *, kind: Kind | None = None, state: str | None = None) -> None:
    """All moves of one kind and state under another kind or state."""
    runs = told(graph)
    runs[batch] = evolve(runs[batch], kind=kind or runs[batch].kind, state=state or runs[batch].state)
    _plant(graph, runs)


def cut_short(graph: Graph, where: Where) -> None:
    """A run loses its last element."""
    shape = told(graph)[where[0]].shape.copy()
    shape[where[1], 0] -= 1
    _change(graph, where[0], shape=shape)


def _rows(graph: Graph, batch: int, rows: list[int]) -> None:
    runs = told(graph)
    runs[batch] = runs[batch].take(np.array(rows, dtype=np.int64))
    _plant(graph, runs)


def rows_alike(graph: Graph) -> list[tuple[Where, Where]]:
    """Pairs of moves of one kind, state and shape.

    Pairs that can be exchanged while every count stays.
    """
    out = []
    for b, runs in enumerate(told(graph)):
        shapes: dict[tuple[int, ...], int] = {}
        for row, shape in enumerate(map(tuple, runs.shape.tolist())):
            if shape in shapes:
                out.append(((b, shapes[shape]), (b, row)))
            shapes[shape] = row
    return out


def moves(graph: Graph) -> list[Where]:
    return [(b, row) for b, runs in enumerate(told(graph)) for row in range(len(runs))]


def shapes_of(graph: Graph) -> dict[Where, list[int]]:
    """Of each move."""
    return {(b, row): shape for b, runs in enumerate(told(graph)) for row, shape in enumerate(runs.shape.tolist())}
