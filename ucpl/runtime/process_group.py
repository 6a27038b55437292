"""Processes that run a plan: one, or ranks that share tiles.

One of them leads: it holds the lock, makes the target's files, sends the others the division into tiles, and, when all
have moved theirs, checks the source, syncs, and publishes. Not here: the messages between ranks (ranks).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
from attrs import field
from numpy.typing import NDArray

from ucpl.records import frozen

__all__ = ["ALONE", "Alone", "ProcessGroup", "Within", "near_sources", "shares"]

SLACK = 1.25  # factor of an even share that a rank may have, to read from its own disk

I64 = NDArray[np.int64]


class ProcessGroup(Protocol):
    """Processes of one run.

    Its methods raise UcplError E621 if another one failed or is gone.
    """

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def near(self) -> Mapping[str, Sequence[int]]:
        """Source files by path, with the ranks that have local copies.

        A rank's copy is on a disk of its own. None: all ranks have all files.
        """

    @property
    def received(self) -> int:
        """Bytes of the source that other ranks have read for this one."""

    def all(self, mine: object) -> list[object]:
        """Values of all ranks, by rank, once all have given theirs.

        They are numbers, texts, lists and dicts of them. All ranks call in one order.
        """

    def look(self) -> None:
        """Check that all ranks are alive, as far as is known.

        It is cheap and called from time to time while data moves.
        """


@frozen
class Alone:
    """A run of one process."""

    rank: int = 0
    size: int = 1
    near: Mapping[str, Sequence[int]] = field(factory=dict)
    received: int = 0

    def all(self, mine: object) -> list[object]:
        return [mine]

    def look(self) -> None:
        """Nobody else is there."""


ALONE = Alone()


@frozen
class Within:
    """Process in a part of the work that is its own.

    It distributes nothing, and checks that the others are alive.
    """

    team: ProcessGroup
    rank: int = 0
    size: int = 1
    near: Mapping[str, Sequence[int]] = field(factory=dict)

    @property
    def received(self) -> int:
        return self.team.received

    def all(self, mine: object) -> list[object]:
        return [mine]

    def look(self) -> None:
        self.team.look()


def shares(cost: I64, size: int) -> I64:
    """Assign each piece of work to a rank, neighbours together.

    Shares are as even as pieces of these costs allow. cost: (N,) of each piece, in their order.
    """
    middle = np.cumsum(cost) - cost / 2
    whole = max(float(cost.sum()), 1.0)
    out: I64 = np.minimum(middle * size / whole, size - 1).astype(np.int64)
    return out


def near_sources(cost: I64, near: Sequence[Mapping[tuple[int, ...], int]], size: int) -> I64:
    """Assign each piece of work to a rank near its source.

    The rank with most of the source gets a piece. cost: (N,) of each piece. near: for each piece, bytes of its source
    by the ranks that have them. Pieces that are near to the same ranks are divided as by `shares`; a rank with more
    than SLACK times an even share then gives its last pieces to the rank with least.
    """
    out: I64 = np.zeros(len(cost), np.int64)
    homes = [max(some, key=lambda ranks: (some[ranks], ranks)) if some else tuple(range(size)) for some in near]
    for home in dict.fromkeys(homes):
        mine = np.flatnonzero([one == home for one in homes])
        out[mine] = np.array(home, np.int64)[shares(cost[mine], len(home))]
    load = np.bincount(out, weights=cost, minlength=size)
    even = float(cost.sum()) / size
    for i in reversed(range(len(cost))):
        least = int(np.argmin(load))
        if load[out[i]] > SLACK * even and load[least] + cost[i] <= even:
            load[out[i]] -= cost[i]
            load[least] += cost[i]
            out[i] = least
    return out
