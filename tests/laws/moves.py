"""How the moves of a graph and of a plan are read, and how mistakes are planted: the one place that knows their columns.

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
from ucpl.schedule import Plan

Place = tuple[str, str]  # (file, key)
Cell = tuple[str, str, tuple[int, ...]]  # (state, tensor, index in positions of the tensor)
Cells = dict[Place, list[Cell | None]]  # None: padding

SIDES = ("source", "target")


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


def second_names(plan: Plan) -> dict[Place, Place]:
    """Stored tensors of a target that are a second name of another's storage, and that other one."""
    names = [(t.file, key_text(t.key)) for t in plan.targets]
    return {names[i]: names[t.shares] for i, t in enumerate(plan.targets) if t.shares is not None}


def fills_of(graph: Graph) -> Iterator[tuple[tuple[int, int], list[Fill]]]:
    """The same of a graph, move by move: (batch, row) and what it moves. Positions may lie outside of a tensor."""
    sources = [(s.file, key_text(s.key)) for s in graph.sources]
    targets = [(t.file, key_text(t.key)) for t in graph.targets]
    for b, batch in enumerate(graph.batches):
        f = batch.fragments
        for row in range(len(f)):
            ends = zip(
                _positions(f.source_offset[row], f.shape[row], f.source_stride[row]),
                _positions(f.target_offset[row], f.shape[row], f.target_stride[row]),
                strict=True,
            )
            place, goal = sources[int(f.source[row])], targets[int(f.target[row])]
            yield (b, row), [Fill(batch.kind, batch.state, (place, int(x)), (goal, int(y))) for x, y in ends]


def _positions(offset: Any, shape: NDArray[np.int64], stride: NDArray[np.int64]) -> NDArray[np.int64]:
    out = np.array(offset, dtype=np.int64)
    for n, step in zip(shape.tolist(), stride.tolist(), strict=True):
        out = out[..., None] + np.arange(n) * step
    return out.ravel()


# ---- what the oracle says ----------------------------------------------------------------------------------------------


def cells(meaning: Meaning) -> Cells:
    """Every position of every stored tensor, as the oracle has it."""
    return {(h.file, h.key): _cells(h) for h in homes(meaning)}


def _cells(home: Home) -> list[Cell | None]:
    return [None if isinstance(c, Padding) else (home.state, c[0], tuple(c[1])) for c in home.cells]


# ---- planted mistakes --------------------------------------------------------------------------------------------------
# Each takes the place of a move, (batch, row), and changes the graph.

Where = tuple[int, int]


def _change(graph: Graph, batch: int, **columns: Any) -> None:
    b = graph.batches[batch]
    graph.batches[batch] = evolve(b, fragments=evolve(b.fragments, **columns))


def shift(graph: Graph, where: Where, side: int, by: int) -> None:
    """One end of a move begins elsewhere."""
    name = f"{SIDES[side]}_offset"
    column = getattr(graph.batches[where[0]].fragments, name).copy()
    column[where[1]] += by
    _change(graph, where[0], **{name: column})


def swap(graph: Graph, one: Where, other: Where, side: int) -> None:
    """Two moves of one batch exchange one end, with its strides."""
    f = graph.batches[one[0]].fragments
    names = (SIDES[side], f"{SIDES[side]}_offset", f"{SIDES[side]}_stride")
    columns = {name: getattr(f, name).copy() for name in names}
    for column in columns.values():
        column[[one[1], other[1]]] = column[[other[1], one[1]]]
    _change(graph, one[0], **columns)


def turn(graph: Graph, where: Where, side: int) -> None:
    """Two strides of one end of a move exchanged."""
    name = f"{SIDES[side]}_stride"
    column = getattr(graph.batches[where[0]].fragments, name).copy()
    column[where[1]][:2] = column[where[1]][1::-1]
    _change(graph, where[0], **{name: column})


def drop(graph: Graph, where: Where) -> None:
    """A move is left out."""
    _rows(graph, where[0], [r for r in range(len(graph.batches[where[0]].fragments)) if r != where[1]])


def instead(graph: Graph, lost: Where, twice: Where) -> None:
    """A move is left out and another one of its batch is done twice: with equal sizes, every count stays."""
    rows = list(range(len(graph.batches[lost[0]].fragments)))
    rows[lost[1]] = twice[1]
    _rows(graph, lost[0], rows)


def rename(graph: Graph, batch: int, *, kind: str | None = None, state: str | None = None) -> None:
    """A whole batch under another kind or state."""
    b = graph.batches[batch]
    graph.batches[batch] = evolve(b, kind=kind or b.kind, state=state or b.state)


def cut_short(graph: Graph, where: Where) -> None:
    """A run loses its last element."""
    shape = graph.batches[where[0]].fragments.shape.copy()
    shape[where[1], 0] -= 1
    _change(graph, where[0], shape=shape)


def _rows(graph: Graph, batch: int, rows: list[int]) -> None:
    b = graph.batches[batch]
    graph.batches[batch] = evolve(b, fragments=b.fragments.take(np.array(rows, dtype=np.int64)))


def rows_alike(graph: Graph) -> list[tuple[Where, Where]]:
    """Pairs of moves of one batch and one shape: what can be exchanged while every count stays."""
    out = []
    for b, batch in enumerate(graph.batches):
        shapes: dict[tuple[int, ...], int] = {}
        for row, shape in enumerate(map(tuple, batch.fragments.shape.tolist())):
            if shape in shapes:
                out.append(((b, shapes[shape]), (b, row)))
            shapes[shape] = row
    return out


def moves(graph: Graph) -> list[Where]:
    return [(b, row) for b, batch in enumerate(graph.batches) for row in range(len(batch.fragments))]


def kind_of(graph: Graph, where: Where) -> str:
    return graph.batches[where[0]].kind


def shape_of(graph: Graph, where: Where) -> list[int]:
    found: list[int] = graph.batches[where[0]].fragments.shape[where[1]].tolist()
    return found
