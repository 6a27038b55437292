"""The reason why a saved generation is not committed.

It comes from the votes of the other domains that can be reached.
"""

from __future__ import annotations

from pathlib import Path

from ucpl.storage.vaults.committed import get_domains, get_shards
from ucpl.storage.vaults.domains import AnyDomain, LocalDomain, is_locked
from ucpl.storage.vaults.records import Job

__all__ = ["why_not_committed"]


def why_not_committed(home: Path, job: Job, run: str, generation: int, *, is_first: bool) -> tuple[str, bool]:
    """(reason, True if waiting does not help).

    A slow running server can be waited for. A missing server, and ranks that save different steps, cannot. is_first:
    the previous generation was committed: a rank without a save may be slow. Raises: OSError, of a domain on another
    host.
    """
    holders = get_domains(home, job)
    saved = get_shards(holders, job)
    steps: dict[int, list[int]] = {}  # by the step that they called it
    unsaved = []
    for rank in range(job.ranks):
        mine = [shard for shard, _ in saved.get(rank, []) if (shard.generation, shard.run) == (generation, run)]
        if mine:
            steps.setdefault(mine[0].step, []).append(rank)
        else:
            unsaved.append(rank)
    if len(steps) > 1:
        text = ", ".join(f"{_ranks(ranks)} step {step}" for step, ranks in sorted(steps.items()))
        return f"all ranks must save the same step, but {text} was saved", True
    if unsaved:
        newer = [r for r in unsaved if any(s.run == run and s.generation > generation for s, _ in saved.get(r, []))]
        if newer:
            return f"{_ranks(newer)} saved more often: all ranks must save equally often", True
        text = f"{_ranks(unsaved)} did not save it, withdrew it or still digests it"
        return f"{text}: all ranks must save equally often", not is_first
    away = [where.number for where in holders if isinstance(where, LocalDomain) and not is_locked(where.lock("server"))]
    if away:
        return f"no server runs for {_domains(away)} (`ucpl vault serve {home} --domain {away[0]}`)", True
    silent = [where.number for where in holders if not any(_votes(where, job, generation))]
    text = f"{_domains(silent)} has not voted" if silent else "all domains voted for it, and it is not committed"
    return f"{text}: see the output of its server", False


def _votes(where: AnyDomain, job: Job, generation: int) -> list[bool]:
    votes = [where.vote_in(slot) for slot in range(job.slots)]
    return [vote is not None and vote.generation == generation for vote in votes]


def _ranks(some: list[int]) -> str:
    return (
        ("rank " if len(some) == 1 else "ranks ") + ", ".join(map(str, some[:8])) + (", ..." if len(some) > 8 else "")
    )


def _domains(some: list[int]) -> str:
    return ", ".join(f"d{number}" for number in some)
