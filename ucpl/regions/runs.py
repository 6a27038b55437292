"""Choices of bracketed indices as runs that one box can hold: layers 0 to 125, or experts 0 to 7 of each."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ucpl.columns import I64
from ucpl.records import frozen

__all__ = ["Run", "runs_of"]


@frozen
class Run:
    """Choices `first` and on: a box low..high of the bracketed dims; along each, the choice's number steps by `step`."""

    first: int
    low: tuple[int, ...]
    high: tuple[int, ...]
    step: tuple[int, ...]


def runs_of(positions: I64) -> Iterator[Run]:
    """positions: (J, D), where each choice lies along the bracketed dims. The runs are in order and are all choices."""
    count, dims = positions.shape
    if count == 0:
        return
    whole = _box(positions)
    if whole is not None:
        yield whole
        return
    # Runs in which one dim counts up by one, and the others stay.
    step = np.diff(positions, axis=0)
    one = (step == 1).sum(axis=1) == 1
    one &= (step != 0).sum(axis=1) == 1
    along = np.where(one, step.argmax(axis=1), -1)
    first = 0
    while first < count:
        last, dim = first, int(along[first]) if first < count - 1 else -1
        while last < count - 1 and dim >= 0 and along[last] == dim:
            last += 1
        low, high = positions[first].tolist(), (positions[last] + 1).tolist()
        yield Run(first, tuple(low), tuple(high), tuple(int(d == dim) for d in range(dims)))
        first = last + 1


def _box(positions: I64) -> Run | None:
    """All choices as one box, if they are its elements, some dim fastest."""
    low, high = positions.min(axis=0), positions.max(axis=0) + 1
    size = high - low
    if int(size.prod()) != len(positions):
        return None
    changed = [_first_change(positions[:, d]) for d in range(positions.shape[1])]
    weight = np.zeros_like(size)
    step = 1
    for d in sorted(range(len(size)), key=lambda d: changed[d]):  # what changes first is fastest
        if size[d] > 1:
            weight[d] = step
            step *= int(size[d])
    number = ((positions - low) * weight).sum(axis=1)
    if not (number == np.arange(len(positions))).all():
        return None
    return Run(0, tuple(low.tolist()), tuple(high.tolist()), tuple(weight.tolist()))


def _first_change(column: I64) -> int:
    differs = np.flatnonzero(column != column[0])
    return int(differs[0]) if len(differs) else len(column)
