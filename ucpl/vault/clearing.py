"""What dead jobs left behind, removed; of living ones nothing."""

from __future__ import annotations

import shutil
from contextlib import ExitStack, suppress
from pathlib import Path

from ucpl.records import frozen
from ucpl.remotes.vaults.counted import committed, domains_of
from ucpl.remotes.vaults.hosts import FILE, LOCK
from ucpl.remotes.vaults.places import Domain, held
from ucpl.vault.looking import is_alive, vaults_in

__all__ = ["Left", "clear"]


@frozen
class Left:
    """A vault that was found, and what became of it."""

    home: Path
    what: str  # living, kept, removed
    why: str


def clear(root: Path, *, with_state: bool = False, only: str | None = None) -> list[Left]:
    """Remove vaults below a root that no process holds. One in which a generation counts may be all that is left of a job: it
    goes where `with_state` is said. only: the name of one. Raises: OSError.
    """
    found = []
    for home, job in vaults_in(root):
        if only is not None and home.name != only:
            continue
        if is_alive(home):
            found.append(Left(home, "living", "a server or a writer holds it"))
            continue
        commits = committed(home, job) if job is not None else []
        if commits and not with_state:
            found.append(
                Left(home, "kept", f"generation {commits[0].generation}, step {commits[0].step}, counts in it")
            )
            continue
        found.append(_removed(home) if _is_ours(home) else Left(home, "kept", "it holds files that are not of a vault"))
    return found


def _is_ours(home: Path) -> bool:
    """Whether nothing but what vaults are made of lies there."""
    known = ("job.json", "commit.", "p.s", "r", "server.lock", "commit.lock")
    for number in domains_of(home):
        for path in Domain(home, number).folder.iterdir():
            if path.is_dir() or path.is_symlink() or not path.name.startswith(known):
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
