"""Who runs a plan: one process alone, or some that share its tiles, each a rank. How they talk is not here (ranks).

One of them leads: it holds the lock, makes the target's files, tells the others how tiles are cut, and, when all have moved
theirs, looks at the source, syncs, and publishes.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ucpl.records import frozen

__all__ = ["ALONE", "Alone", "Team", "shares"]

I64 = NDArray[np.int64]


class Team(Protocol):
    """The processes of one run. Its methods raise UcplError E621 where another one failed or is gone."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all(self, mine: object) -> list[object]:
        """What each says, by rank, once all have: numbers, texts, lists and dicts of them. All are asked in one order."""

    def look(self) -> None:
        """Cheap: whether all are there still, as far as is known. Called every now and then while data moves."""


@frozen
class Alone:
    """A run of one process."""

    rank: int = 0
    size: int = 1

    def all(self, mine: object) -> list[object]:
        return [mine]

    def look(self) -> None:
        """Nobody else is there."""


ALONE = Alone()


def shares(cost: I64, size: int) -> I64:
    """Which rank has each piece of work: neighbours together, as even as pieces of these costs can be.

    cost: (N,) of each piece, in their order.
    """
    middle = np.cumsum(cost) - cost / 2
    whole = max(float(cost.sum()), 1.0)
    out: I64 = np.minimum(middle * size / whole, size - 1).astype(np.int64)
    return out
