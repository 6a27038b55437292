"""What dead jobs left behind, removed; of living ones nothing."""

from __future__ import annotations

import os
import shutil
from contextlib import ExitStack, suppress
from pathlib import Path

from ucpl.records import frozen
from ucpl.remotes.vaults.counted import committed, domains_of, job_at, no_vault
from ucpl.remotes.vaults.hosts import FILE, LOCK
from ucpl.remotes.vaults.places import COMMIT, OURS, Domain, held
from ucpl.remotes.vaults.records import Job
from ucpl.vault.looking import is_alive, is_vault, vaults_in

__all__ = ["Left", "clear"]


@frozen
class Left:
    """A vault that was found, and what became of it."""

    home: Path
    what: str  # living, kept, removed
    why: str


def clear(root: Path, *, with_state: bool = False, only: str | None = None) -> list[Left]:
    """Remove vaults below a root that no process holds; of a root that is a vault itself, that one. One in which a generation
    counts may be all that is left of a job: it goes where `with_state` is said. only: the name of one.

    Raises: UcplError E692, where there is no such folder; OSError.
    """
    if not os.path.isdir(root):
        no_vault(root)
    found = []
    for home, job in vaults_in(root) or [(one, job_at(one)) for one in [root.resolve()] if is_vault(one)]:
        if only is not None and home.name != only:
            continue
        if is_alive(home):
            found.append(Left(home, "living", "a server or a writer holds it"))
            continue
        if not with_state and (why := _state_in(home, job)):
            found.append(Left(home, "kept", why))
            continue
        found.append(_removed(home) if _is_ours(home) else Left(home, "kept", "it holds files that are not of a vault"))
    return found


def _state_in(home: Path, job: Job | None) -> str:
    """What may be all that is left of a job; empty where nothing is. What is damaged may be mended, and is not nothing."""
    commits = committed(home, job) if job is not None else []
    if commits:
        return f"generation {commits[0].generation}, step {commits[0].step}, counts in it"
    names = {name for number in domains_of(home) for name in Domain(home, number).names()}
    said = sorted(name for name in names if COMMIT.fullmatch(name))
    if said:
        return f"what says that something counts in it, {said[-1]}, is damaged"
    if job is None and names:
        return "what says which vault it is, job.json, is damaged or gone"
    return ""


def _is_ours(home: Path) -> bool:
    """Whether nothing but what vaults are made of lies there."""
    for number in domains_of(home):
        for path in Domain(home, number).folder.iterdir():
            if path.is_dir() or path.is_symlink() or not OURS.fullmatch(path.name):
                return False
    names = {f"d{number}" for number in domains_of(home)} | {"make.lock", FILE, LOCK}
    return all(path.name in names or path.name.startswith("tries.") for path in home.iterdir())


def _removed(home: Path) -> Left:
    """All locks are held meanwhile: nobody begins to use what is being removed. Raises: OSError."""
    with ExitStack() as locks:
        if not locks.enter_context(held(home / "make.lock", wait=0)):
            return Left(home, "living", "it is being made")
        for number in domains_of(home):
            if not locks.enter_context(held(Domain(home, number).lock("server"), wait=0)):
                return Left(home, "living", "a server holds it")
        for number in domains_of(home):
            shutil.rmtree(Domain(home, number).folder)
        with suppress(OSError):
            for tries in home.glob("tries.*"):
                tries.unlink()
            for name in (FILE, LOCK):
                (home / name).unlink(missing_ok=True)
            (home / "make.lock").unlink()
            home.rmdir()
    return Left(home, "removed", "no process holds it")
