"""A generation as a folder of files, read from memory on demand.

The files have their names and sizes; the bytes come from the arenas.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from attrs import evolve, field

from ucpl.errors import Label, calling, fail
from ucpl.records import define
from ucpl.storage import cache_dirs
from ucpl.storage.cache_dirs import current_scope
from ucpl.storage.reading import Range, remote_of, sparse_file_registry
from ucpl.storage.vaults.committed import (
    DIGITS_MAX,
    get_commits,
    get_damaged_newer,
    get_domains,
    get_replay_chain,
    get_unreadable_newer,
    read_job,
    reject_no_vault,
)
from ucpl.storage.vaults.domains import COMMIT, LocalDomain
from ucpl.storage.vaults.memory import Memory
from ucpl.storage.vaults.records import CHUNK, SavedFile
from ucpl.storage.vaults.replay import Over, Replay

if TYPE_CHECKING:
    from ucpl.storage.vaults.records import Commit

__all__ = [
    "SCHEME",
    "SnapshotFile",
    "SnapshotFolder",
    "get_skipped",
    "get_snapshot_file",
    "open_generation",
    "pin_generation",
    "snapshot_folder",
]

SCHEME = "vault"
Parts = Sequence[tuple[int, SavedFile]]  # ranks, with their parts of a file


@define(eq=False)
class SnapshotFolder:
    """All files of a generation, with the places of their bytes."""

    memory: Memory
    url: str
    root: Path
    files: dict[str, SnapshotFile] = field(factory=dict)

    @property
    def rebuilt(self) -> int:
        return self.memory.all_rebuilt

    @cached_property
    def replay(self) -> Replay | None:
        """The replay of a generation with gradients alone. Raises: UcplError E698."""
        return Replay(self.memory) if self.memory.before else None

    def look_again(self) -> None:
        """Do nothing: a read compares each chunk with its digest.

        If a slot was overwritten, its chunks are rebuilt, or the read fails.
        """


@define(eq=False)
class SnapshotFile:
    """One file."""

    call_bytes: ClassVar[int] = 48 << 10  # memory gives these in the time that a call takes here
    folder: SnapshotFolder
    name: str
    parts: Parts

    @property
    def size(self) -> int:
        return self.parts[0][1].size

    @cached_property
    def spans(self) -> list[tuple[int, int, int, int | bytes]]:
        """(begin, end, rank, position in its arena or bytes), ascending, without gaps."""
        crcs = {name: crc for _, file in self.parts for name, crc in file.crcs.items()}
        found: list[tuple[int, int, int, int | bytes]] = []
        for rank, file in self.parts:
            found += [(s.begin, s.begin + s.size, rank, s.at) for s in file.segments]
            for late in file.late:
                data = bytearray(late.data)
                for name, at in late.holes:
                    data[at : at + 4] = crcs.get(name, 0).to_bytes(4, "little")
                found.append((late.begin, late.begin + len(data), rank, bytes(data)))
        return sorted(found, key=lambda one: one[:2])

    @property
    def lost(self) -> list[tuple[int, int, int]]:
        """(begin, end, domain) of bytes in lost domains, ascending and joined."""
        memory, found = self.folder.memory.whole, list[tuple[int, int, int]]()
        for begin, end, rank, where in self.spans:
            domain = memory.job.domain_of(rank)
            if domain is None or isinstance(where, bytes) or not memory.is_lost(rank):
                continue
            if found and found[-1][1:] == (begin, domain):
                found[-1] = (found[-1][0], end, domain)
            else:
                found.append((begin, end, domain))
        return found

    @cached_property
    def _over(self) -> Over | None:
        return self.folder.replay.over(self.name) if self.folder.replay is not None else None

    @property
    def replayed(self) -> list[tuple[int, int, int]]:
        """[begin, end) of replayed values, ascending, and their gradients' bytes."""
        return self._over.replayed if self._over is not None else []

    @cached_property
    def made(self) -> list[Range]:
        """The same for readers of archives.

        `read` gives a marker in place of their CRCs.
        """
        return [(begin, end) for begin, end, _ in self.replayed]

    @cached_property
    def _begins(self) -> list[int]:
        return [span[0] for span in self.spans]

    def read(self, fd: int, views: Sequence[memoryview], position: int) -> int:
        done = 0
        for into in views:
            size = min(len(into), self.size - position - done)
            if size <= 0:
                break
            if self._over is None:
                self._saved(into[:size], position + done)
            else:
                self._over.fill(into[:size], position + done, self._saved, exact=False)
            done += size
        return done

    def fill(self, into: memoryview, position: int) -> None:
        """Raises: UcplError E691, E698."""
        if self._over is None:
            self._saved(into, position)
        else:
            self._over.fill(into, position, self._saved)

    def _saved(self, into: memoryview, position: int) -> None:
        """Bytes of the complete generation. Raises: UcplError E691."""
        memory = self.folder.memory.whole
        end = position + len(into)
        i = bisect_right(self._begins, position) - 1
        begin, high, rank, where = self.spans[i]
        if end <= high and isinstance(where, int):
            memory.fill(rank, into, where + position - begin)
            return
        while position < end:
            begin, high, rank, where = self.spans[i]
            high = min(high, end)
            some = into[len(into) - (end - position) :][: high - position]
            if isinstance(where, int):
                memory.fill(rank, some, where + position - begin)
            else:
                some[:] = where[position - begin : high - begin]
            position, i = high, i + 1

    def hint(self, ranges: Iterable[Range], *, payload: bool) -> None:
        """Place complete files for readers that do not use `reading`.

        Other hints do nothing, because the bytes are in memory.
        """
        if payload or list(ranges) != [(0, self.size)]:
            return
        with open(self.folder.root / self.name, "r+b") as file:
            for low in range(0, self.size, CHUNK):
                room = bytearray(min(CHUNK, self.size - low))
                self.fill(memoryview(room), low)
                file.write(room)

    def want(self, ranges: Iterable[Range]) -> None:
        """Nothing is fetched that is not read."""

    def identity(self) -> tuple[int, int, int, int]:
        commit = self.folder.memory.commit
        what = f"{self.folder.memory.job.ident} {commit.shards[0].run} {self.name}"
        return self.size, commit.generation, int.from_bytes(blake2b(what.encode(), digest_size=7).digest()), 0

    @property
    def listed_by(self) -> SnapshotFolder:
        return self.folder


