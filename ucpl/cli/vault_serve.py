"""`ucpl vault serve`: the server of a domain, and its writes to disk."""

from __future__ import annotations

import os
import time
from argparse import Namespace
from itertools import chain, count
from pathlib import Path
from typing import TYPE_CHECKING

from ucpl.cli.limits import end_if_asked
from ucpl.cli.options import SHOWN, whole_number
from ucpl.cli.vault_options import NUMBER_MAX, domains_of, wrong
from ucpl.errors import Label, UcplError, fail

if TYPE_CHECKING:
    from ucpl.cli.console import Console
    from ucpl.storage.vaults.records import Commit, Job
    from ucpl.vault.create import ToMake

__all__ = ["run_serve"]

POLL = 0.02  # seconds between two looks of a server
PAUSE = 0.5  # the same, where something is in its way


def run_serve(home: Path, options: Namespace, console: Console) -> int:
    """Run until stopped.

    Raises: UcplError.
    """
    from ucpl.storage.vaults.committed import get_commits
    from ucpl.storage.vaults.hosts import addresses_of
    from ucpl.vault.create import Vault, check_domain, requested_job
    from ucpl.vault.path_conflicts import WORKS, remove_stale
    from ucpl.vault.server import Server

    text = options.domain or ""
    if not (text.isascii() and text.isdigit() and len(text) < len(str(NUMBER_MAX))):
        what = f"--domain {text[:SHOWN]}" if text else "serve"
        sentence = "names no domain" if text else "needs --domain"
        wrong(what, sentence, "ucpl vault serve ROOT/JOB --domain 0, one for each domain")
    if bool(options.hosts) != bool(options.keys):
        wrong("--hosts", "and --keys go together", "--hosts node0:7070,node1:7070 --keys DIR")
    if options.hosts and not (options.ranks or options.domains or options.layout):
        wrong("--hosts", "needs the shape of the vault, too", "--ranks 8 --domains 2, or --layout")
    if bool(options.every) != bool(options.into):
        wrong("--every", "and --into go together", "--every 10 --into runs")
    every = whole_number("--every", options.every, NUMBER_MAX) if options.every else 0
    if options.ranks or options.domains or options.layout:
        said_of_it = _given(options)
        check_domain(requested_job(home, said_of_it), int(text), home)  # nothing is made for a server that cannot be
        vault = Vault.make(home, **said_of_it)
    else:
        vault = Vault.at(home)
        _demand_kept(vault.job, options)
    at = addresses_of(options.hosts)[int(text)] if options.hosts else None
    with Server(vault.home, int(text), console.say, at=at) as server:
        ranks = ", ".join(map(str, vault.job.domains[server.number]))
        console.say(f"serving    {vault.home}/d{server.number}: ranks {ranks}, {vault.job.protection}")
        console.flush()
        last = newest.generation if (newest := vault.committed()) is not None else 0
        told = ""
        late = set[int]()  # whoever served before ended before they were written
        if every:
            remove_stale(Path(options.into), WORKS)
            some = (one for one in get_commits(vault.home, vault.job) if one.generation % every == 0)
            late |= {one.generation for one in some if not _is_kept(Path(options.into), one, vault.job)}
        while True:
            end_if_asked()
            if not server.here.is_there():
                _gone(server.here.folder)
            try:
                server.turn()
                told = ""
            except OSError as error:  # memory is full, or a file is replaced by something else
                waits_for = f"{os.fsdecode(error.filename or server.here.folder)}: {error.strerror or error}"
                if waits_for != told:
                    console.say(f"waits      {waits_for}; nothing counts until that is mended")
                    console.flush()
                told = waits_for
                time.sleep(PAUSE)
            for one in reversed(get_commits(vault.home, vault.job)):  # one after the other may count between two looks
                if one.generation > last or one.generation in late:
                    last = max(last, one.generation)
                    late.discard(one.generation)
                    if every and one.generation % every == 0 and server.number == min(server.alive(), default=0):
                        _kept(home, _place_of(Path(options.into), one), one.generation, console)
            console.flush()
            time.sleep(POLL)


def _demand_kept(job: Job, options: Namespace) -> None:
    """Check that the options of an existing vault are unchanged.

    Raises: UcplError E694.
    """
    from ucpl.storage.vaults.protection import Protection

    other = ""
    if options.protect and Protection.parse(options.protect) != job.protection:
        other = f"--protect {options.protect}"
    if options.replays and whole_number("--replays", options.replays, NUMBER_MAX) != job.replays:
        other = f"--replays {options.replays}"
    if other:
        what = f"{options.path} was made with --protect '{job.protection}' and --replays {job.replays}"
        remedy = "leave it out, or name another folder with --ranks and --domains"
        fail("E694", what, Label("<command line>", where=other), remedy=remedy)


def _gone(folder: Path) -> None:
    fail(
        "E695", f"{folder} is gone, while it was served", Label(str(folder)),
        remedy="start the server once more: it makes the domain anew from the others",
    )  # fmt: skip


def _place_of(into: Path, one: Commit) -> Path:
    """The folder of a generation on disk.

    An earlier run may have written the same step before it went back; its folder stays.
    """
    plain = f"step-{one.step}"
    later = f"{plain}.generation-{one.generation}"
    names = chain(
        (plain, later), (f"{later}.{number}" for number in count(2))
    )  # a vault that was made anew counts anew
    return next(into / name for name in names if not os.path.lexists(into / name))


def _is_kept(into: Path, one: Commit, job: Job) -> bool:
    """True if a generation was written there."""
    from ucpl.vault.persisted import found_in, is_of

    return any(is_of(found_in(path, one.step), one, job) for path in into.glob(f"step-{one.step}*"))


def _kept(home: Path, target: Path, generation: int, console: Console) -> None:
    """Print a failed write; it ends no server."""
    from ucpl.vault.persisted import persist

    try:
        persist(home, target, generation)
        console.say(f"written    {target}: generation {generation}")
    except UcplError as error:
        console.diagnostics(error.diagnostics)


def _given(options: Namespace) -> ToMake:
    said: ToMake = {}
    if options.hosts:
        said["hosts"], said["keys"] = options.hosts, options.keys
    if options.protect:
        said["protect"] = options.protect
    if options.replays:
        said["replays"] = whole_number("--replays", options.replays, NUMBER_MAX)
    if options.layout and (options.domains or options.ranks):
        wrong("--layout", "defines ranks and domains", "--layout alone, or --ranks and --domains")
    if options.layout:
        return {**said, "layout": options.layout}
    domains = options.domains or "1"
    said["domains"] = found = domains_of(domains)
    if isinstance(found, int):
        said["ranks"] = whole_number("--ranks", options.ranks or domains, NUMBER_MAX)
    return said
