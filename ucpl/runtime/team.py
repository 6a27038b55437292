"""Who runs a plan: one process alone, or some that share its tiles, each a rank. How they talk is not here (ranks).

One of them leads: it holds the lock, makes the target's files, tells the others how tiles are cut, and, when all have moved
theirs, looks at the source, syncs, and publishes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
from attrs import field
from numpy.typing import NDArray

from ucpl.records import frozen

__all__ = ["ALONE", "Alone", "Team", "Within", "beside", "shares"]

SLACK = 1.25  # of an even share: what a rank may have more, to read from its own disk

I64 = NDArray[np.int64]


class Team(Protocol):
    """The processes of one run. Its methods raise UcplError E621 where another one failed or is gone."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def near(self) -> Mapping[str, Sequence[int]]:
        """Files of the source by path, and the ranks that have each on a disk of their own. Nothing: all have all."""

    @property
    def received(self) -> int:
        """Bytes of the source that other ranks have read for this one."""

    def all(self, mine: object) -> list[object]:
        """What each says, by rank, once all have: numbers, texts, lists and dicts of them. All are asked in one order."""

    def look(self) -> None:
        """Cheap: whether all are there still, as far as is known. Called every now and then while data moves."""


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
    """One of a team in a part of the work that is its own: it deals nothing out, and looks whether the others are there."""

    team: Team
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
    """Which rank has each piece of work: neighbours together, as even as pieces of these costs can be.

    cost: (N,) of each piece, in their order.
    """
    middle = np.cumsum(cost) - cost / 2
    whole = max(float(cost.sum()), 1.0)
    out: I64 = np.minimum(middle * size / whole, size - 1).astype(np.int64)
    return out


def beside(cost: I64, near: Sequence[Mapping[tuple[int, ...], int]], size: int) -> I64:
    """Which rank has each piece of work, where ranks have disks of their own: one that has most of what it is made of.

    cost: (N,) of each piece. near: of each, bytes of its source by the ranks that have them. What is near to the same ranks is
    dealt to them as `shares` does; who then has more than SLACK times an even share gives its last pieces to who has least.
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
