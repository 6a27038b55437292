"""The servers of a vault's other hosts, and their addresses."""

from __future__ import annotations

import json
import math
import os
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from attrs import field

from ucpl.errors import Label, fail
from ucpl.records import define
from ucpl.storage.authentication import Address, TlsListener
from ucpl.storage.keys import READER, Keys, any_name, names_of
from ucpl.storage.vaults.checksummed_text import read_sealed
from ucpl.storage.vaults.domains import LocalDomain, hold_lock
from ucpl.storage.vaults.hosts import LOCK, Hosts, hosts_at, table_of
from ucpl.storage.vaults.records import Commit, Job
from ucpl.storage.vaults.remote_domain import BLOCK, RemoteDomain
from ucpl.storage.wire import Question, QuestionServer, Session

if TYPE_CHECKING:
    from ucpl.storage.authentication import Address
    from ucpl.storage.vaults.records import Job

__all__ = ["Peers", "PeerService"]

_RANK = r"r(?:0|[1-9][0-9]{0,6})"
_NAME = re.compile(
    rf"job\.json|commit\.(?:0|[1-9][0-9]{{0,15}})\.json|(?:{_RANK}|p)\.s(?:0|[1-9][0-9]?)(?:\.json)?|{_RANK}\.run\.json"
)
WAIT_MAX = 60.0  # seconds for which a lock may be waited for
QUESTION_MAX = 1 << 30  # bytes: the text of a commit record
READERS_MAX = 1 << 16  # bytes of a question of a host without a domain


