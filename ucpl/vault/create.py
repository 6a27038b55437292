"""The creation and the opening of a vault.

A vault is created for the ranks and domains of one job.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from secrets import token_hex
from shlex import quote
from typing import TYPE_CHECKING, TypedDict, Unpack

from attrs import evolve

from ucpl.errors import Label, fail
from ucpl.owned import make_owned
from ucpl.records import frozen
from ucpl.storage.keys import Keys, any_name
from ucpl.storage.vaults.checksummed_text import JsonObject, write_whole
from ucpl.storage.vaults.committed import domains_of, get_commits, read_job, reject_no_vault
from ucpl.storage.vaults.domains import LocalDomain, hold_lock
from ucpl.storage.vaults.hosts import LOCK, Hosts, addresses_of, hosts_at
from ucpl.storage.vaults.protection import Protection, check_partition, even_domains, get_sets
from ucpl.storage.vaults.records import NAME, REPLAYS_MAX, Commit, Job
from ucpl.vault.path_conflicts import NO_ROOM, why_not_made
from ucpl.vault.rank_schemes import default_protection

if TYPE_CHECKING:
    from ucpl.vault.writer import ToWrite, Writer

__all__ = ["ToMake", "Vault", "requested_job", "check_domain"]

SAFE = "/dev/shm/ucpl/job"  # that can be written, nearly everywhere


class ToMake(TypedDict, total=False):
    """The options of a new vault."""

    ranks: int  # of the job
    layout: str  # FILE.ucpl:NAME(...), whose `domain` statement lists the ranks of each domain
    domains: int | Sequence[Sequence[int]]
    protect: str  # none, mirror, mirror(2), raim5, raim5(4), rs(6, 2)
    # So many saves, one after the other, may be of gradients alone: the optimizer's step is made once more when they are read.
    replays: int
    # Of several hosts: where the server of each domain answers the others, HOST:PORT,HOST:PORT, and the folder of this host's
    # keys, as `ucpl vault keys` makes it. The folder of a domain is then on its host alone.
    hosts: str
    keys: str | os.PathLike[str]


@frozen
class Vault:
    """An existing vault: `home` is ROOT/JOB."""

    home: Path
    job: Job

    @classmethod
    def at(cls, home: str | os.PathLike[str]) -> Vault:
        """Raises: UcplError E692."""
        path = Path(home)
        job = read_job(path)
        if job is None:
            reject_no_vault(path)
        return cls(path, job)

    @classmethod
    def make(cls, home: str | os.PathLike[str], **options: Unpack[ToMake]) -> Vault:
        """Create a vault, or open the existing one.

        An existing vault must have the same ranks, domains and protection.

        Raises: UcplError E686, E687, E690, E692 for a damaged one, E694, E695.
        """
        wanted = requested_job(home, options)
        path = Path(os.path.abspath(home))
        try:
            return cls(path, _create(path, wanted, options))
        except OSError as error:
            remedy = "" if error.errno in NO_ROOM else f"name a folder in memory that can be written, as in {SAFE}"
            fail("E695", f"{path} cannot be written: {why_not_made(path, error)}", Label(str(path)), remedy=remedy)

    def domain(self, number: int) -> LocalDomain:
        return LocalDomain(self.home, number)

    def committed(self) -> Commit | None:
        """The newest committed generation."""
        return next(iter(get_commits(self.home, self.job)), None)

    def state(self, rank: int = 0, generation: int | None = None) -> JsonObject:
        """The JSON that a rank saved with a generation.

        Default: the newest committed generation. The result is empty, if there is none. If you also read tensors, name
        their generation: servers may commit another one in between.

        Raises: UcplError E694, if there is no such rank.
        """
        if not 0 <= rank < self.job.ranks:
            last = self.job.ranks - 1
            remedy = f"it has rank 0 to rank {last}" if last else "it has rank 0 alone"
            fail("E694", f"{self.home} has no rank {rank}", Label(str(self.home)), remedy=remedy)
        some = (one for one in get_commits(self.home, self.job) if generation in (None, one.generation))
        found = next(some, None)
        return dict(found.shards[rank].state) if found is not None else {}

    def writer(self, rank: int, **options: Unpack[ToWrite]) -> Writer:
        """The writer of one rank of the job. Raises: UcplError E690, E694."""
        from ucpl.vault.writer import Writer

        return Writer(self.home, self.job, rank, **options)


def requested_job(home: str | os.PathLike[str], options: ToMake) -> Job:
    """The job that a new vault is for, still without its mark.

    Creates nothing. Raises: UcplError E690.
    """
    path = Path(os.path.abspath(home))
    if not NAME.fullmatch(path.name):
        fail("E690", f"{path.name!a} cannot be the name of a job", Label(str(path)))
    if "layout" in options:
        from ucpl.vault.planning import get_domains

        if options.keys() & {"domains", "ranks"}:
            remedy = "leave them out, or give no layout"
            fail("E690", "a layout states ranks and domains", Label(options["layout"]), remedy=remedy)

        options = {**options, "domains": get_domains(options["layout"])}
    given = options.get("domains", 1)
    domains = even_domains(options.get("ranks", 1), given) if isinstance(given, int) else tuple(map(tuple, given))
    check_partition(domains)
    protection = Protection.parse(options.get("protect", default_protection(len(domains))))
    get_sets(len(domains), protection)
    replays = options.get("replays", 0)
    if not 0 <= replays <= REPLAYS_MAX:
        fail("E690", f"{replays} steps cannot be replayed: 0 to {REPLAYS_MAX} can", Label("--replays"))
    return Job(path.name, "", domains, protection, replays)


def check_domain(job: Job, number: int, home: Path) -> None:
    """Raises: UcplError E694, if a vault has no such domain."""
    last = len(job.domains) - 1
    if not 0 <= number <= last:
        has = (
            f"it has d0 to d{last}: write --domain 0 to --domain {last}"
            if last
            else "it has d0 alone: write --domain 0"
        )
        fail("E694", f"{home} has no domain d{number}", Label(str(home)), remedy=has)


def _create(path: Path, wanted: Job, options: ToMake) -> Job:
    """Create the folders, with the identity of the vault in each.

    Raises: UcplError E170, E690, E692, E694, OSError.
    """
    make_owned(path)
    with hold_lock(path / "make.lock", wait=60):
        there = read_job(path)
        if there is not None and evolve(there, name=path.name, ident="") != wanted:
            what = f"{path} is the vault of another job: {_describe(there)}"
            fail("E694", what, Label(str(path), f"asked for: {_describe(wanted)}"), remedy=_removal(path, there))
        if "hosts" in options or "keys" in options:
            return _create_on_hosts(path, wanted, options)
        if there is None and any(os.path.lexists(LocalDomain(path, number).job()) for number in domains_of(path)):
            reject_no_vault(path)  # it may be all that is left of a job
        job = there or evolve(wanted, ident=token_hex(8))
        for number in range(len(job.domains)):
            here = LocalDomain(path, number)
            make_owned(here.folder)
            if not here.job().exists():
                write_whole(here.job(), job.sealed())
    return job


def _removal(home: Path, job: Job) -> str:
    """The remedy for a folder with another job's vault."""
    state = " --with-state" if get_commits(home, job) else ""
    return f"name another folder, or remove this one with `ucpl vault gc {quote(str(home))}{state}`"


