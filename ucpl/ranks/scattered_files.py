"""A source on several hosts' disks, as one folder for all.

Each host has some of the files. All ranks list their files. If the lists are equal, nothing is done. Otherwise a
missing file is a sparse file, whose bytes come from a rank that has it. A rank reads its own files itself. `near` lists
the ranks that have a file, so that results are computed near their sources.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from hashlib import blake2b
from pathlib import Path
from secrets import token_hex
from typing import Protocol

import xxhash
from attrs import field

from ucpl.errors import Label, UcplError, calling, fail
from ucpl.records import define, frozen
from ucpl.runtime.process_group import ProcessGroup
from ucpl.storage import cache_dirs
from ucpl.storage.authentication import Connector, Listener, TlsConnector, TlsListener, UnixConnector, UnixListener
from ucpl.storage.cache_dirs import current_scope
from ucpl.storage.keys import Keys
from ucpl.storage.reading import Range, identity_of, sparse_file_registry
from ucpl.storage.wire import Question, QuestionClient, QuestionServer, Session

__all__ = [
    "AnyTeam", "Ends", "LocalFiles", "check_copies", "copies_differ", "ends_of", "one_folder", "BLOCK", "Peer",
    "FileServer", "host_mark", "own_host",
]  # fmt: skip

BLOCK = 4 << 20  # bytes of an answer, at most
Stamp = tuple[int, int]  # size, time in ns


def own_host(other: str) -> str:
    """This host's address as `other` would see it. Nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((other, 9))
            host: str = probe.getsockname()[0]
        except OSError:
            host = socket.gethostbyname(socket.gethostname())
        return host


def host_mark() -> str:
    """A text that is equal for processes that share Unix sockets.

    They run on one host as one user.
    """
    if not hasattr(socket, "SO_PEERCRED"):
        return token_hex(16)
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        network = os.stat("/proc/self/ns/net").st_ino
    except OSError:
        return token_hex(16)
    return f"{boot} {network} {os.geteuid()}"


def stamp_of(path: Path) -> Stamp:
    """The stamp of a file; of a shadow, its object's.

    Raises: OSError.
    """
    status = os.stat(path)
    known = identity_of(status)
    return (status.st_size, status.st_mtime_ns) if known is None else known[:2]


class FileServer:
    """Serves `files`, by their names, until it is closed."""

    def __init__(self, files: Mapping[str, Path], door: Listener) -> None:
        """Listen for other ranks. Raises: OSError, if this host cannot listen."""
        self._files = dict(files)
        self._answers = QuestionServer(door, self._answer)
        self.address = self._answers.address

    def _answer(self, asked: Question, _: Session) -> bytes:
        """Answer one question.

        Raises: OSError; LookupError, TypeError for another form.
        """
        if isinstance(names := asked.get("stamps"), list):
            return json.dumps([stamp_of(self._files[name]) for name in names]).encode()
        name, low, high = asked["name"], asked["low"], asked["high"]
        if not isinstance(name, str) or not isinstance(low, int) or not isinstance(high, int):
            raise TypeError(name)
        return self._bytes(name, low, high)

    def _bytes(self, name: str, low: int, high: int) -> bytes:
        fd = os.open(self._files[name], os.O_RDONLY | os.O_CLOEXEC)
        try:
            return os.pread(fd, min(high - low, BLOCK), low)
        finally:
            os.close(fd)

    def close(self) -> None:
        self._answers.close()


@define(eq=False)
class Peer:
    """Another rank's files."""

    rank: int
    way: Connector
    count: Callable[[int], None]  # gets the number of received bytes
    look: Callable[[], None] = lambda: None  # called while an answer does not come; its error ends the question
    _line: QuestionClient = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._line = QuestionClient(self.way, f"rank {self.rank}, which has it,")

    def read(self, name: str, views: Sequence[memoryview], position: int) -> int:
        """As os.preadv of the file. Raises: OSError."""
        done = 0
        for view in views:
            at = 0
            while at < len(view):
                low = position + done
                question = {"name": name, "low": low, "high": low + min(len(view) - at, BLOCK)}
                data = self._line.ask(question, self.look)
                if not data:
                    return done
                view[at : at + len(data)] = data
                at += len(data)
                done += len(data)
                self.count(len(data))
        return done

    def stamps(self, names: Sequence[str]) -> list[Stamp]:
        """Current sizes and times of files. Raises: OSError."""
        stamps_found = json.loads(self._line.ask({"stamps": list(names)}, self.look))
        return [(int(size), int(time)) for size, time in stamps_found]

    def close(self) -> None:
        self._line.close()


END = 1 << 16  # bytes of the beginning and of the end of a file that distinguish copies of it
Listing = dict[str, Stamp]


class LocalFiles(Protocol):
    """The team, and the owner of each file."""

    near: Mapping[str, Sequence[int]]
    received: int


