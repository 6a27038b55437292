"""Boxes of a tensor as cells of one grid.

A weight and its moments can be cut at different places, or without a grid. Each cell is a view of a part of its chunk;
no data is moved. The language can then describe the tensor.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise, product
from math import prod
from pathlib import Path

from attrs import evolve

from ucpl.errors import Label, fail
from ucpl.extents import Extent, Key

__all__ = ["CELLS_MAX", "boxes_of_run", "boxes_of_runs", "edges_of", "in_cells", "is_grid", "on_one_grid", "placed"]

CELLS_MAX = 1 << 16  # of one tensor
Shape = tuple[int, ...]
Box = tuple[Shape, Shape]  # where it begins, and its shape
Edges = tuple[tuple[int, ...], ...]  # of each dim: where cells begin, and its end


def edges_of(shape: Shape, boxes: Iterable[Box]) -> Edges:
    """Begins and ends of all boxes, along each dim."""
    out: list[set[int]] = [{0, n} for n in shape]
    for begin, size in boxes:
        for d, (low, n) in enumerate(zip(begin, size, strict=True)):
            out[d] |= {low, low + n}
    return tuple(tuple(sorted(found)) for found in out)


def is_grid(edges: Edges, boxes: Sequence[Box]) -> bool:
    """Test whether the boxes fill the grid of their edges."""
    return len(boxes) == prod(len(found) - 1 for found in edges)


def in_cells(found: Mapping[Key, Extent], edges: Edges) -> dict[Key, Extent]:
    """Chunks as cells, by key: name and begin.

    edges: those of the chunks among them.
    """
    out: dict[Key, Extent] = {}
    for key, extent in found.items():
        dims = len(extent.shape)
        name, begin = key[: len(key) - dims], tuple(int(step) for step in key[len(key) - dims :])
        runs = [list(_parts(edge, low, n)) for edge, low, n in zip(edges, begin, extent.shape, strict=True)]
        for cell in product(*runs):
            at = tuple(low for low, _ in cell)
            skipped = sum((a - b) * step for a, b, step in zip(at, begin, extent.stride, strict=True))
            out[(*name, *at)] = evolve(
                extent, key=(*name, *at), shape=tuple(n for _, n in cell), offset=extent.offset + skipped
            )
    return out


def on_one_grid(
    path: Path, name: str, shape: Shape, each: Sequence[Mapping[Key, Extent]]
) -> list[Mapping[Key, Extent]]:
    """Chunks of a tensor and its states as cells of one grid.

    Each mapping is by key. Raises: UcplError E523.
    """
    boxes = [
        [(tuple(int(step) for step in key[len(key) - len(shape) :]), one.shape) for key, one in some.items()]
        for some in each
    ]
    edges = edges_of(shape, (box for some in boxes for box in some))
    if all(is_grid(edges, some) for some in boxes):
        return list(each)
    cells = prod(len(edge) - 1 for edge in edges) * len(each)
    if cells > CELLS_MAX:
        fail(
            "E523",
            f"`{name}` and its states are cut at so many places that they fall into {cells} cells",
            Label(str(path), where=name),
        )
    return [in_cells(some, edges) for some in each]


def _parts(edge: tuple[int, ...], low: int, n: int) -> Iterator[tuple[int, int]]:
    first, last = bisect_left(edge, low), bisect_left(edge, low + n)
    return ((a, b - a) for a, b in pairwise(edge[first : last + 1]))


def boxes_of_run(shape: Shape, low: int, high: int) -> Iterator[tuple[Shape, Shape, int]]:
    """Elements low to high of a box, row by row, as boxes.

    Each is (begin, shape, element of the box at which it begins). There are at most 2k - 1 boxes if the box has k dims.
    """
    if low >= high:
        return
    if not shape:
        yield (), (), 0
        return
    inner = prod(shape[1:])
    while low < high:
        row, rest = divmod(low, inner)
        rows = (high - low) // inner
        if rest or not rows:  # the rest of a row, or the begin of one
            end = min(high, (row + 1) * inner)
            for begin, size, at in boxes_of_run(shape[1:], rest, end - row * inner):
                yield (row, *begin), (1, *size), row * inner + at
            low = end
        else:
            yield (row, *(0 for _ in shape[1:])), (rows, *shape[1:]), low
            low += rows * inner


def boxes_of_runs(found: Mapping[Key, Extent], name: str, grid: Shape, whole: Shape) -> dict[Key, Extent]:
    """Runs of flattened parts as boxes, by name and begin.

    A grid of ranks cuts the tensor into parts, and each part is flattened.
    found: by name, the rank's place on the grid, and the begin of the run in its part. `whole`: the shape of the tensor.
    """
    part = tuple(n // ways for n, ways in zip(whole, grid, strict=True))
    out: dict[Key, Extent] = {}
    for key, extent in found.items():
        *place, low = (int(step) for step in key[len(key) - len(grid) - 1 :])
        begin = tuple(at * n for at, n in zip(place, part, strict=True))
        out |= placed(extent, name, begin, part, low)
    return out


def placed(run: Extent, name: str, begin: Shape, part: Shape, low: int) -> dict[Key, Extent]:
    """Boxes of a run that begins at element `low` of a box.

    begin: of the box in the tensor.
    """
    strides = tuple(prod(part[d + 1 :]) for d in range(len(part)))
    out: dict[Key, Extent] = {}
    for at, size, first in boxes_of_run(part, low, low + run.numel):
        key: Key = (name, *(a + b for a, b in zip(begin, at, strict=True)))
        out[key] = evolve(run, key=key, shape=size, stride=strides, offset=run.offset + first - low)
    return out