def get_snapshot_file(path: Path) -> SnapshotFile | None:
    """The file of a vault at a path; None: it is none."""
    try:
        found = remote_of(os.stat(path))
    except OSError:
        return None
    return found if isinstance(found, SnapshotFile) else None


def open_generation(home: Path, generation: int | None = None) -> Memory:
    """A generation of a vault, by default the newest committed one.

    Raises: UcplError E692.
    """
    job = read_job(home)
    if job is None:
        reject_no_vault(home)
    found = get_commits(home, job)
    chosen = next((one for one in found if generation in (None, one.generation)), None)
    if chosen is None:
        there = ", ".join(str(one.generation) for one in found) or "none"
        what = "nothing is committed" if generation is None else f"generation {generation} is not committed"
        names = {name for where in get_domains(home, job) if isinstance(where, LocalDomain) for name in where.names()}
        damaged = sorted(name for name in names if COMMIT.fullmatch(name))
        if damaged and not found:
            what = f"the commit records are damaged in all domains: {', '.join(damaged[:3])}"
        elif generation in get_damaged_newer(home, found):
            what = f"the commit record of generation {generation} is damaged: commit.{generation}.json"
        fail("E692", f"{home}: {what}", Label(str(home), f"committed: {there}"))
    some = get_replay_chain(chosen, found)
    if len(some) != chosen.depth + 1:
        what = (
            f"{home}: generation {chosen.generation} is replayed from {chosen.depth} earlier ones, and some are missing"
        )
        fail("E692", what, Label(str(home), f"there: {', '.join(str(one.generation) for one in some)}"))
    for commit in some:
        _check_complete(home, commit)
    *before, newest = (Memory(home, job, one) for one in some)
    return evolve(newest, before=tuple(before)) if before else newest


def _check_complete(home: Path, commit: Commit) -> None:
    """Reject a request for files of a generation with gradients alone.

    Raises: UcplError E692.
    """
    try:
        if commit.depth:
            list(commit.read())
        else:
            commit.files()
    except ValueError as error:
        what = f"{home}: parts of {error} are missing or overlap in generation {commit.generation}"
        fail("E692", what, Label(str(home), where=str(error)))


def snapshot_folder(url: str) -> Path:
    """The local folder for `vault:ROOT/JOB` or `vault:ROOT/JOB@GENERATION`.

    Raises: UcplError E691, E692.
    """
    memory = open_generation(*_parted(url))
    try:
        return lay_out(memory, url).root
    except OSError as error:
        where = error.filename or str(memory.home)
        fail("E692", f"{url} cannot be shown as a folder: {error.strerror or error}", Label(os.fsdecode(where)))


def get_skipped(url: str) -> tuple[str, ...]:
    """Generations that may be newer than a URL's, with the reasons.

    Empty if the URL names a generation.
    """
    home, generation = _parted(url)
    if generation is not None:
        return ()
    return tuple(
        f"generation {number} of {home} is newer and not read: {why}"
        for number, why in get_unreadable_newer(home).items()
    )


def _parted(url: str) -> tuple[Path, int | None]:
    text = url.removeprefix(f"{SCHEME}:")
    path, at, number = text.rpartition("@")
    named = (
        bool(at) and number.isascii() and number.isdigit() and len(number) <= DIGITS_MAX and not os.path.lexists(text)
    )
    home = Path(path if named else text).absolute()  # a later reader may have another current folder
    return home, int(number) if named else None


def pin_generation(url: str) -> str:
    """The URL with its current generation. Raises: UcplError E692.

    The newest generation may change at any time.
    """
    home, generation = _parted(url)
    return url if generation is not None else f"{url}@{open_generation(home).commit.generation}"


def lay_out(memory: Memory, url: str) -> SnapshotFolder:
    """Create files with names and sizes in a temporary folder.

    Raises: OSError.
    """
    root = cache_dirs.fresh() / (memory.job.name or "vault")
    root.mkdir()
    found = SnapshotFolder(memory, url, root)
    current_scope().callback(memory.close)
    current_scope().enter_context(calling(str(root), url))
    register = sparse_file_registry()
    for name, parts in memory.whole.commit.files().items():
        stored = found.files[name] = SnapshotFile(found, name, parts)
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(fd, stored.size)
            register(os.fstat(fd), stored)
        finally:
            os.close(fd)
    return found
