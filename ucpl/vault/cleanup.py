"""`ucpl vault gc`: remove the vaults of dead jobs, and nothing of running ones."""

from __future__ import annotations

import os
import re
import stat
from contextlib import ExitStack, suppress
from pathlib import Path

from ucpl.owned import opened_as_is
from ucpl.records import frozen
from ucpl.storage.vaults.committed import domains_of, get_commits, reject_no_vault
from ucpl.storage.vaults.domains import COMMIT, OURS, LocalDomain, hold_lock
from ucpl.storage.vaults.hosts import FILE, LOCK
from ucpl.storage.vaults.records import Job
from ucpl.vault.inspect import FoundFolder, find_vaults, inspect_folder, is_alive

__all__ = ["CleanupResult", "remove_vaults"]

DOMAIN = re.compile(r"d(?:0|[1-9][0-9]*)")
FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


@frozen
class CleanupResult:
    """A vault that was found, and the result of the removal."""

    home: Path
    what: str  # living, kept, removed; passed: unreadable
    why: str


def remove_vaults(root: Path, *, with_state: bool) -> list[CleanupResult]:
    """Remove the vaults in a folder that no process uses.

    root: the folder, or the vault itself.

    A vault with a committed generation may be the last copy of a job's state: it is removed only with `with_state`.

    Raises: UcplError E692, if the folder does not exist or cannot be read.
    """
    root = Path(os.path.realpath(root))  # from here on no link is followed
    try:
        below = find_vaults(root)
    except OSError:
        reject_no_vault(root)
    alone = inspect_folder(root) if all(one.why_unreadable for one in below) else None
    some = below if alone is None or alone.why_unreadable else [alone]
    return [_cleared(one, with_state) for one in some]


def _cleared(one: FoundFolder, with_state: bool) -> CleanupResult:
    if one.why_unreadable:
        return CleanupResult(one.home, "passed", one.why_unreadable)
    try:
        if is_alive(one.home):
            return CleanupResult(one.home, "living", "a server or a writer uses it")
        if not one.is_sure:
            why = "it has files with a vault's names, but no intact record of one: if it was a vault, remove it by hand"
            return CleanupResult(one.home, "kept", why)
        if not with_state and (why := _state_in(one.home, one.job)):
            return CleanupResult(one.home, "kept", why)
        if not _is_ours(one.home):
            return CleanupResult(one.home, "kept", "it contains files that do not belong to a vault")
        return _removed(one.home)
    except OSError as error:  # it is another user's, say
        why = f"{one.home / os.fsdecode(error.filename or '')}: {(error.strerror or str(error)).lower()}"
        return CleanupResult(one.home, "kept", f"it cannot be removed: {why}")


def _state_in(home: Path, job: Job | None) -> str:
    """The state of a job that may be its last copy.

    Empty if there is none. Damaged state counts, since it may be repairable.
    """
    commits = get_commits(home, job) if job is not None else []
    if commits:
        return f"generation {commits[0].generation}, step {commits[0].step}, is committed"
    names = {name for number in domains_of(home) for name in LocalDomain(home, number).names()}
    records = sorted(name for name in names if COMMIT.fullmatch(name))
    if records:
        return f"the commit record {records[-1]} is damaged"
    if job is None:
        return f"its record {'job.json' if names else FILE} is damaged or missing"
    return ""


def _is_ours(home: Path) -> bool:
    """True if the folder contains only files of a vault."""
    for number in domains_of(home):
        folder = LocalDomain(home, number).folder
        if folder.is_symlink():
            return False
        for path in folder.iterdir():
            if path.is_dir() or path.is_symlink() or not OURS.fullmatch(path.name):
                return False
    names = {f"d{number}" for number in domains_of(home)} | {"make.lock", FILE, LOCK}
    return all(path.name in names or path.name.startswith("tries.") for path in home.iterdir())


def _removed(home: Path) -> CleanupResult:
    """Remove a vault while holding all its locks. Raises: OSError.

    All files are opened and removed by descriptors, and no link is followed: another user may own a folder on the path,
    and may replace it with a link after the check.
    """
    with ExitStack() as ends:

        def opened(fd: int) -> int:
            ends.callback(os.close, fd)
            return fd

        top = opened(opened_as_is(home))
        if not ends.enter_context(hold_lock(Path("make.lock"), wait=0, within=top)):
            return CleanupResult(home, "living", "it is being made")
        names = sorted(name for name in os.listdir(top) if DOMAIN.fullmatch(name))
        folders = {name: opened(os.open(name, FOLDER, dir_fd=top)) for name in names}
        for folder in folders.values():
            if not ends.enter_context(hold_lock(Path("server.lock"), wait=0, within=folder)):
                return CleanupResult(home, "living", "a server uses it")
        if any(not _is_file_of_ours(folder, name) for folder in folders.values() for name in os.listdir(folder)):
            return CleanupResult(home, "kept", "it contains files that do not belong to a vault")
        for name, folder in folders.items():
            for inner in os.listdir(folder):
                os.unlink(inner, dir_fd=folder)
            os.rmdir(name, dir_fd=top)
        with suppress(OSError):
            for name in os.listdir(top):
                if name.startswith("tries.") or name in (FILE, LOCK, "make.lock"):
                    os.unlink(name, dir_fd=top)
            os.rmdir(home.name, dir_fd=opened(opened_as_is(home.parent)))
    return CleanupResult(home, "removed", "no process holds it")


def _is_file_of_ours(folder: int, name: str) -> bool:
    """Raises: OSError."""
    mode = os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode
    return OURS.fullmatch(name) is not None and stat.S_ISREG(mode)