class AnyTeam(Protocol):
    """The part of a team that compares the files of its members."""

    @property
    def rank(self) -> int: ...

    def all(self, mine: object) -> list[object]: ...


Ends = dict[str, tuple[int, str]]  # of files by name: the size, and a digest of the first and last bytes


def list_files(source: Path) -> Listing:
    """Files of a folder by their relative names.

    A single file has the empty name. Raises: OSError.
    """
    if source.is_file():
        return {"": stamp_of(source)}
    found: Listing = {}
    for top, _, names in os.walk(source):
        for name in names:
            path = Path(top, name)
            if path.is_file():
                found[path.relative_to(source).as_posix()] = stamp_of(path)
    return found


@contextmanager
def one_folder(team: ProcessGroup, place: LocalFiles, source: Path, keys: Path | None = None) -> Iterator[Path]:
    """The source as every rank can read it.

    The source itself, if all have it, else a folder that represents it. Every rank reads files of a store from there.
    keys: of this host, for files on several hosts. Raises: UcplError E621, E625, E628, E687.
    """
    mine = list_files(source)
    objects = {name: identity_of(os.stat(source / name if name else source)) for name in mine}
    digest = blake2b(repr((sorted(mine.items()), sorted(objects.items()))).encode(), digest_size=16).hexdigest()
    if len(set(team.all(digest))) == 1:
        yield source
        return
    if any(objects.values()):
        what = f"{source} is not the same to all ranks: it is being written"
        fail("E625", what, Label(str(source)), remedy="Wait until the checkpoint is complete, then run again.")
    every = [_listing(told) for told in team.all(mine)]
    holders: dict[str, list[int]] = {}
    for rank, one in enumerate(every):
        for name in one:
            holders.setdefault(name, []).append(rank)
    check_copies(team, {name: source / name if name else source for name in mine}, str(source), every)
    if all(len(ranks) == team.size for ranks in holders.values()):  # every rank has all files
        yield source
        return
    server: FileServer | None = None
    meeting = _Meeting.of(team, keys)
    try:
        files = {name: source / name if name else source for name in mine}
        server = FileServer(files, meeting.door)
        ways = meeting.ways(team, server)
        view = _FolderView(team.rank, every, holders, files)

        def count(size: int) -> None:
            place.received += size

        view.peers = {rank: Peer(rank, way, count, team.look) for rank, way in enumerate(ways) if rank != team.rank}
        root = view.laid(source)
        place.near = {str(root / name if name else root): ranks for name, ranks in holders.items()}
        yield root
        with suppress(UcplError):  # this rank has done all its work; a dead rank asks for nothing
            team.all("read")  # until then another one may ask
    finally:
        if server is not None:
            server.close()


@frozen(eq=False)
class _Meeting:
    """Connections between ranks.

    The job's store has their addresses, and anybody may read it; it has no secret.
    """

    door: Listener
    keys: Keys | None  # None: all are processes of one user on one host

    @classmethod
    def of(cls, team: ProcessGroup, folder: Path | None) -> _Meeting:
        """All ranks call it. Raises: UcplError E621, E628, E687."""
        marks = team.all([host_mark(), folder is not None])
        if len({mark for mark, _ in map(_pair, marks)}) == 1:
            return cls(UnixListener(f"ucpl-{token_hex(16)}"), None)
        lacking = [rank for rank, (_, has_keys) in enumerate(map(_pair, marks)) if not has_keys]
        if lacking:
            ranks = ", ".join(map(str, lacking[:8])) + (" and others" if len(lacking) > 8 else "")
            fail("E628", f"ranks have different files of the source, and no keys: {ranks}", Label(f"rank {lacking[0]}"))
        assert folder is not None
        keys = Keys(folder)
        keys.demand(None, "a host of this job")
        host = own_host(os.environ.get("MASTER_ADDR", "127.0.0.1"))
        return cls(TlsListener((host, 0), keys, None), keys)

    def ways(self, team: ProcessGroup, server: FileServer) -> list[Connector]:
        """To the server of each rank, by rank. Raises: UcplError E621."""
        if self.keys is None:
            assert isinstance(self.door, UnixListener)
            return [UnixConnector(str(name)) for name in team.all(self.door.name)]
        told = map(_pair, team.all(list(server.address[:2])))
        return [TlsConnector((str(host), int(str(port))), self.keys, None) for host, port in told]


def _pair(told: object) -> tuple[object, object]:
    assert isinstance(told, list)
    return told[0], told[1]


def _listing(told: object) -> Listing:
    assert isinstance(told, dict)
    return {str(name): (int(size), int(time)) for name, (size, time) in told.items()}