class PeerService:
    """Answers for one domain until it is closed."""

    def __init__(self, home: Path, number: int, job: Job, port: int, keys: Keys) -> None:
        """Raises: OSError, if this host cannot listen there."""
        self.home, self.job, self.here = home, job, LocalDomain(home, number)
        self._table = threading.Lock()
        self._members = any_name(home.name, len(job.domains)) - names_of(home.name, READER)
        door = TlsListener(("0.0.0.0", port), keys, any_name(home.name, len(job.domains)))
        self._answers = QuestionServer(
            door, self._answer, lambda names: QUESTION_MAX if names & self._members else READERS_MAX
        )

    def close(self) -> None:
        self._answers.close()

    def hear(self, at: tuple[Address, ...], seats: tuple[int, ...]) -> Hosts:
        """Merge the list of hosts that another host has. Raises: OSError."""
        with self._table, hold_lock(self.home / LOCK, wait=WAIT_MAX):
            hosts = hosts_at(self.home)
            if hosts is None:
                raise FileNotFoundError(2, "the list of hosts is gone")
            merged = hosts.with_all(at, seats)
            if merged != hosts:
                merged.write(self.home)
            return merged

    def _answer(self, request: Question, session: Session) -> bytes:
        """Answer a question.

        Raises: OSError, which is reported to the peer; ValueError, LookupError, TypeError if it is malformed.
        """
        if request.get("domain") != self.here.number:
            raise OSError(5, f"here is d{self.here.number}")
        if (request["op"] in ("lock", "commit") or "at" in request) and not session.names & self._members:
            raise OSError(13, "a reader changes nothing")
        match request["op"]:
            case "hosts":
                at, seats = table_of(dict(request)) if "at" in request else ((), ())
                return json.dumps(self.hear(at, seats).to_table()).encode()
            case "names":
                return json.dumps([name for name in os.listdir(self.here.folder) if _NAME.fullmatch(name)]).encode()
            case "text":
                return self._text(_name(request), str(request["stamp"]))
            case "size":
                return str(self.here.size(_name(request))).encode()
            case "bytes":
                return self._bytes(_name(request), _whole(request, "low"), _whole(request, "high"))
            case "lock":
                return self._lock(request, session)
            case "commit":
                return self._commit(_whole(request, "generation"), str(request["text"]).encode(), session)
        raise ValueError(request["op"])

    def _text(self, name: str, stamp: str) -> bytes:
        """The stamp of a text, and the text if it changed.

        It changed if the caller has another stamp. The text begins after the end of the first line.

        No stamp if there is no such text.
        """
        path = self.here.folder / name
        try:
            state = os.lstat(path)
        except (FileNotFoundError, NotADirectoryError):
            return b"\n"
        now = f"{state.st_dev}.{state.st_ino}.{state.st_mtime_ns}.{state.st_size}"
        if now == stamp:
            return now.encode() + b"\n"
        data = read_sealed(path)
        return now.encode() + b"\n" + data if data is not None else b"\n"

    def _bytes(self, name: str, low: int, high: int) -> bytes:
        fd = os.open(self.here.folder / name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            return os.pread(fd, min(max(high - low, 0), BLOCK), low)
        finally:
            os.close(fd)

    def _lock(self, request: Question, session: Session) -> bytes:
        """Lock commits for a caller, until its connection ends or is idle."""
        hosts, by = hosts_at(self.home), request["by"]
        if hosts is None or not isinstance(by, list) or len(by) != len(hosts.seats):
            raise OSError(5, "another vault is here")
        for number, (theirs, ours) in enumerate(zip(by, hosts.seats, strict=True)):
            if type(theirs) is not int or theirs < ours:
                where = ":".join(map(str, hosts.at[number]))
                raise OSError(5, f"d{number} is now served by {where}")
        if session.holds:
            return b"0"
        wait = request["wait"]
        seconds = float(wait) if isinstance(wait, int | float) and math.isfinite(wait) else 0.0
        lock = self.here.locked(min(seconds, WAIT_MAX))
        if not lock.__enter__():
            lock.__exit__(None, None, None)
            return b"0"
        session.ends.push(lock)
        session.holds.add("commit")
        return b"1"

    def _commit(self, generation: int, text: bytes, session: Session) -> bytes:
        if "commit" not in session.holds:
            raise OSError(5, "the lock is not held")
        found = Commit.of(text, self.job)
        if found is None or found.generation != generation:
            raise OSError(5, "this is no generation of the vault")
        self.here.put_commit(generation, text, self.job)
        return b""


def _name(request: Question) -> str:
    name = request["name"]
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ValueError(name)
    return name


def _whole(request: Question, what: str) -> int:
    value = request[what]
    if type(value) is not int or not 0 <= value < 1 << 62:
        raise ValueError(what)
    return value


EVERY = 2.0  # seconds between two times that the others are asked whom they know


@define(eq=False)
class Peers:
    """The peers of a server.

    Nothing is voted for until each has answered once: it may have a newer committed generation.
    """

    here: LocalDomain
    job: Job
    say: Callable[[str], None]
    seat: int = 0  # when this server took its domain; 0: it has not, yet
    _at: Address | None = None  # its address
    _giving: PeerService | None = None
    _unheard: set[int] = field(factory=set)
    _taken_up: bool = False
    _heard: float = 0.0  # time of the last answers
    _reported: str = ""

    @property
    def home(self) -> Path:
        return self.here.folder.parent

    def sit(self, at: Address | None) -> None:
        """Answer the peers from now on.

        at: the address of this server.
        Raises: OSError, UcplError E694.
        """
        hosts = self._hosts()
        number = self.here.number
        self._at = at or hosts.at[number]
        keys = Keys(Path(hosts.keys))
        keys.demand(names_of(self.home.name, f"d{number}"), f"d{number}")
        try:
            self._giving = PeerService(self.home, number, self.job, self._at[1], keys)
        except OSError as error:
            what = f"d{number} of {self.home} cannot answer at port {self._at[1]}: {error.strerror or error}"
            fail(
                "E694",
                what,
                Label(str(self.here.folder)),
                remedy="stop the process that uses the port, or name another port in --hosts",
            )
        others = {n for n in range(len(hosts.at)) if n != number}
        self._take_seat(others - {n for n in others if self._hear(n)})
        self._unheard = others

    def _take_seat(self, unheard: set[int]) -> None:
        """Serve the domain after a peer reported its current server.

        Raises: OSError, UcplError E694.

        Without an answer, this server cannot exclude that it replaces a running one.
        """
        hosts, number = self._hosts(), self.here.number
        if self.seat or (unheard and len(unheard) == len(hosts.at) - 1):
            return
        assert self._giving is not None and self._at is not None
        before = hosts.at[number], hosts.seats[number]
        if before[1] and before[0] != self._at and RemoteDomain(self.home, number, hosts).is_there():
            where = f"{before[0][0]}:{before[0][1]}"
            fail("E694", f"d{number} of {self.home} has a server already, at {where}", Label(str(self.here.folder)))
        self.seat = max(time.time_ns(), before[1] + 1)
        self._giving.hear((*hosts.at[:number], self._at), (*([0] * number), self.seat))
        # Otherwise their mutual requests with the old list are rejected until they receive the new one.
        for other in range(len(hosts.at)):
            if other not in unheard:
                self._hear(other)

    def have_answered(self, then: Callable[[], None]) -> bool:
        """True if all peers have answered and `then` has ended.

        The peers are asked in parallel. `then` runs once, after the answers.

        `then` runs once.

        Raises: OSError, UcplError E694.
        """
        if self._taken_up and time.monotonic() - self._heard < EVERY:
            return True
        self._heard = time.monotonic()
        self._unheard = {n for n in range(len(self._hosts().at)) if not self._hear(n)}
        self._take_seat(self._unheard)
        self._demand_seat()
        if self._taken_up:
            return True
        if not self._unheard:
            then()
            self._taken_up = True
            return True
        waits = ", ".join(f"d{n} at {':'.join(map(str, self._hosts().at[n]))}" for n in sorted(self._unheard))
        if waits != self._reported:
            self._reported = waits
            self.say(f"d{self.here.number}: waits for {waits}")
        return False

    def demand_all(self) -> None:
        """Raises: OSError, if a peer does not answer now."""
        silent = [number for number in range(len(self._hosts().at)) if not self._hear(number)]
        if silent:
            raise OSError(5, f"d{silent[0]} does not answer, and may have the lost data")

    def _demand_seat(self) -> None:
        hosts = self._hosts()
        if self.seat and hosts.seats[self.here.number] > self.seat:
            where = ":".join(map(str, hosts.at[self.here.number]))
            what = f"d{self.here.number} of {self.home} is now served by {where}: this server ends"
            fail("E694", what, Label(str(self.here.folder)))

    def _hear(self, number: int) -> bool:
        """Send a peer the list of hosts, and merge its answer.

        Raises: OSError of this host's own list.
        """
        assert self._giving is not None
        if number == self.here.number:
            return True
        hosts = self._hosts()
        try:
            reply = json.loads(RemoteDomain(self.home, number, hosts).ask({"op": "hosts", **hosts.to_table()}))
            table = table_of(reply)
        except (OSError, ValueError, TypeError, AttributeError):
            return False
        self._giving.hear(*table)
        return True

    def _hosts(self) -> Hosts:
        """Raises: OSError."""
        found = hosts_at(self.home)
        if found is None:
            raise FileNotFoundError(2, "the list of hosts is gone")
        return found

    def close(self) -> None:
        if self._giving is not None:
            self._giving.close()
