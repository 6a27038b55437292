"""Bytes of files that another rank has on a disk of its own: each rank serves its files by range to the ranks of its job.

Who connects must know the job's secret. Only files that were listed are served, and nothing but their bytes and their sizes
and times: no pickle goes either way.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener, answer_challenge, deliver_challenge
from pathlib import Path

from attrs import field

from ucpl.errors import UcplError
from ucpl.records import define
from ucpl.remotes.reading import identity_of

__all__ = ["BLOCK", "Address", "Peer", "Server", "own_host"]

BLOCK = 4 << 20  # bytes of an answer, at most
ASKED_MAX = 1 << 24  # bytes of a question
EVERY = 0.2  # seconds between two looks whether who is asked is there
STALLED = 6.0  # seconds for which a message that has begun, or a greeting, may stand still
Address = tuple[str, int]
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


def stamp_of(path: Path) -> Stamp:
    """Of what stands for an object in a store: the object's. Raises: OSError."""
    status = os.stat(path)
    known = identity_of(status)
    return (status.st_size, status.st_mtime_ns) if known is None else known[:2]


class Server:
    """Serves `files`, by their names, until it is closed."""

    def __init__(self, files: Mapping[str, Path], host: str, secret: bytes) -> None:
        """Raises: OSError, where this host cannot listen there."""
        self._files = dict(files)
        self._secret = secret
        self._listener = Listener((host, 0), backlog=64)
        self.address: Address = self._listener.address
        self._is_open = True
        self._thread = threading.Thread(target=self._accept, name="ucpl-serves", daemon=True)
        self._thread.start()

    def _accept(self) -> None:
        while self._is_open:
            try:
                connection = self._listener.accept()
            except (OSError, EOFError):  # closed; or whoever called is gone already
                continue
            threading.Thread(target=self._answer, args=(connection,), name="ucpl-serving", daemon=True).start()

    def _answer(self, connection: Connection) -> None:
        """What is no question, or comes from whoever does not know the secret, ends the connection."""
        with connection, suppress(OSError, EOFError, AuthenticationError, ValueError, LookupError, TypeError):
            deliver_challenge(connection, self._secret)
            answer_challenge(connection, self._secret)
            while self._is_open:
                try:
                    asked = json.loads(connection.recv_bytes(ASKED_MAX))
                    if "stamps" in asked:
                        stamps = [stamp_of(self._files[name]) for name in asked["stamps"]]
                        connection.send_bytes(b"+" + json.dumps(stamps).encode())
                    else:
                        connection.send_bytes(b"+" + self._bytes(asked["name"], asked["low"], asked["high"]))
                except OSError as error:
                    connection.send_bytes(b"-" + (error.strerror or str(error)).encode())

    def _bytes(self, name: str, low: int, high: int) -> bytes:
        fd = os.open(self._files[name], os.O_RDONLY | os.O_CLOEXEC)
        try:
            return os.pread(fd, min(high - low, BLOCK), low)
        finally:
            os.close(fd)

    def close(self) -> None:
        self._is_open = False
        with suppress(OSError, AuthenticationError, EOFError):  # wakes who waits for a caller
            Client(self.address).close()
        self._thread.join(1.0)
        self._listener.close()


@define(eq=False)
class Peer:
    """Another rank's files, asked for over connections that are kept: one for each thread that reads at once."""

    rank: int
    address: Address
    secret: bytes
    count: Callable[[int], None]  # told how many bytes came
    look: Callable[[], None] = lambda: None  # called while an answer does not come; what it raises ends the question
    _idle: list[Connection] = field(factory=list)
    _lock: threading.Lock = field(factory=threading.Lock)

    def read(self, name: str, views: Sequence[memoryview], position: int) -> int:
        """As os.preadv of the file. Raises: OSError."""
        done = 0
        for view in views:
            at = 0
            while at < len(view):
                low = position + done
                data = self._asked({"name": name, "low": low, "high": low + min(len(view) - at, BLOCK)})
                if not data:
                    return done
                view[at : at + len(data)] = data
                at += len(data)
                done += len(data)
                self.count(len(data))
        return done

    def stamps(self, names: Sequence[str]) -> list[Stamp]:
        """Sizes and times of files, as they are now. Raises: OSError."""
        told = json.loads(self._asked({"stamps": list(names)}))
        return [(int(size), int(time)) for size, time in told]

    def _asked(self, question: Mapping[str, object]) -> bytes:
        connection = self._connection()
        try:
            connection.send_bytes(json.dumps(question).encode())
            while not connection.poll(EVERY):
                self.look()
            answer = connection.recv_bytes()
        except (OSError, EOFError) as error:
            connection.close()
            raise OSError(5, f"rank {self.rank}, which has it, does not answer") from error
        except UcplError:
            connection.close()
            raise
        with self._lock:
            self._idle.append(connection)
        if answer[:1] != b"+":
            raise OSError(5, f"rank {self.rank}, which has it, says: {answer[1:].decode(errors='replace')}")
        return answer[1:]

    def _connection(self) -> Connection:
        with self._lock:
            if self._idle:
                return self._idle.pop()
        try:
            connection = Client(self.address)
            try:
                _bound(connection)
                answer_challenge(connection, self.secret)
                deliver_challenge(connection, self.secret)
            except BaseException:
                connection.close()
                raise
            return connection
        except (OSError, EOFError, AuthenticationError) as error:
            raise OSError(5, f"rank {self.rank}, which has it, does not answer at {self.address[0]}") from error

    def close(self) -> None:
        with self._lock:
            for connection in self._idle:
                connection.close()
            self._idle.clear()


def _bound(connection: Connection) -> None:
    """Whoever stands still within a message is not waited for: reading and writing end with an OSError."""
    seconds = struct.pack("@ll", int(STALLED), int(STALLED % 1 * 1e6))
    with socket.socket(fileno=os.dup(connection.fileno())) as channel:
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            channel.setsockopt(socket.SOL_SOCKET, option, seconds)
