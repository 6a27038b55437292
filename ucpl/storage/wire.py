"""Questions and answers between processes over authenticated connections.

A question is JSON, an answer is bytes. A door (`authentication`) authenticates each caller before a byte of a question is read.
No pickle is sent in either direction.
"""

from __future__ import annotations

import json
import os
import select
import socket
import ssl
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from typing import TypeAlias

from attrs import field

from ucpl.errors import UcplError
from ucpl.records import define
from ucpl.storage.authentication import AccessDenied, Address, Connector, Listener
from ucpl.storage.keys import Names

__all__ = [
    "Address",
    "QuestionServer",
    "Channel",
    "QuestionClient",
    "Question",
    "Session",
    "NoAnswer",
    "end_connection",
]

Question: TypeAlias = Mapping[str, object]
EVERY = 0.2  # seconds between two checks of the peer
STALLED = 6.0  # seconds without progress after which a message is abandoned
GREETING = 6.0  # seconds that a greeting may take in all
PAUSE = 0.02  # seconds after a caller that could not be accepted
STRANGERS = 128  # callers that are authenticated at once; a further one replaces the oldest
HOLDS = 10.0  # seconds without a question after which a caller loses its resources
ANSWER_MAX = 1 << 32  # bytes
_LENGTH = struct.Struct("!Q")
_PIECE = 1 << 20  # bytes that are written at once


class NoAnswer(OSError):
    """No answer comes."""

    def __init__(self, said: str) -> None:
        super().__init__(5, said)


