"""Where things lie: ROOT/JOB has a folder d0, d1, ... for each domain, and each of these what its ranks and its server keep.

job.json              which vault this is
r3.s0, r3.s0.json     what rank 3 saved in slot 0: its arena, and what lies in it
p.s0, p.s0.json       what the domain holds for others, and its vote
commit.12.json        generation 12 counts
*.lock                held by who writes these
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TypeVar, cast

from ucpl.remotes.vaults.records import Commit, Job, Parity, Shard
from ucpl.remotes.vaults.sealed import read_sealed

__all__ = ["SLOTS", "Domain", "committed", "domains_of", "held", "job_at"]

SLOTS = 2
POLL = 0.002  # seconds between two looks whether a lock is free
_DOMAIN = re.compile(r"d(0|[1-9][0-9]{0,5})")
_COMMIT = re.compile(r"commit\.(0|[1-9][0-9]{0,15})\.json")


T = TypeVar("T")
_KEPT = 256  # texts
_known: dict[tuple[Path, object], tuple[tuple[int, ...], object]] = {}


def _read(path: Path, what: object, made: Callable[[bytes], T | None]) -> T | None:
    """What a sealed text says. One that was read before is not read again: servers look many times a second.

    what: which question `made` answers. Raises: OSError.
    """
    try:
        state = os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    stamp = (state.st_dev, state.st_ino, state.st_mtime_ns, state.st_size)
    if (known := _known.get((path, what))) is not None and known[0] == stamp:
        return cast(T, known[1])
    data = read_sealed(path)
    found = made(data) if data is not None else None
    if found is not None:
        while len(_known) >= _KEPT:
            _known.pop(next(iter(_known)), None)
        _known[path, what] = stamp, found
    return found


class Domain:
    """The folder of one domain."""

    def __init__(self, home: Path, number: int) -> None:
        self.number, self.folder = number, home / f"d{number}"

    def job(self) -> Path:
        return self.folder / "job.json"

    def arena(self, rank: int, slot: int) -> Path:
        return self.folder / f"r{rank}.s{slot}"

    def shard(self, rank: int, slot: int) -> Path:
        return self.folder / f"r{rank}.s{slot}.json"

    def parity(self, slot: int) -> Path:
        return self.folder / f"p.s{slot}"

    def vote(self, slot: int) -> Path:
        return self.folder / f"p.s{slot}.json"

    def commit(self, generation: int) -> Path:
        return self.folder / f"commit.{generation}.json"

    def lock(self, name: str) -> Path:
        return self.folder / f"{name}.lock"

    def is_there(self) -> bool:
        return self.folder.is_dir()

    def commits(self) -> list[int]:
        """Generations that are committed here, newest first."""
        try:
            names = os.listdir(self.folder)
        except OSError:
            return []
        return sorted((int(found[1]) for name in names if (found := _COMMIT.fullmatch(name))), reverse=True)

    def shard_in(self, rank: int, slot: int) -> tuple[Shard, bytes] | None:
        """What a rank has saved in a slot, and its text."""

        def made(data: bytes) -> tuple[Shard, bytes] | None:
            shard = Shard.of(data)
            return (shard, data) if shard is not None and (shard.rank, shard.slot) == (rank, slot) else None

        return _read(self.shard(rank, slot), (rank, slot), made)

    def vote_in(self, slot: int) -> Parity | None:
        found = _read(self.vote(slot), slot, Parity.of)
        return None if found is None or (found.domain, found.slot) != (self.number, slot) else found


def domains_of(home: Path) -> list[int]:
    """Numbers of the domains whose folders are there."""
    try:
        names = os.listdir(home)
    except OSError:
        return []
    return sorted(int(found[1]) for name in names if (found := _DOMAIN.fullmatch(name)) and (home / name).is_dir())


def job_at(home: Path) -> Job | None:
    """Which vault this is, as most of its domains say; None: there is none."""
    said: dict[bytes, int] = {}
    for number in domains_of(home):
        data = None
        with suppress(OSError):  # of one domain: others say it, too
            data = read_sealed(Domain(home, number).job())
        if data is not None and Job.of(data) is not None:
            said[data] = said.get(data, 0) + 1
    return Job.of(max(sorted(said), key=said.__getitem__)) if said else None


def committed(home: Path, job: Job) -> list[Commit]:
    """Generations that count, newest first: those of which any domain that is there says so."""
    found: dict[int, Commit] = {}
    for number in range(len(job.domains)):
        here = Domain(home, number)
        for generation in here.commits():
            if generation not in found:
                commit = None
                with suppress(OSError):
                    commit = _read(here.commit(generation), job, partial(Commit.of, job=job))
                if commit is not None and commit.generation == generation:
                    found[generation] = commit
    return [found[generation] for generation in sorted(found, reverse=True)]


@contextmanager
def held(path: Path, *, wait: float) -> Iterator[bool]:
    """A lock, for as long as it is held or this process lives. Gives False where another has it for so many seconds.

    Raises: OSError.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        yield _locked(fd, time.monotonic() + wait)
    finally:
        os.close(fd)


def _locked(fd: int, end: float) -> bool:
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise
            if time.monotonic() >= end:
                return False
            time.sleep(POLL)
        else:
            return True
