"""The content of a vault and its damage.

Only `scrub` changes anything here.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path

import numpy as np
from attrs import field

from ucpl.errors import UcplError
from ucpl.owned import demand_owned
from ucpl.records import frozen
from ucpl.storage.vaults.checksummed_text import read_sealed, was_sealed
from ucpl.storage.vaults.committed import (
    domains_of,
    get_commits,
    get_damaged_newer,
    get_domain,
    get_domains,
    get_replay_chain,
    get_shards,
    read_job,
    reject_no_vault,
    why_unreadable,
)
from ucpl.storage.vaults.domains import OURS, AnyDomain, LocalDomain, is_locked
from ucpl.storage.vaults.hosts import FILE, hosts_at
from ucpl.storage.vaults.memory import Bytes, ChunkedFile, LostBytes, Memory
from ucpl.storage.vaults.records import CHUNK, Commit, Job
from ucpl.storage.vaults.remote_domain import RemoteDomain
from ucpl.storage.vaults.snapshot_folder import open_generation
from ucpl.vault.server import Say, Server, has_commit, heal, repair_commit, repair_job

__all__ = [
    "Damage",
    "FoundFolder",
    "Generation",
    "DomainStatus",
    "VaultStatus",
    "find_damage",
    "find_vaults",
    "inspect_folder",
    "inspect_vault",
    "is_alive",
    "repair_texts",
    "scrub",
]


@frozen
class Generation:
    """A committed generation."""

    number: int
    step: int
    bytes: int  # that ranks saved
    replays: int  # replayed steps of gradients; 0: it is complete
    parity: int  # bytes
    files: int
    in_domains: tuple[int, ...]  # that say so
    age: float | None  # seconds; None: only other hosts have it


@frozen
class DomainStatus:
    """A domain."""

    number: int
    ranks: tuple[int, ...]
    is_there: bool
    is_served: bool
    written_by: tuple[int, ...]  # ranks with a running writer
    bytes: int  # of memory that it takes
    at: str = ""  # HOST:PORT, of one on another host


@frozen
class VaultStatus:
    """A vault."""

    home: Path
    job: Job
    domains: tuple[DomainStatus, ...]
    generations: tuple[Generation, ...]  # newest first
    # Newer generations, with the damaged texts that would be their commit records.
    damaged_newer: tuple[tuple[int, tuple[Path, ...]], ...] = ()


@frozen
class Damage:
    """A difference from the written files."""

    what: str
    chunks: int  # that are lost or damaged; 0: it is a text
    can_be_rebuilt: bool
    files: tuple[str, ...] = field(default=())


def is_alive(home: Path) -> bool:
    """True if any server or writer of a vault runs."""
    for number in domains_of(home):
        here = LocalDomain(home, number)
        if is_locked(here.lock("server")):
            return True
        if any(is_locked(path) for path in here.folder.glob("r*.lock")):
            return True
    return False


def inspect_vault(home: Path) -> VaultStatus:
    """Raises: UcplError E692."""
    from ucpl.vault.create import Vault

    job = Vault.at(home).job
    places = []
    for number, ranks in enumerate(job.domains):
        places.append(_place(home, number, ranks))
    found = []
    every = get_commits(home, job)
    for commit in every:
        if len(get_replay_chain(commit, every)) != commit.depth + 1:  # a generation that it depends on was removed
            continue
        among = [n for n in range(len(job.domains)) if _has(get_domain(home, n), commit.generation)]
        ages = []
        for here in (LocalDomain(home, n) for n in among):
            with suppress(OSError):
                ages.append(max(0.0, time.time() - here.commit(commit.generation).stat().st_mtime))
        found.append(
            Generation(
                commit.generation, commit.step, sum(s.size for s in commit.shards), commit.depth,
                sum(p.size for p in commit.parity), _files_of(commit),
                tuple(among), min(ages, default=None),
            )
        )  # fmt: skip
    newer = tuple((number, tuple(texts)) for number, texts in get_damaged_newer(home, every).items())
    return VaultStatus(home, job, tuple(places), tuple(found), newer)


def _files_of(commit: Commit) -> int:
    with suppress(ValueError):
        return len({file.name for _, file in commit.read()})
    return 0


def _has(where: AnyDomain, generation: int) -> bool:
    try:
        return generation in where.commits()
    except OSError:
        return False


def _place(home: Path, number: int, ranks: tuple[int, ...]) -> DomainStatus:
    there = get_domain(home, number)
    if isinstance(there, RemoteDomain):  # its server runs; writers on that host are not reported
        names, size = list[str](), 0
        with suppress(OSError):
            names = there.names()
        for name in names:
            with suppress(OSError):
                size += there.size(name)
        at = ":".join(map(str, there.address))
        return DomainStatus(number, ranks, bool(names), bool(names), (), size, at)
    here = LocalDomain(home, number)
    size = 0
    with suppress(OSError):
        size = sum(entry.stat().st_blocks * 512 for entry in os.scandir(here.folder))
    alive = tuple(rank for rank in ranks if is_locked(here.lock(f"r{rank}")))
    return DomainStatus(number, ranks, here.is_there(), is_locked(here.lock("server")), alive, size)


def find_damage(home: Path, generation: int | None = None) -> tuple[Memory, list[Damage]]:
    """Missing or damaged chunks of a generation. Raises: UcplError E692."""
    memory = open_generation(home, generation)
    found: list[Damage] = [Damage(what, 0, True) for what in _bad_texts(home, memory)]
    for number, texts in get_damaged_newer(home, get_commits(home, memory.job)).items():
        is_there = _is_all_saved(home, memory.job, number)
        for path in texts:
            what = f"the commit record of generation {number}, newer than the checked {memory.commit.generation}"
            hint = " (a starting server commits it again)" if is_there else ""
            found.append(Damage(f"{path.parent.name}: {what}{hint}", 0, is_there))
    for one in (*memory.before, memory):
        of = f" in generation {one.commit.generation}" if memory.before else ""
        for number, ranks in enumerate(memory.job.domains):
            for rank in ranks:
                piece = one.arena(rank)
                assert piece is not None
                if bad := _bad(piece):
                    files = tuple(file.name for file in one.commit.shards[rank].files)
                    again = _can_be_made(piece.size, partial(one.made, rank), bad)
                    found.append(Damage(f"d{number}: shard of rank {rank}{of}", len(bad), again, files))
            kept = one.parity(number)
            if kept is not None and (bad := _bad(kept)):
                again = _can_be_made(kept.size, partial(one.parity_made, number), bad)
                found.append(Damage(f"d{number}: its redundancy{of}", len(bad), again))
    memory.close()
    return memory, found


def _bad_texts(home: Path, memory: Memory) -> list[str]:
    """Damaged identity and commit records of the local domains."""
    found = []
    for here in (LocalDomain(home, number) for number in range(len(memory.job.domains))):
        if not here.is_there():
            continue
        data = None
        with suppress(OSError):
            data = read_sealed(here.job())
        if data != memory.job.sealed():
            found.append(f"d{here.number}: job.json, its identity record")
        for one in (*memory.before, memory):
            if not has_commit(here, one.commit, memory.job):
                found.append(f"d{here.number}: the commit record of generation {one.commit.generation}")
    return found


def _is_all_saved(home: Path, job: Job, generation: int) -> bool:
    """True if a server that starts would commit the generation again.

    All ranks have it, and all domains voted for it.
    """
    holders = get_domains(home, job)
    with suppress(OSError):
        saved = get_shards(holders, job)
        have = (any(shard.generation == generation for shard, _ in saved.get(rank, ())) for rank in range(job.ranks))
        votes = [[where.vote_in(slot) for slot in range(job.slots)] for where in holders]
        return all(have) and all(any(v is not None and v.generation == generation for v in some) for some in votes)
    return False


def _count_again(home: Path) -> list[int]:
    """Commit generations again that lost all their commit records.

    Returns the generations. The commit records are damaged in all domains.

    Return them.

    Servers do the same when they start. In a vault of several hosts only servers may do this.

    Raises: UcplError E692, OSError.
    """
    job = read_job(home)
    if job is None:
        reject_no_vault(home)
    before = get_commits(home, job)
    if not get_damaged_newer(home, before) or hosts_at(home) is not None:
        return []
    with ExitStack() as ends:
        servers = []
        for number in domains_of(home):
            with suppress(UcplError):  # one that is served: its server has tried
                servers.append(ends.enter_context(Server(home, number)))
        for server in servers:
            server.turn()
    newest = before[0].generation if before else -1
    return [one.generation for one in get_commits(home, job) if one.generation > newest]


def repair_texts(home: Path) -> int:
    """Rewrite damaged or missing texts from intact copies.

    Return their number. Raises: UcplError E692, OSError.
    """
    memory = open_generation(home)
    memory.close()
    count = 0
    for here in (LocalDomain(home, number) for number in range(len(memory.job.domains))):
        if here.is_there():
            count += repair_job(here, memory.job)
            count += sum(repair_commit(here, one.commit, memory.job) for one in (*memory.before, memory))
    return count


def _bad(piece: ChunkedFile) -> list[int]:
    return [low for low in range(0, piece.size, CHUNK) if not piece.is_intact(low)]


def _can_be_made(size: int, make: Callable[[int, Bytes], None], some: list[int]) -> bool:
    """True if the chunks at this offset can be rebuilt."""
    try:
        for low in some:
            make(low, np.empty(min(CHUNK, size - low), np.uint8))
    except LostBytes:
        return False
    return True


def scrub(home: Path, say: Say = lambda _: None) -> tuple[int, list[Damage]]:
    """Rebuild damaged chunks of the newest generation.

    Returns (number of rebuilt chunks, remaining damage).

    say: receives a line for everything else that was repaired.
    Raises: UcplError E686 for a vault that another user can change, E692, OSError.
    """
    if read_job(home) is not None:
        for folder in (home, *(LocalDomain(home, number).folder for number in domains_of(home))):
            demand_owned(folder)
    for number in _count_again(home):
        say(f"committed  generation {number} again, from the shards of its ranks and the votes of its domains")
    if texts := repair_texts(home):
        say(f"repaired   {texts} records, from other domains")
    memory = open_generation(home)
    count = 0
    try:
        for number in range(len(memory.job.domains)):
            here = LocalDomain(home, number)
            if not here.is_there():
                continue
            for one in (*memory.before, memory):
                count += heal(one, number)
    finally:
        memory.close()
    return count, find_damage(home)[1]


@frozen
class FoundFolder:
    """A folder that is a vault, a remainder of one, or unreadable."""

    home: Path
    job: Job | None = None
    why_unreadable: str = ""  # the reason why it cannot be read
    is_sure: bool = True  # False: files are called as a vault's, which anybody's may be


def inspect_folder(path: Path) -> FoundFolder | None:
    """The vault in a folder.

    None if it is none. A name alone is no evidence: other programs have a hosts.json too.
    """
    if why := why_unreadable(path):
        return FoundFolder(path, why_unreadable=why)
    if (job := read_job(path)) is not None:
        return FoundFolder(path, job)
    names = [f"d{n}/{name}" for n in domains_of(path) for name in LocalDomain(path, n).names() if OURS.fullmatch(name)]
    if any(_was_sealed(path / name) for name in (FILE, *names) if ".json" in name):
        return FoundFolder(path)
    is_likely = any(not name.endswith("/job.json") for name in names)
    return FoundFolder(path, is_sure=False) if is_likely else None


def _was_sealed(path: Path) -> bool:
    with suppress(OSError):
        return was_sealed(path)
    return False


def find_vaults(root: Path) -> list[FoundFolder]:
    """The vaults below a root. Raises: OSError for the root itself."""
    with os.scandir(root) as entries:
        homes = sorted(Path(entry.path) for entry in entries if entry.is_dir(follow_symlinks=False))
    return [one for one in map(inspect_folder, homes) if one is not None]