def check_copies(team: AnyTeam, mine: Mapping[str, Path], source: str, every: Sequence[Listing] | None = None) -> None:
    """Check that files of one name on several ranks are copies.

    They have one size and, if their times differ, equal ends. Collective.

    mine: this rank's, by name. every: those of each rank, if known. Raises: UcplError E625.
    """
    if every is None:
        every = [_listing(told) for told in team.all({name: stamp_of(path) for name, path in mine.items()})]
    first: dict[str, Stamp] = {}
    unsure = set()
    for one in every:
        for name, stamp in one.items():
            if stamp != first.setdefault(name, stamp):
                unsure.add(name)
    if unsure:
        told = team.all(ends_of({name: path for name, path in mine.items() if name in unsure}))
        copies_differ([_ends_from(one) for one in told], source)


def ends_of(files: Mapping[str, Path]) -> Ends:
    """Raises: OSError."""
    return {name: (os.stat(path).st_size, _ends(path)) for name, path in sorted(files.items())}


def copies_differ(every: Sequence[Ends], source: str) -> None:
    """Refuse different files.

    Raises: UcplError E625 for the first file that differs on another rank.
    """
    first: dict[str, tuple[int, tuple[int, str]]] = {}
    for rank, one in enumerate(every):
        for name, mark in one.items():
            there, known = first.setdefault(name, (rank, mark))
            if mark != known:
                sizes = f"{known[0]} bytes", f"{mark[0]} bytes"
                path = f"{source}/{name}" if name else source
                what = f"{path} is not the same file on rank {there} and on rank {rank}"
                said = sizes if known[0] != mark[0] else ("other bytes", "than there")
                fail("E625", what, *(Label(f"rank {r}", s) for r, s in zip((there, rank), said, strict=True)))


def _ends_from(told: object) -> Ends:
    assert isinstance(told, dict)
    return {str(name): (int(size), str(digest)) for name, (size, digest) in told.items()}


def _ends(path: Path) -> str:
    """A digest of a file's first and last bytes.

    Archives have the CRCs of all their content at the end.
    """
    with open(path, "rb") as file:
        state = xxhash.xxh3_128(file.read(END))
        file.seek(max(0, os.fstat(file.fileno()).st_size - END))
        state.update(file.read(END))
    return state.hexdigest()


@define(eq=False)
class _FolderView:
    """All files as one rank sees them."""

    rank: int
    every: Sequence[Listing]
    holders: Mapping[str, Sequence[int]]
    files: Mapping[str, Path]  # of this rank
    peers: dict[int, Peer] = field(factory=dict)
    now: dict[str, Stamp | None] = field(factory=dict)

    def laid(self, source: Path) -> Path:
        """The folder that represents the source.

        Raises: OSError.
        """
        root = cache_dirs.fresh() / (source.name or "source")
        current_scope().enter_context(calling(str(root), str(source)))
        register = sparse_file_registry()
        for name, ranks in sorted(self.holders.items()):
            path = root / name if name else root
            path.parent.mkdir(parents=True, exist_ok=True)
            self.now[name] = self.first(name)
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                os.ftruncate(fd, self.first(name)[0])
                register(os.fstat(fd), _ScatteredFile(self, name, self.rank if self.rank in ranks else ranks[0]))
            finally:
                os.close(fd)
        return root

    def first(self, name: str) -> Stamp:
        """The facts of a file from the first rank that has it."""
        return self.every[self.holders[name][0]][name]

    def look_again(self) -> None:
        """True if all files are unchanged.

        Raises: OSError.
        """
        by_rank: dict[int, list[str]] = {}
        for name, ranks in self.holders.items():
            by_rank.setdefault(self.rank if self.rank in ranks else ranks[0], []).append(name)
        for rank, names in by_rank.items():
            found = [stamp_of(self.files[n]) for n in names] if rank == self.rank else self.peers[rank].stamps(names)
            for name, stamp in zip(names, found, strict=True):
                self.now[name] = self.first(name) if stamp == self.every[rank][name] else stamp


@frozen(eq=False)
class _ScatteredFile:
    """One file: on this rank's disk, or on another's."""

    view: _FolderView
    name: str
    rank: int  # that it is read from

    def read(self, fd: int, views: Sequence[memoryview], position: int) -> int:
        if self.rank != self.view.rank:
            return self.view.peers[self.rank].read(self.name, views, position)
        here = os.open(self.view.files[self.name], os.O_RDONLY | os.O_CLOEXEC)
        try:
            return os.preadv(here, views, position)
        finally:
            os.close(here)

    def hint(self, ranges: Iterable[Range], *, payload: bool) -> None:
        """No hint is used: bytes are requested when they are read."""

    def want(self, ranges: Iterable[Range]) -> None:
        """Nothing is fetched that is not read."""

    def identity(self) -> tuple[int, int, int, int]:
        stamp = self.view.now[self.name]
        assert stamp is not None
        return *stamp, int.from_bytes(blake2b(self.name.encode(), digest_size=7).digest()), 0

    @property
    def listed_by(self) -> _FolderView:
        return self.view
