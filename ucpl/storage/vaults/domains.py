"""The files of a vault: ROOT/JOB has a folder d0, d1, ...

for each domain.

    job.json              the identity of the vault
    r3.s0, r3.s0.json     slot 0 of rank 3: its arena, and the list of the content (2, 3, ...: gradients of one step each)
    r3.run.json           the run of rank 3, and the run's first generation
    p.s0, p.s0.json       the redundancy of the domain, and its vote
    commit.12.json        the commit record of generation 12
    *.lock                held by the process that writes these files
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import TypeVar, cast

from ucpl.storage.vaults import manifest_cache
from ucpl.storage.vaults.checksummed_text import read_sealed, write_whole
from ucpl.storage.vaults.lock_descriptors import open_unshared
from ucpl.storage.vaults.records import Commit, Job, Parity, RunRecord, Shard

__all__ = ["COMMIT", "LOOKED_AT", "OURS", "LocalDomain", "AnyDomain", "hold_lock", "is_locked"]

POLL = 0.002  # seconds between two looks whether a lock is free
LOOKED_AT = 0.5  # seconds that an owner waits for a lock: another process may be testing it
COMMIT = re.compile(r"commit\.(0|[1-9][0-9]{0,15})\.json")
# Files of a domain's folder; those that end with .new are incomplete.
OURS = re.compile(
    r"(?:job\.json|commit\.\d+\.json|r\d+\.s\d+(?:\.json)?|r\d+\.run\.json|p\.s\d+(?:\.json)?"
    r"|(?:server|commit|r\d+)\.lock)(?:\.new)?"
)


T = TypeVar("T")


def _read(path: Path, question: object, made: Callable[[bytes], T | None]) -> T | None:
    """The content of a checksummed text, cached.

    Servers read it many times a second.
    question: the question that `made` answers.
    Raises: OSError.
    """
    try:
        state = os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    stamp = (state.st_dev, state.st_ino, state.st_mtime_ns, state.st_size)
    known = manifest_cache.cached(path.parent, path.name, question)
    if known is not None and known[0] == stamp:
        return cast(T, known[1])
    data = read_sealed(path)
    return None if data is None else manifest_cache.keep(path.parent, path.name, question, stamp, data, made)


class AnyDomain(ABC):
    """A domain on any host: the files of its folder, by name."""

    number: int

    @property
    @abstractmethod
    def origin(self) -> Hashable:
        """The identity of its folder."""

    @abstractmethod
    def is_there(self) -> bool: ...

    @abstractmethod
    def names(self) -> list[str]:
        """The names in its folder; none if it is missing.

        Raises: OSError, if the server of another host does not answer.
        """

    @abstractmethod
    def text(self, name: str, question: object, made: Callable[[bytes], T | None]) -> T | None:
        """The content of a checksummed text; None: there is none.

        question: the question that `made` answers.
        Raises: OSError.
        """

    @abstractmethod
    def size(self, name: str) -> int:
        """Raises: OSError."""

    @abstractmethod
    def locked(self, wait: float) -> AbstractContextManager[bool]:
        """Lock the commits of the domain.

        Gives False, if another process holds the lock. Raises: OSError.
        """

    @abstractmethod
    def put_commit(self, generation: int, text: bytes, job: Job) -> None:
        """Write a commit record, only while `locked`. Raises: OSError."""

    def commits(self) -> list[int]:
        """Generations that are committed there, newest first. Raises: OSError, as `names` does."""
        names = self.names()
        manifest_cache.keep_only(self.origin, names)
        return sorted((int(found[1]) for name in names if (found := COMMIT.fullmatch(name))), reverse=True)

    def commit_in(self, generation: int, job: Job) -> Commit | None:
        """Raises: OSError."""
        found = self.text(f"commit.{generation}.json", job, partial(Commit.of, job=job))
        return found if found is not None and found.generation == generation else None

    def shard_in(self, rank: int, slot: int) -> tuple[Shard, bytes] | None:
        """The shard of a rank in a slot, with its text.

        Raises: OSError.
        """

        def made(data: bytes) -> tuple[Shard, bytes] | None:
            shard = Shard.of(data)
            return (shard, data) if shard is not None and (shard.rank, shard.slot) == (rank, slot) else None

        return self.text(f"r{rank}.s{slot}.json", (rank, slot), made)

    def begun_in(self, rank: int) -> RunRecord | None:
        """The record of a rank's run. Raises: OSError."""
        return self.text(f"r{rank}.run.json", rank, RunRecord.of)

    def vote_in(self, slot: int) -> Parity | None:
        """Raises: OSError."""
        found = self.text(f"p.s{slot}.json", slot, Parity.of)
        return None if found is None or (found.domain, found.slot) != (self.number, slot) else found


class LocalDomain(AnyDomain):
    """The folder of one domain, which is here."""

    def __init__(self, home: Path, number: int) -> None:
        self.number, self.folder = number, home / f"d{number}"

    @property
    def origin(self) -> Path:
        return self.folder

    def job(self) -> Path:
        return self.folder / "job.json"

    def arena(self, rank: int, slot: int) -> Path:
        return self.folder / f"r{rank}.s{slot}"

    def shard(self, rank: int, slot: int) -> Path:
        return self.folder / f"r{rank}.s{slot}.json"

    def begun(self, rank: int) -> Path:
        return self.folder / f"r{rank}.run.json"

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

    def names(self) -> list[str]:
        try:
            return os.listdir(self.folder)
        except OSError:
            return []

    def text(self, name: str, question: object, made: Callable[[bytes], T | None]) -> T | None:
        return _read(self.folder / name, question, made)

    def size(self, name: str) -> int:
        return os.stat(self.folder / name, follow_symlinks=False).st_size

    def locked(self, wait: float) -> AbstractContextManager[bool]:
        return hold_lock(self.lock("commit"), wait=wait)

    def put_commit(self, generation: int, text: bytes, job: Job) -> None:
        write_whole(self.commit(generation), text)
        for old in self.commits()[job.kept :]:
            self.commit(old).unlink(missing_ok=True)


@contextmanager
def hold_lock(path: Path, *, wait: float, within: int | None = None) -> Iterator[bool]:
    """Hold a lock until the end of the block or process.

    Gives False, if another process holds it for `wait` seconds.
    within: a descriptor of the folder that `path` is relative to.
    Raises: OSError.
    """
    with open_unshared(path, os.O_RDWR | os.O_CREAT, within) as fd:
        yield _locked(fd, time.monotonic() + wait)


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


def is_locked(path: Path) -> bool:
    """True if a running process holds a lock. Creates no file."""
    try:
        with open_unshared(path, os.O_RDWR) as fd:
            return not _locked(fd, end=0.0)
    except OSError:  # there is none, or it is unreadable
        return False
