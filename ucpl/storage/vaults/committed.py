"""The identity of a vault, its domains, and its committed generations.

A writer commits after the votes of all domains (`vault.server`): one complete record is enough for a reader.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable, Sequence
from contextlib import suppress
from operator import attrgetter
from pathlib import Path
from shlex import quote
from typing import NoReturn

from ucpl.errors import Label, fail
from ucpl.storage.vaults.checksummed_text import read_sealed
from ucpl.storage.vaults.domains import AnyDomain, LocalDomain
from ucpl.storage.vaults.hosts import hosts_at
from ucpl.storage.vaults.records import Commit, Job, Shard, text_digest
from ucpl.storage.vaults.remote_domain import RemoteDomain

__all__ = [
    "DIGITS_MAX",
    "describe_damage",
    "domains_of",
    "get_commits",
    "get_damaged_newer",
    "get_domain",
    "get_domains",
    "get_replay_chain",
    "get_shards",
    "get_unreadable_newer",
    "read_commits",
    "read_job",
    "reject_no_vault",
    "silent",
    "why_unreadable",
]

DIGITS_MAX = 16  # of a generation
_DOMAIN = re.compile(r"d(0|[1-9][0-9]{0,5})")


def domains_of(home: Path) -> list[int]:
    """Numbers of the local domains."""
    try:
        names = os.listdir(home)
    except OSError:
        return []
    return sorted(int(found[1]) for name in names if (found := _DOMAIN.fullmatch(name)) and os.path.isdir(home / name))


def why_unreadable(home: Path) -> str:
    """The reason why the folder or a domain in it is unreadable.

    Empty: it is readable.
    """
    try:
        for name in os.listdir(home):
            if _DOMAIN.fullmatch(name) and stat.S_ISDIR(os.lstat(home / name).st_mode):
                os.listdir(home / name)
                read_sealed(home / name / "job.json")
    except PermissionError as error:
        return f"permission denied: {os.fsdecode(error.filename or home)}"
    except OSError:  # it went meanwhile, or cannot be read by anybody
        return ""
    return ""


def get_domain(home: Path, number: int) -> AnyDomain:
    """A domain's local folder, or its server on another host.

    The server is used if the vault has hosts and there is no local folder.
    """
    here = LocalDomain(home, number)
    if not here.is_there():
        with suppress(OSError):
            hosts = hosts_at(home)
            if hosts is not None and number < len(hosts.at):
                return RemoteDomain(home, number, hosts)
    return here


def silent(home: Path, job: Job) -> list[int]:
    """Domains that are not here and do not answer."""
    return [n for n in range(len(job.domains)) if not get_domain(home, n).is_there()]


def read_job(home: Path) -> Job | None:
    """The job of a vault; None: there is none.

    The majority of the local domains and the list of hosts decide.
    """
    votes: dict[bytes, int] = {}
    for number in domains_of(home):
        data = None
        with suppress(OSError):  # of one domain: others say it, too
            data = read_sealed(LocalDomain(home, number).job())
        if data is not None and Job.of(data) is not None:
            votes[data] = votes.get(data, 0) + 1
    with suppress(OSError):
        hosts = hosts_at(home)
        if hosts is not None and Job.of(hosts.job) is not None:
            votes[hosts.job] = votes.get(hosts.job, 0) + 1
    return Job.of(max(sorted(votes), key=votes.__getitem__)) if votes else None


def reject_no_vault(home: Path) -> NoReturn:
    """Report that there is no vault, and suggest the probable path.

    Raises: UcplError E692, always.
    """
    why = "it has no folder d0, d1, ... with a job.json"
    text, remedy = str(home), "name the folder of `ucpl vault serve`, ROOT/JOB"
    if any(os.path.lexists(LocalDomain(home, number).job()) for number in domains_of(home)):
        why = "job.json is damaged in all local domains"
        remedy = f"to remove it with its state, run `ucpl vault gc {quote(text)} --with-state`"
    try:
        if not stat.S_ISDIR(os.stat(home).st_mode):
            why = "it is not a folder"
    except FileNotFoundError:
        why = "it does not exist"
    except OSError as error:
        why = error.strerror or str(error)
    if locked := why_unreadable(home):
        why = locked
        remedy = "only the owner of a vault has access to it: run the command as this user"
    alone = text.removeprefix("vault:")
    folder, at, number = alone.rpartition("@")
    if at and number.isascii() and number.isdigit() and len(number) <= DIGITS_MAX:
        remedy = f"write only the folder, and give the generation as an option: {folder} --generation {number}"
    elif alone != text:
        remedy = f"write only the folder: {alone}"
    fail("E692", f"{home} is not a vault: {why}", Label(text), remedy=remedy)


def get_domains(home: Path, job: Job) -> list[AnyDomain]:
    return [get_domain(home, number) for number in range(len(job.domains))]


def get_shards(
    holders: Sequence[AnyDomain], job: Job, slots: Iterable[int] | None = None
) -> dict[int, list[tuple[Shard, str]]]:
    """The content of each rank's slots, committed or not.

    Each comes with the digest of its text. Raises: OSError.
    """
    found: dict[int, list[tuple[Shard, str]]] = {}
    for where, ranks in zip(holders, job.domains, strict=True):
        for rank in ranks:
            for slot in range(job.slots) if slots is None else slots:
                one = where.shard_in(rank, slot)
                if one is not None and one[0].ident == job.ident:
                    found.setdefault(rank, []).append((one[0], text_digest(one[1])))
    return found


def get_commits(home: Path, job: Job) -> list[Commit]:
    """The committed generations, newest first.

    A commit record in one domain is sufficient.
    """
    return read_commits(get_domains(home, job), job)


def get_damaged_newer(home: Path, found: Sequence[Commit]) -> dict[int, list[Path]]:
    """Generations newer than the committed ones, with their damaged texts.

    Newest first. A reader of the newest committed generation reports that a newer one was saved.
    """
    newest = found[0].generation if found else -1
    texts: dict[int, list[Path]] = {}
    for number in domains_of(home):
        here = LocalDomain(home, number)
        for generation in here.commits():
            if generation > newest and _is_damaged(here.commit(generation)):
                texts.setdefault(generation, []).append(here.commit(generation))
    return dict(sorted(texts.items(), reverse=True))


def get_unreadable_newer(home: Path) -> dict[int, str]:
    """Generations that may be newer than all committed ones, newest first.

    Each comes with the reason why it is not read.
    """
    job = read_job(home)
    found = get_damaged_newer(home, get_commits(home, job)) if job is not None else {}
    return {number: describe_damage(texts) for number, texts in found.items()}


def describe_damage(texts: Sequence[Path]) -> str:
    """The damage of a generation without intact commit record, and a remedy."""
    some = ", ".join(f"{path.parent.name}/{path.name}" for path in texts)
    return f"{some}, its commit record, is damaged; `ucpl vault scrub` or a restart of its servers may repair it"


def _is_damaged(path: Path) -> bool:
    with suppress(OSError):
        return os.path.lexists(path) and read_sealed(path) is None
    return True


def get_replay_chain(commit: Commit, found: Sequence[Commit]) -> list[Commit]:
    """A generation and those of `found` that it is replayed from.

    The complete one is first.
    """
    some = [one for one in found if commit.needs(one.generation) and one.shards[0].run == commit.shards[0].run]
    chain = [one for one in some if one.depth == commit.depth - (commit.generation - one.generation)]
    return sorted(chain, key=attrgetter("generation"))


def _commit_in(here: AnyDomain, generation: int, job: Job) -> Commit | None:
    """The commit record of a domain; None if unreadable locally.

    Raises: OSError, if the domain is on another host.
    """
    try:
        return here.commit_in(generation, job)
    except OSError:
        if isinstance(here, RemoteDomain):
            raise
        return None


def read_commits(holders: Sequence[AnyDomain], job: Job, *, sure: bool = False) -> list[Commit]:
    """The committed generations of these domains.

    sure: all domains must answer, because the caller overwrites older generations.
    Raises: OSError, if `sure` and a domain on another host does not answer: it may have the only record.
    """
    found: dict[int, Commit] = {}
    for here in holders:
        try:
            for generation in here.commits():
                if generation not in found and (commit := _commit_in(here, generation, job)) is not None:
                    found[generation] = commit
        except OSError:
            if sure:
                raise
    return [found[generation] for generation in sorted(found, reverse=True)]
