"""The values of a layout's picture: cells, and ranks' totals."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
from attrs import field

from ucpl.layout import axes as ax
from ucpl.layout.by_index import whole_dim
from ucpl.pictures.cells import Fine, HeldBoxes, Level, fine, levels, overlapping
from ucpl.pictures.holders import Holders
from ucpl.records import frozen
from ucpl.tables import I64

if TYPE_CHECKING:
    from ucpl.layout import Layout, LogicalTensor
    from ucpl.placement import Part, Placement

__all__ = ["CellFamily", "LayoutPicture", "RankRow", "TensorPicture", "layout_picture"]

EACH_RANK = 16  # ranks that have a row each
RANK_ROWS = 24

_NUMBER = re.compile(r"[0-9]+")


@frozen(eq=False)
class CellFamily:
    """States of a tensor with the same placement."""

    states: tuple[str, ...]
    note: str  # the text next to the picture
    levels: tuple[Level, ...]
    held: int  # elements of the tensor that are in the picture, each once
    padding: int  # of the stored tensors that hold it


@frozen(eq=False)
class TensorPicture:
    """A tensor, or several with similar names and equal cuts.

    The first is drawn.
    """

    path: str
    names: tuple[str, ...]
    dims: str
    kind: str
    dtype: str
    numel: int  # of one
    families: tuple[CellFamily, ...]


@frozen(eq=False)
class RankRow:
    """Ranks that store as much of each state."""

    ranks: I64 = field(repr=False)
    said: str
    elements: tuple[int, ...]  # of each state; of ranks that differ, the most
    padding: int
    least: int  # elements of all states; of ranks that differ, the least


@frozen(eq=False)
class LayoutPicture:
    call: str
    model: str
    mesh: str
    ranks: int
    rank: int | None  # the only one that is shown
    states: tuple[str, ...]
    remarks: tuple[str, ...]
    tensors: tuple[TensorPicture, ...]
    rows: tuple[RankRow, ...]
    numel: int  # of the model


def layout_picture(placement: Placement, rank: int | None = None) -> LayoutPicture:
    """The picture of a located layout. rank: only this one is placed."""
    layout = placement.layout
    holders = Holders(placement)
    states = tuple(dict.fromkeys(p.state for p in placement.parts))
    of_tensor = _held(placement)
    drawn: list[TensorPicture] = []
    for number, path in enumerate(placement.tensors):
        drawn.append(_tensor(layout, path, of_tensor.get(number, {}), holders, rank))
    return LayoutPicture(
        layout.call,
        layout.model_call,
        " · ".join(_mesh_text(layout)) or "one rank",
        holders.count,
        rank,
        states,
        tuple(_remarks(layout)),
        tuple(_alike(drawn)),
        tuple(_rank_rows(placement, states, holders, rank)),
        sum(t.numel for t in layout.tensors.values()),
    )


def _mesh_text(layout: Layout) -> Iterator[str]:
    for mesh in layout.meshes:
        name = f"{mesh.name}: " if mesh.name else ""
        yield name + " × ".join(f"{a} {n}" for a, n in zip(mesh.axes, mesh.degrees, strict=True))


def _remarks(layout: Layout) -> Iterator[str]:
    for d in layout.derived:
        yield f"{d.state} is not stored: it is made of {d.source}"
    scalars = [s.name for s in layout.states if s.scalar]
    if scalars:
        yield f"{', '.join(scalars)}: one number a parameter, not drawn"
    for alias, owner in layout.aliases.items():
        yield f"{alias} is a second name of {owner}"


# ---- tensors ---------------------------------------------------------------------------------------------------------


def _held(placement: Placement) -> dict[int, dict[str, list[HeldBoxes]]]:
    """tensor -> state -> its boxes.

    Second names are left out: they are names.
    """
    out: dict[int, dict[str, list[HeldBoxes]]] = {}
    for part in placement.parts:
        if part.is_alias:
            continue
        table = part.folded
        first = part.homes.rank(table.home) if len(table) else table.home
        order = np.argsort(table.tensor, kind="stable")
        cuts = np.flatnonzero(np.diff(table.tensor[order])) + 1
        for rows in np.split(order, cuts) if len(order) else ():
            tensor = int(table.tensor[rows[0]])
            out.setdefault(tensor, {}).setdefault(part.state, []).append(HeldBoxes(part, rows, first[rows]))
    return out


def _tensor(
    layout: Layout, path: str, held: dict[str, list[HeldBoxes]], holders: Holders, rank: int | None
) -> TensorPicture:
    tensor = layout.tensors[path]
    alike: dict[object, tuple[list[str], list[HeldBoxes]]] = {}
    for state, parts in held.items():
        mark = tuple((h.part.axes, _mark(h)) for h in parts)
        alike.setdefault(mark, ([], parts))[0].append(state)
    families: list[CellFamily] = []
    for states, parts in alike.values() if tensor.numel else ():
        families += _families(tuple(states), parts, tensor, holders, rank)
    dims = " × ".join(
        f"{n:,}" if "#" in d else f"{whole_dim(d)} {n:,}" for d, n in zip(tensor.dims, tensor.counts, strict=True)
    )
    return TensorPicture(path, (path,), dims, tensor.kind, tensor.dtype or "", tensor.numel, tuple(families))


def _mark(held: HeldBoxes) -> bytes:
    table, rows = held.part.folded, held.rows
    return b"".join(c.tobytes() for c in (table.low[rows], table.high[rows], held.first))


def _families(
    states: tuple[str, ...], parts: list[HeldBoxes], tensor: LogicalTensor, holders: Holders, rank: int | None
) -> Iterator[CellFamily]:
    """One picture.

    If parts hold the same elements in different cuts, one of each.
    """
    width = len(tensor.counts)
    cells, axes = fine(parts, width, holders)
    if overlapping(cells, tensor.numel) and len(parts) > 1:
        for one in parts:
            yield from _families(states, [one], tensor, holders, rank)
        return
    if rank is not None:  # this rank's part, including copies of other ranks
        for f in cells:
            f.ranks = [np.array([rank], dtype=np.int64)]
    made = tuple(levels(cells, axes, tensor.path, _panels(holders.layout, tensor), holders))
    held = sum(c.elements for c in made[0].cells)
    padding = sum(_padding(h.part) for h in parts)
    yield CellFamily(states, _note(held, tensor.numel, cells, rank), made, held, padding)


def _note(held: int, numel: int, cells: list[Fine], rank: int | None) -> str:
    copies = {sum(map(len, f.ranks)) for f in cells}
    if held > numel:
        return "some elements are held more than once, cut in other ways: cells overlap"
    if held < numel and rank is None:
        return f"{numel - held:,} elements are not stored"
    return (
        ""
        if copies == {1} or rank is not None
        else f"each element on {min(copies):,}" + (f" to {max(copies):,} ranks" if len(copies) > 1 else " ranks")
    )


def _padding(part: Part) -> int:
    return part.homes.padding


def _panels(layout: Layout, tensor: LogicalTensor) -> tuple[int, ...]:
    """Dims that number tensors: those in brackets."""
    names = {
        d for e in layout.entries if tensor.path in e.targets.values() for index in e.indices for d in ax.dims_of(index)
    }
    found = tuple(n for n, d in enumerate(tensor.dims) if d in names)
    return found or tuple(range(max(0, sum(n > 1 for n in tensor.counts) - 2)) if not names else ())


def _alike(drawn: list[TensorPicture]) -> Iterator[TensorPicture]:
    """Join tensors that differ in the numbers of their names alone.

    They are drawn as one.
    """
    found: dict[object, list[TensorPicture]] = {}
    for t in drawn:
        shown = tuple(
            (f.states, f.padding, tuple((c.places, c.ranks.tobytes()) for c in f.levels[0].cells)) for f in t.families
        )
        found.setdefault((_NUMBER.sub("0", t.path), t.dims, t.kind, t.dtype, shown), []).append(t)
    for same in found.values():
        t = same[0]
        yield TensorPicture(t.path, tuple(s.path for s in same), t.dims, t.kind, t.dtype, t.numel, t.families)


# ---- ranks -----------------------------------------------------------------------------------------------------------


def _rank_rows(placement: Placement, states: tuple[str, ...], holders: Holders, rank: int | None) -> Iterator[RankRow]:
    """The elements that each rank stores, or shares in files."""
    elements = np.zeros((holders.count, len(states)), dtype=np.int64)
    padding = np.zeros(holders.count, dtype=np.int64)
    for part in placement.parts:
        if part.is_alias:
            continue
        mine, empty = np.zeros(holders.count, dtype=np.int64), np.zeros(holders.count, dtype=np.int64)
        for block in part.homes.blocks:
            np.add.at(mine, block.rank, block.shape.prod(axis=1) * block.choices)
            np.add.at(empty, block.rank, block.padding * block.choices)
        of = holders.groups(part)[0] if rank is None else np.arange(holders.count)
        elements[:, states.index(part.state)] += mine[of] - empty[of]
        padding += empty[of]
    if rank is not None:
        shown = [np.array([rank])]
    elif holders.count <= EACH_RANK:
        shown = [np.array([r]) for r in range(holders.count)]
    else:
        _, of = np.unique(np.concatenate([elements, padding[:, None]], axis=1), axis=0, return_inverse=True)
        of = of.reshape(-1)
        shown = [np.flatnonzero(of == n) for n in range(int(of.max()) + 1)] if of.max() < RANK_ROWS else []
        shown = sorted(shown, key=lambda ranks: int(ranks[0])) or np.array_split(np.arange(holders.count), RANK_ROWS)
    for ranks in shown:
        total = elements[ranks].sum(axis=1)
        most = ranks[int(total.argmax())]
        said, told = holders.named(ranks), holders.text(ranks)
        said += f" ({told})" if told and told not in said else ""
        yield RankRow(ranks, said, tuple(elements[most].tolist()), int(padding[ranks].max()), int(total.min()))
