"""Tensors, states and elements of a model that are not stored."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from ucpl.layout import Layout
from ucpl.layout.by_index import whole_name
from ucpl.placement import Pieces, Placement, element_name
from ucpl.placement.boxes import subtract
from ucpl.records import frozen
from ucpl.tables import distinct, each

__all__ = [
    "MissingElements",
    "holes",
    "states_of_some",
    "stored_states",
    "tensors_without_entry",
    "tensors_without_key",
    "unkept_states",
]

BOXES_MAX = 4_096  # of one tensor: more of them are counted, and not looked at one by one


@frozen
class MissingElements:
    """The number and the first of a tensor's missing elements."""

    state: str
    path: str
    missing: int
    of: int
    first: str

    def __str__(self) -> str:
        what = "1 element" if self.missing == 1 else f"{self.missing:,} of {self.of:,} elements"
        return f"{what} of {self.state} of `{self.path}` {'is' if self.missing == 1 else 'are'} stored nowhere"


def tensors_without_entry(layout: Layout, on_purpose: frozenset[str]) -> tuple[str, ...]:
    """Tensors without an entry, in the model's order.

    `on_purpose`: those with `none` in the text.
    """
    named = {path for entry in layout.entries for path in entry.targets.values()}
    return tuple(
        p for p in layout.tensors if p not in named and p not in on_purpose and whole_name(p) not in on_purpose
    )


def tensors_without_key(placement: Placement) -> tuple[str, ...]:
    """Tensors whose weight is not stored, flat, or derived."""
    layout = placement.layout
    if any(d.state == "weight" for d in layout.derived):
        return ()
    keys: dict[str, bool] = {}
    for entry in layout.entries:
        for path in entry.targets.values():
            keys[path] = keys.get(path, False) or entry.storing.key is not None
    held = {placement.tensors[n] for p in placement.parts if p.state == "weight" for n in each(p.folded.tensor)}
    return tuple(path for path in layout.tensors if keys.get(path) is False and path not in held)


def unkept_states(placement: Placement) -> tuple[str, ...]:
    """States of the model that are not stored, derived, or `none`."""
    layout = placement.layout
    known = {p.state for p in placement.parts} | {d.state for d in layout.derived} | layout.not_kept
    if "*" in known:
        return ()
    return tuple(s.name for s in layout.states if not s.scalar and s.name not in known)


def states_of_some(placement: Placement) -> Iterator[tuple[list[str], tuple[str, ...]]]:
    """States that lines store, with the trained tensors that lack them.

    In the model's order.
    """
    found: dict[tuple[str, ...], list[str]] = {}
    layout = placement.layout
    derived = {d.state for d in layout.derived}
    spoken = {path for entry in layout.entries for path in entry.targets.values()}
    groups = dict(layout.model_groups)
    for state in (s for s in layout.states if not s.scalar and s.name not in derived):
        parts = [p for p in placement.parts if p.state == state.name]
        held = {placement.tensors[n] for p in parts for n in each(p.folded.tensor)}
        of = spoken if state.groups is None else {m for g in state.groups for m in groups.get(g, ())} & spoken
        left = tuple(
            p
            for p, t in layout.tensors.items()
            if t.kind == "parameter" and t.numel and p in of and p not in held
            if not state.is_reduced or t.of(state.name) is not t
        )
        if held and left:
            found.setdefault(left, []).append(state.name)
    yield from ((states, left) for left, states in found.items())


def stored_states(names: Iterable[str], target: Placement) -> list[str]:
    """Those of the names that are states, and that a target stores."""
    some = {*names} - target.layout.tensors.keys()
    kept = {p.state for p in target.parts if p.state in some and len(p.folded)}
    return [name for name in dict.fromkeys(names) if name in kept]


def holes(placement: Placement) -> Iterator[MissingElements]:
    """Tensors that are stored in part, by state. Copies count once."""
    for state in dict.fromkeys(p.state for p in placement.parts):
        boxes = Pieces.concat([p.folded for p in placement.parts if p.state == state])
        boxes = boxes.take((boxes.volume > 0).nonzero()[0])
        boxes = boxes.take(distinct([boxes.tensor, *boxes.low.T, *boxes.high.T]))
        held = np.bincount(boxes.tensor, weights=boxes.volume, minlength=len(placement.tensors))
        for number in each(boxes.tensor):
            path = placement.tensors[number]
            if held[number] != placement.layout.tensors[path].of(state).numel:
                yield from _hole(placement, state, path, boxes.take(boxes.tensor == number))
    yield from _nowhere(placement)


def _nowhere(placement: Placement) -> Iterator[MissingElements]:
    """Tensors with a key that no rank stores."""
    layout = placement.layout
    if any(d.state == "weight" for d in layout.derived):
        return
    held = {placement.tensors[n] for p in placement.parts for n in each(p.folded.tensor[p.folded.volume > 0])}
    for entry in layout.entries:
        for path in entry.targets.values() if entry.storing.key is not None else ():
            tensor = layout.tensors[path]
            if path not in held and tensor.numel:
                first = element_name(layout, path, (0,) * len(tensor.counts))
                yield MissingElements("weight", path, tensor.numel, tensor.numel, first)


def _hole(placement: Placement, state: str, path: str, boxes: Pieces) -> Iterator[MissingElements]:
    tensor = placement.layout.tensors[path].of(state)
    if len(boxes) > BOXES_MAX:
        return
    high = np.ones(boxes.low.shape[1], dtype=np.int64)
    high[: len(tensor.counts)] = tensor.counts
    left = subtract(np.zeros_like(high), high, boxes.low, boxes.high)
    if left:
        missing = int(sum((b - a).prod() for a, b in left))
        first = min(tuple(low[: len(tensor.counts)].tolist()) for low, _ in left)
        yield MissingElements(state, path, missing, tensor.numel, element_name(placement.layout, path, first))