def _create_on_hosts(home: Path, job: Job, options: ToMake) -> Job:
    """Create the vault of several hosts under its common name.

    Raises: UcplError E170, E690, E694, OSError.
    """
    if "hosts" not in options or "keys" not in options:
        fail("E690", "`hosts` and `keys` go together", Label("--hosts", where=str(home)))
    at, keys = addresses_of(options["hosts"]), Keys(Path(os.path.abspath(options["keys"])))
    if len(at) != len(job.domains):
        fail(
            "E690",
            f"{len(at)} hosts are listed for {len(job.domains)} domains",
            Label("--hosts", where=options["hosts"]),
        )
    keys.demand(any_name(job.name, len(at)), "a host of this vault")
    # No host asks another for the identity: all have a certificate of one authority.
    name = f"{job.name} {job.domains} {job.protection}" + (f" {job.replays}" if job.replays else "")
    job = evolve(job, ident=blake2b(name.encode(), key=keys.authority(), digest_size=8).hexdigest())
    there = read_job(home)
    if there is not None and there != job:
        what = f"{home} is the vault of another job, or its keys are of another authority"
        fail("E694", what, Label(str(home)), remedy=_removal(home, there))
    hosts = Hosts(str(keys.folder), at, tuple(0 for _ in at), job.sealed())
    with hold_lock(home / LOCK, wait=60):
        known = None
        with suppress(OSError):  # a damaged one is created again
            known = hosts_at(home)
        (hosts if known is None else hosts.with_all(known.at, known.seats)).write(home)
    return job


def _describe(job: Job) -> str:
    replays = f", {job.replays} steps replayed" if job.replays else ""
    return f"{job.ranks} ranks in {len(job.domains)} domains, {job.protection}{replays}"
