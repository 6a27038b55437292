"""Questions and answers between processes on several hosts: JSON one way, bytes the other, and a secret that both know.

Who does not know the secret is told nothing. Nothing is encrypted, and no pickle goes either way.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener, answer_challenge, deliver_challenge
from typing import TypeAlias

from attrs import field

from ucpl.errors import UcplError
from ucpl.records import define

__all__ = ["Address", "Answerer", "Line", "Question", "Session", "Silence", "hang_up"]

Address = tuple[str, int]
Question: TypeAlias = Mapping[str, object]
EVERY = 0.2  # seconds between two looks whether who is asked is there
STALLED = 6.0  # seconds for which a message that has begun, or a greeting, may stand still
PAUSE = 0.02  # seconds, where a caller could not be heard
STRANGERS = 64  # who may greet at once
HOLDS = 10.0  # seconds for which who holds something may ask nothing: after that it holds it no more


class Silence(OSError):
    """No answer comes."""

    def __init__(self, said: str) -> None:
        super().__init__(5, said)


@define(eq=False)
class Session:
    """What one connection holds: it is let go of when the connection ends."""

    ends: ExitStack = field(factory=ExitStack)
    holds: set[str] = field(factory=set)


class Answerer:
    """Answers questions, each connection in a thread of its own, until it is closed."""

    def __init__(
        self, address: Address, secret: bytes, answer: Callable[[Question, Session], bytes], most: int = 1 << 24
    ) -> None:
        """answer: may raise OSError, which is told; whatever else it raises ends the connection. most: bytes of a question.

        Raises: OSError, where this host cannot listen there.
        """
        self._secret, self._answer, self._most = secret, answer, most
        self._listener = Listener(address, backlog=64)
        self.address: Address = self._listener.address
        self._is_open = True
        self._open: set[Connection] = set()
        self._strangers = threading.Semaphore(STRANGERS)
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._accept, name="ucpl-serves", daemon=True)
        self._thread.start()

    def _accept(self) -> None:
        while self._is_open:
            try:
                connection = self._listener.accept()
            except (OSError, EOFError):  # closed; whoever called is gone already; no descriptor is left
                time.sleep(PAUSE)
                continue
            if not self._strangers.acquire(blocking=False):  # so many have not greeted yet
                connection.close()
                continue
            try:
                threading.Thread(target=self._serve, args=(connection,), name="ucpl-serving", daemon=True).start()
            except RuntimeError:  # no thread is left
                self._strangers.release()
                connection.close()

    def _serve(self, connection: Connection) -> None:
        """What is no question, or comes from whoever does not know the secret, ends the connection."""
        session = Session()
        ended = (
            OSError,
            EOFError,
            AuthenticationError,
            ValueError,
            LookupError,
            TypeError,
            AssertionError,
            RecursionError,
        )
        with self._kept(connection), session.ends, suppress(*ended):
            try:
                _bound(connection)
                _option(connection, socket.SO_KEEPALIVE, 1)  # a host that is gone says nothing
                deliver_challenge(connection, self._secret)
                answer_challenge(connection, self._secret)
            finally:
                self._strangers.release()
            while self._is_open:
                if not connection.poll(HOLDS if session.holds else None):
                    return
                question = json.loads(connection.recv_bytes(self._most))
                if not isinstance(question, dict):
                    return
                try:
                    connection.send_bytes(b"+" + self._answer(question, session))
                except OSError as error:
                    connection.send_bytes(b"-" + (error.strerror or str(error)).encode())

    @contextmanager
    def _kept(self, connection: Connection) -> Iterator[None]:
        with self._lock:
            self._open.add(connection)
        try:
            yield
        finally:
            with self._lock:
                self._open.discard(connection)
                connection.close()

    def close(self) -> None:
        self._is_open = False
        with self._lock:
            for connection in self._open:
                hang_up(connection)
        host = self.address[0] if self.address[0] not in ("0.0.0.0", "") else "127.0.0.1"
        with suppress(OSError, AuthenticationError, EOFError):  # wakes who waits for a caller
            Client((host, self.address[1])).close()
        self._thread.join(1.0)
        self._listener.close()


@define(eq=False)
class Line:
    """To one who answers, over connections that are kept: one for each thread that asks at once."""

    address: Address
    secret: bytes = field(repr=False)
    who: str  # "rank 3, which has it,": begins what is said where it does not answer
    _idle: list[Connection] = field(factory=list)
    _lock: threading.Lock = field(factory=threading.Lock)

    def ask(self, question: Question, look: Callable[[], None] = lambda: None) -> bytes:
        """look: called while an answer does not come; what it raises ends the question. Raises: OSError."""
        connection = self.taken()
        answer = self.asked(connection, question, look)
        self.free(connection)
        return self.told(answer)

    def free(self, connection: Connection) -> None:
        """It may be another's to ask over."""
        with self._lock:
            self._idle.append(connection)

    def asked(self, connection: Connection, question: Question, look: Callable[[], None] = lambda: None) -> bytes:
        """The answer over one connection, which is closed where none comes. Raises: Silence."""
        try:
            connection.send_bytes(json.dumps(question).encode())
            while not connection.poll(EVERY):
                look()
            return connection.recv_bytes()
        except (OSError, EOFError) as error:
            connection.close()
            raise Silence(f"{self.who} does not answer") from error
        except UcplError:
            connection.close()
            raise

    def told(self, answer: bytes) -> bytes:
        """Raises: OSError, where the answer is that it cannot be."""
        if answer[:1] != b"+":
            raise OSError(5, f"{self.who} says: {answer[1:].decode(errors='replace')}")
        return answer[1:]

    def taken(self) -> Connection:
        """A connection of the caller's own. Raises: Silence."""
        with self._lock:
            if self._idle:
                return self._idle.pop()
        try:
            with socket.create_connection(self.address, timeout=STALLED) as channel:
                channel.settimeout(None)
                channel.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                connection = Connection(os.dup(channel.fileno()))
            try:
                _bound(connection)
                answer_challenge(connection, self.secret)
                deliver_challenge(connection, self.secret)
            except BaseException:
                connection.close()
                raise
            return connection
        except (AuthenticationError, AssertionError, ValueError) as error:
            raise Silence(f"{self.who} has another secret, and does not answer") from error
        except (OSError, EOFError) as error:
            raise Silence(f"{self.who} does not answer at {self.address[0]}") from error

    def close(self) -> None:
        with self._lock:
            for connection in self._idle:
                connection.close()
            self._idle.clear()


def hang_up(connection: Connection) -> None:
    """End it for both sides at once, whoever else has its descriptor: a process that was forked meanwhile."""
    with suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as channel:
        channel.shutdown(socket.SHUT_RDWR)


def _bound(connection: Connection) -> None:
    """Whoever stands still within a message is not waited for: reading and writing end with an OSError."""
    seconds = struct.pack("@ll", int(STALLED), int(STALLED % 1 * 1e6))
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        _option(connection, option, seconds)


def _option(connection: Connection, option: int, value: int | bytes) -> None:
    with socket.socket(fileno=os.dup(connection.fileno())) as channel:
        channel.setsockopt(socket.SOL_SOCKET, option, value)