class Channel:
    """Messages over a connected socket: eight bytes of length, then the content."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        connection.settimeout(STALLED)

    def fileno(self) -> int:
        return self.socket.fileno()

    def send(self, data: bytes) -> None:
        """Raises: OSError."""
        view = memoryview(_LENGTH.pack(len(data)) + data if len(data) < _PIECE else _LENGTH.pack(len(data)))
        self._write(view)
        if len(data) >= _PIECE:
            self._write(memoryview(data))

    def _write(self, view: memoryview) -> None:
        while view:
            view = view[self.socket.send(view[:_PIECE]) :]

    def receive(self, most: int = ANSWER_MAX) -> bytes:
        """Raises: OSError, EOFError; ValueError of more bytes than that."""
        (size,) = _LENGTH.unpack(self._read(_LENGTH.size))
        if size > most:
            raise ValueError(f"a message of {size} bytes")
        return self._read(size)

    def _read(self, size: int) -> bytes:
        found = bytearray()
        while len(found) < size:  # space for received bytes, not for announced ones
            some = self.socket.recv(min(size - len(found), _PIECE))
            if not some:
                raise EOFError
            found += some
        return bytes(found)

    def poll(self, seconds: float | None) -> bool:
        """True if data arrives within so many seconds.

        None: wait without a limit. Raises: OSError.
        """
        if isinstance(self.socket, ssl.SSLSocket) and self.socket.pending():
            return True
        waits = select.poll()
        waits.register(self.socket, select.POLLIN)
        return bool(waits.poll(None if seconds is None else seconds * 1000))

    def close(self) -> None:
        self.socket.close()


@define(eq=False)
class Session:
    """The resources of one connection; they are released at its end."""

    names: Names = frozenset()  # of the caller
    ends: ExitStack = field(factory=ExitStack)
    holds: set[str] = field(factory=set)


class QuestionServer:
    """A server of questions, with a thread per connection."""

    def __init__(
        self,
        door: Listener,
        answer: Callable[[Question, Session], bytes],
        most: Callable[[Names], int] = lambda _: 1 << 24,
    ) -> None:
        """Listen for callers.

        answer: an OSError of it is reported to the caller; any other error ends the connection.
        most: maximum bytes of a question, by the names of its caller.

        Raises: OSError, if this host cannot listen there.
        """
        self._door, self._answer, self._most = door, answer, most
        self._listener = door.listener()
        self.address = self._listener.getsockname()
        self._is_open = True
        self._open: set[socket.socket] = set()
        # callers during authentication, oldest first, with their addresses
        self._greeted: dict[socket.socket, object] = {}
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._accept, name="ucpl-serves", daemon=True)
        self._thread.start()

    def _accept(self) -> None:
        while self._is_open:
            try:
                plain, peer = self._listener.accept()
            except OSError:  # closed; the caller has disconnected; no descriptor is free
                time.sleep(PAUSE)
                continue
            try:
                plain.settimeout(GREETING)
                caller = self._door.wrap(plain)
            except (OSError, ValueError):  # unreadable keys; the caller has disconnected
                plain.close()
                continue
            with self._lock:
                while len(self._greeted) >= STRANGERS:
                    self._turn_away()
                self._greeted[caller] = peer[0] if isinstance(peer, tuple) else None
                self._open.add(caller)
            try:
                threading.Thread(target=self._serve, args=(caller,), name="ucpl-serving", daemon=True).start()
            except RuntimeError:  # no thread is left
                self._ended(caller)

    def _turn_away(self) -> None:
        """Reject the oldest unauthenticated caller of the busiest address."""
        most = Counter(self._greeted.values()).most_common(1)[0][0]
        oldest = next(caller for caller, where in self._greeted.items() if where == most)
        del self._greeted[oldest]
        end_connection(oldest)

    def _serve(self, caller: socket.socket) -> None:
        """Answer a caller; a malformed question ends the connection.

        So does a caller without access.
        """
        session = Session()
        ended = (OSError, EOFError, ValueError, LookupError, TypeError, AssertionError, RecursionError)
        with self._kept(caller), session.ends, suppress(*ended):
            session.names = self._door.greet(caller)
            with self._lock:
                self._greeted.pop(caller, None)
            channel = Channel(caller)
            while self._is_open:
                if not channel.poll(HOLDS if session.holds else None):
                    return
                question = json.loads(channel.receive(self._most(session.names)))
                if not isinstance(question, dict):
                    return
                try:
                    answer = b"+" + self._answer(question, session)
                except OSError as error:
                    answer = b"-" + (error.strerror or str(error)).encode()
                channel.send(answer)

    @contextmanager
    def _kept(self, caller: socket.socket) -> Iterator[None]:
        try:
            yield
        finally:
            self._ended(caller)

    def _ended(self, caller: socket.socket) -> None:
        with self._lock:
            self._greeted.pop(caller, None)
            self._open.discard(caller)
            caller.close()

    def close(self) -> None:
        self._is_open = False
        end_connection(self._listener)  # wakes the thread that waits for a caller
        with self._lock:
            for caller in self._open:
                end_connection(caller)
        self._thread.join(1.0)
        self._listener.close()


@define(eq=False)
class QuestionClient:
    """A client with persistent connections, one per concurrent thread."""

    way: Connector
    who: str  # "rank 3, which has it,": begins the message if there is no answer
    _idle: list[Channel] = field(factory=list)
    _lock: threading.Lock = field(factory=threading.Lock)

    def ask(self, question: Question, look: Callable[[], None] = lambda: None) -> bytes:
        """Send a question and return the answer.

        look: called while waiting; an error of it ends the question.
        Raises: OSError.
        """
        channel = self.taken()
        answer = self.asked(channel, question, look)
        self.free(channel)
        return self.check_answer(answer)

    def free(self, channel: Channel) -> None:
        """It may be another's to ask over."""
        with self._lock:
            self._idle.append(channel)

    def asked(self, channel: Channel, question: Question, look: Callable[[], None] = lambda: None) -> bytes:
        """The answer over one connection, closed if none comes. Raises: NoAnswer."""
        try:
            channel.send(json.dumps(question).encode())
            while not channel.poll(EVERY):
                look()
            return channel.receive()
        except (OSError, EOFError, ValueError) as error:
            channel.close()
            if isinstance(error, ssl.SSLError) and "ALERT" in (
                error.reason or ""
            ):  # in TLS 1.3 it comes with the answer
                raise NoAnswer(f"{self.who} refuses the certificate of this host") from error
            raise NoAnswer(f"{self.who} does not answer") from error
        except UcplError:
            channel.close()
            raise

    def check_answer(self, answer: bytes) -> bytes:
        """The content of an answer. Raises: OSError, if it reports an error."""
        if answer[:1] != b"+":
            raise OSError(5, f"{self.who} says: {answer[1:].decode(errors='replace')}")
        return answer[1:]

    def taken(self) -> Channel:
        """A connection of the caller's own. Raises: NoAnswer."""
        with self._lock:
            if self._idle:
                return self._idle.pop()
        try:
            return Channel(self.way.open(GREETING))
        except ssl.SSLCertVerificationError as error:
            raise NoAnswer(
                f"{self.who} has no certificate of this vault's authority: {error.verify_message}"
            ) from error
        except AccessDenied as error:
            raise NoAnswer(f"{self.who} is another process: {error.strerror}") from error
        except OSError as error:
            raise NoAnswer(f"{self.who} does not answer at {self.way.where}") from error

    def close(self) -> None:
        with self._lock:
            for channel in self._idle:
                channel.close()
            self._idle.clear()


def end_connection(connection: Channel | socket.socket) -> None:
    """End a connection for both sides at once.

    A fork may have its descriptor too.
    """
    with suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as channel:
        channel.shutdown(socket.SHUT_RDWR)
