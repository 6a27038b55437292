"""From a position of a stored tensor to the element of the model that lies there, and back."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate

import numpy as np
from attrs import evolve, frozen

from ucpl.regions import Part, Placement
from ucpl.regions.boxes import subtract
from ucpl.regions.placement import POLICIES, element_name

__all__ = ["Spot", "counted", "element_at", "only", "pairs_of", "spots_of"]

Pair = tuple[str, str]  # (tensor, state)


@frozen
class Spot:
    """One place of an element: part and home of a placement, row-major position in the home."""

    part: int
    home: int
    position: int


def pairs_of(placement: Placement) -> set[Pair]:
    """Which states of which tensors a placement stores."""
    return {(placement.tensors[t], p.state) for p in placement.parts for t in p.tensors}


def only(placement: Placement, pairs: set[Pair], tensors: set[str] | None = None) -> Placement:
    """The placement with these pairs alone; homes and their order stay, so that numbers of homes keep their meaning."""
    parts = []
    for part in placement.parts:
        wanted = np.array([(path, part.state) in pairs for path in placement.tensors] or [False])
        keep = np.flatnonzero(wanted[part.folded.tensor])
        if len(keep):
            parts.append(evolve(part, folded=part.folded.take(keep)))
    known = {path for path, _ in pairs} if tensors is None else tensors
    layout = evolve(placement.layout, tensors={p: t for p, t in placement.layout.tensors.items() if p in known})
    return Placement(layout, placement.tensors, tuple(parts), placement.flats)


def counted(placement: Placement) -> Placement:
    """Without copies under `any`, where others hold the whole tensor: nothing is said of what they are."""
    loose = POLICIES.index("any")
    drop: dict[str, set[int]] = {}
    for state in {part.state for part in placement.parts if (part.folded.policy == loose).any()}:
        parts = [part.folded for part in placement.parts if part.state == state]
        for tensor in {int(t) for p in parts for t in p.tensor[p.policy == loose]}:
            firm = [p.take(np.flatnonzero((p.tensor == tensor) & (p.policy != loose))) for p in parts]
            low, high = (np.concatenate([getattr(p, side) for p in firm]) for side in ("low", "high"))
            counts = placement.layout.tensors[placement.tensors[tensor]].counts
            whole = np.ones(low.shape[1], dtype=np.int64)
            whole[: len(counts)] = counts
            if not subtract(np.zeros_like(whole), whole, low, high):
                drop.setdefault(state, set()).add(tensor)
    if not drop:
        return placement
    made = []
    for part in placement.parts:
        gone = np.isin(part.folded.tensor, sorted(drop.get(part.state, ()))) & (part.folded.policy == loose)
        made.append(evolve(part, folded=part.folded.take(~gone)) if gone.any() else part)
    return Placement(placement.layout, placement.tensors, tuple(made), placement.flats)


def element_at(placement: Placement, target: int, position: int) -> tuple[str, str]:
    """(state, element) that lies at a row-major position of a stored tensor. `target` counts homes over all parts.

    A position of padding is named by the stored tensor.
    """
    ends = list(accumulate(len(part.homes) for part in placement.parts))
    number = next(i for i, end in enumerate(ends) if target < end)
    part = placement.parts[number]
    home = target - (ends[number] - len(part.homes))
    found = _in_home(part, home, position)
    if found is None:
        return part.state, f"{part.label} (padding)"
    tensor, index = found
    path = placement.tensors[tensor]
    return part.state, element_name(placement.layout, path, index[: len(placement.layout.tensors[path].counts)])


def _in_home(part: Part, home: int, position: int) -> tuple[int, tuple[int, ...]] | None:
    pieces = part.pieces
    size = pieces.high - pieces.low
    last = pieces.offset + ((size - 1) * pieces.stride).sum(axis=1)
    rows = np.flatnonzero((pieces.home == home) & (pieces.offset <= position) & (position <= last))
    for row in rows.tolist():
        left = position - int(pieces.offset[row])
        index = pieces.low[row].tolist()
        for dim in np.argsort(-pieces.stride[row], kind="stable").tolist():
            step, count = int(pieces.stride[row, dim]), int(size[row, dim])
            if step > 0:
                steps = min(left // step, count - 1)
                index[dim] += steps
                left -= steps * step
        if left == 0:
            return int(pieces.tensor[row]), tuple(int(i) for i in index)
    return None


def spots_of(placement: Placement, path: str, index: tuple[int, ...]) -> Iterator[Spot]:
    """Every place of one element, of all states."""
    tensor = placement.tensors.index(path)
    for number, part in enumerate(placement.parts):
        pieces = part.pieces
        wide = np.zeros(pieces.low.shape[1], dtype=np.int64)
        wide[: len(index)] = index
        inside = (pieces.tensor == tensor) & (pieces.low <= wide).all(axis=1) & (wide < pieces.high).all(axis=1)
        for row in np.flatnonzero(inside).tolist():
            position = int(pieces.offset[row] + ((wide - pieces.low[row]) * pieces.stride[row]).sum())
            yield Spot(number, int(pieces.home[row]), position)
