"""Are means and sums of what they are said to be of? Each put together as its layout says, and over its own axes."""

from __future__ import annotations

from typing import NoReturn

import numpy as np

from ucpl.errors import Label, fail
from ucpl.layout.layout import Policy
from ucpl.proofs.joins import I64, Held, Mask, box_of
from ucpl.proofs.together import APART
from ucpl.proofs.told import Told

__all__ = ["demand_members"]


def demand_members(told: Told, source: Held) -> None:
    """What is put together is said to be, in that way and over those axes; what is said to be is not copied. E346."""
    pieces, kinds = told.source, told.moves.kind[source.move]
    together = np.isin(kinds, [n.word for n in APART])
    said = np.array([p.word for p in Policy])[pieces.policy[source.piece]]
    wrong = np.flatnonzero(together & (said != kinds))
    if len(wrong):
        _blame(told, source, int(wrong[0]), f"goes into a {kinds[wrong[0]]}, and its layout says `{said[wrong[0]]}`")
    rows = np.flatnonzero(together)
    flow, over = told.moves.flow[source.move[rows]], pieces.over[source.piece[rows]]
    _, first = np.unique(np.column_stack([flow, over]), axis=0, return_index=True)
    for row in rows[first].tolist() if len(rows) else ():
        bits, kind = int(pieces.over[source.piece[row]]), str(kinds[row])
        if set(told.flows[int(told.moves.flow[source.move[row]])].over) != told.over(bits):
            _blame(told, source, row, f"goes into a {kind} over other axes than its layout says")
    apart = _apart(told)
    for row in np.flatnonzero(~together & apart[source.piece]).tolist():
        if (index := _met(told, source, row)) is not None:
            source.low[row] = index
            _blame(told, source, row, "is copied, and its layout says that it is one part of several")


def _apart(told: Told) -> Mask:
    """Pieces whose layout says that they are put together with others."""
    return np.isin(told.source.policy, APART)


def _met(told: Told, source: Held, row: int) -> I64 | None:
    """The first element of a box that another member of its mean or sum has, too."""
    pieces, piece = told.source, int(source.piece[row])
    low, high = box_of(pieces)
    alike = np.flatnonzero(
        _apart(told) & (pieces.tensor == pieces.tensor[piece]) & (pieces.state == pieces.state[piece])
    )
    other = np.zeros(len(alike), dtype=bool)
    for divisor, degree in told.over(int(pieces.over[piece])):
        other |= pieces.rank[alike] // divisor % degree != pieces.rank[piece] // divisor % degree
    alike = alike[other]
    meets = np.maximum(low[alike], source.low[row]), np.minimum(high[alike], source.high[row])
    found = np.flatnonzero((meets[0] < meets[1]).all(axis=1))
    return meets[0][found[0]] if len(found) else None


def _blame(told: Told, source: Held, row: int, what: str) -> NoReturn:
    piece = int(source.piece[row])
    (file, key), _ = told.place(0, int(told.source.first[piece]))
    fail("E346", f"{told.name(told.source, piece, source.low[row])} {what}", Label(file, "source", where=key))
