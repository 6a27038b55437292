"""Messages between ranks that run one plan, and the division of tiles.

Not here: their transport (process_group, ranks).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ucpl.errors import Label, UcplError, fail
from ucpl.runtime.batches import Batch
from ucpl.runtime.counters import Counters
from ucpl.runtime.disk import sync_folder
from ucpl.runtime.failpoints import failpoint
from ucpl.runtime.journal import Journal, Past, read_journal
from ucpl.runtime.process_group import ProcessGroup, near_sources, shares
from ucpl.runtime.publish import Workplace
from ucpl.runtime.targets import cannot_write
from ucpl.runtime.tiles import DoneTiles, Tiles

__all__ = [
    "agree",
    "counted",
    "check_same_run",
    "give_order",
    "journal_at",
    "order_of",
    "published",
    "share_of_done",
    "share_of_groups",
    "waiting",
]

_ALIKE = {
    "digest": "another plan",
    "files": "another target, or source",
    "memory": "another --memory",
    "workers": "another --workers",
}
_SUMS = (
    "bytes_read", "bytes_received", "bytes_read_verify", "bytes_rebuilt", "bytes_written", "bytes_cloned", "bytes_read_back",
)  # fmt: skip


def agree(team: ProcessGroup, mine: Mapping[str, object]) -> str:
    """Check that all ranks were given the same.

    Returns the digest of the source's files as the first rank sees them. Raises: UcplError E622.
    """
    told = team.all({name: str(mine[name]) for name in (*_ALIKE, "content")})
    first = told[0]
    assert isinstance(first, dict)
    for rank, one in enumerate(told):
        assert isinstance(one, dict)
        for name, what in _ALIKE.items():
            if one[name] != first[name]:
                fail(
                    "E622",
                    f"rank {rank} was given {what} than rank 0",
                    Label("rank 0", f"{name} {first[name]}"),
                    Label(f"rank {rank}", f"{name} {one[name]}"),
                )
    return str(first["content"])


def give_order(team: ProcessGroup, header: Mapping[str, object] | None) -> None:
    """Send the header of the run's journal to the others.

    The leader calls it once all files exist; None: nothing is to be done.
    """
    team.all({"header": None if header is None else dict(header)})


def order_of(team: ProcessGroup) -> dict[str, object] | None:
    """Receive the leader's order: the header, or None."""
    order = team.all(None)[0]
    assert isinstance(order, dict)
    header: dict[str, object] | None = order["header"]
    return header


def check_same_run(past: Past | None, header: Mapping[str, object], team: ProcessGroup, work: Workplace) -> Past:
    """Check that this process sees the leader's journal of this run.

    The leader began it or resumes it. Raises: UcplError E623.
    """
    if past is None or past.header.get("run") != header.get("run"):
        what = "is not there" if past is None else "is of another run"
        fail(
            "E623",
            f"rank {team.rank} does not see the target that rank 0 began: its journal {what}",
            Label(str(work.journal), f"{what}, as rank {team.rank} sees it"),
        )
    return past


def journal_at(path: Path, header: Mapping[str, object]) -> Journal:
    """Begin or continue the journal of a rank. Raises: UcplError E503."""
    try:
        past = read_journal(path)
        if past is not None and past.header.get("run") == header.get("run"):
            return Journal(path, past.size)
        journal = Journal.begin(path, header)
        sync_folder(path.parent)
        return journal
    except OSError as error:
        cannot_write(path, error)


def share_of_groups(
    team: ProcessGroup, groups: list[Batch], tiles: Tiles, near: Callable[[Batch], Mapping[str, int]]
) -> list[Batch]:
    """Groups of this rank, divided by bytes that are written and read.

    Groups whose source this rank has are first. near: bytes of each file that a group needs.
    """
    if team.size == 1:
        return groups
    cost = np.array(
        [sum(int(tiles.size[a:b].sum()) for a, b in group.bands) + group.held for group in groups], np.int64
    )
    if team.near:
        made_of = []
        for group in groups:
            some: dict[tuple[int, ...], int] = {}
            for file, size in near(group).items():
                holders = tuple(team.near[file])
                some[holders] = some.get(holders, 0) + size
            made_of.append(some)
        whose = near_sources(cost, made_of, team.size)
    else:
        whose = shares(cost, team.size)
    return [group for group, rank in zip(groups, whose.tolist(), strict=True) if rank == team.rank]


def share_of_done(team: ProcessGroup, known: DoneTiles) -> NDArray[np.bool_]:
    """Tiles that this process reads back.

    Those are the tiles that it moved, and every n-th of earlier runs.
    """
    number = np.arange(len(known.done))
    mine: NDArray[np.bool_] = known.done & (~known.from_journal | (number % team.size == team.rank))
    return mine


def counted(team: ProcessGroup, counters: Counters) -> None:
    """The counters of the one that leads become those of all."""
    if team.size == 1:
        return
    counters.bytes_received = team.received
    with waiting(team, counters):
        told = team.all({name: getattr(counters, name) for name in _SUMS})
    if team.rank == 0:
        for name in _SUMS:
            setattr(counters, name, sum(int(one[name]) for one in told if isinstance(one, dict)))


def published(team: ProcessGroup, target: Path) -> tuple[str, ...]:
    """Send the others the message that the target exists.

    The leader calls it. Returns a remark if another rank is gone by then. Raises: UcplError E621, in the others: the
    leader's last step before its end is unknown to them.
    """
    failpoint("published")
    try:
        team.all("published")
    except UcplError as error:
        if team.rank != 0:
            raise
        return (f"{error.diagnostics[0].message}; {target} was complete by then",)
    return ()


def waiting(team: ProcessGroup, counters: Counters) -> AbstractContextManager[None]:
    """Seconds that this process waits for the others; 0 for one process."""
    return counters.phase("wait") if team.size > 1 else nullcontext()
