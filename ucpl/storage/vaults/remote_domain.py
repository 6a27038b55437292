"""A domain on another host, read through its server.

A domain whose server does not answer is missing.
"""

from __future__ import annotations

import json
import os
import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar, cast

from ucpl.storage.authentication import AccessDenied, Address, TlsConnector
from ucpl.storage.keys import Keys, names_of
from ucpl.storage.vaults import manifest_cache
from ucpl.storage.vaults.domains import AnyDomain
from ucpl.storage.vaults.hosts import Hosts
from ucpl.storage.vaults.records import Job
from ucpl.storage.wire import Channel, NoAnswer, Question, QuestionClient, end_connection

__all__ = ["BLOCK", "PATIENCE", "RemoteDomain"]

BLOCK = 4 << 20  # bytes of an answer, at most
PATIENCE = 5.0  # seconds for which an answer is waited for
SILENT, SILENT_MAX = 0.5, 5.0  # seconds for which one that did not answer is not asked again: twice as many each time

T = TypeVar("T")
_lines: dict[
    tuple[int, Address, str, str, int], QuestionClient
] = {}  # per process, because a fork needs its own connections
_silent: dict[Address, tuple[float, float]] = {}  # the end of a pause without requests, and its length


class RemoteDomain(AnyDomain):
    """A remote domain, asked over persistent connections.

    A question has the seat of the caller's domain.
    """

    def __init__(self, home: Path, number: int, hosts: Hosts) -> None:
        self.home, self.number, self.hosts = home, number, hosts
        self.address = hosts.at[number]
        self._holds: Channel | None = None  # the connection that has the lock

    def _line(self) -> QuestionClient:
        key = os.getpid(), self.address, self.hosts.keys, self.home.name, self.number
        if key not in _lines:
            who = f"d{self.number} of {self.home.name}, at {self.address[0]}:{self.address[1]},"
            way = TlsConnector(self.address, Keys(Path(self.hosts.keys)), names_of(self.home.name, f"d{self.number}"))
            _lines[key] = QuestionClient(way, who)
        return _lines[key]

    def ask(self, question: Question, patience: float | None = None) -> bytes:
        """Send a question.

        Raises: OSError; NoAnswer, if no answer comes, and immediately if the previous question had none.
        """
        if self._holds is None and time.monotonic() < _silent.get(self.address, (0.0, 0.0))[0]:
            raise NoAnswer(f"d{self.number} of {self.home.name} does not answer")
        line, message = self._line(), {**question, "domain": self.number}
        try:
            if self._holds is not None:
                return line.check_answer(line.asked(self._holds, message, _until(patience or PATIENCE)))
            try:
                answer = line.ask(message, _until(patience or PATIENCE))
            except NoAnswer as error:
                if isinstance(error.__cause__, TimeoutError | AccessDenied | ssl.SSLError):
                    raise
                line.close()  # of another server, which was here before
                answer = line.ask(message, _until(patience or PATIENCE))
        except NoAnswer:
            before = _silent.get(self.address, (0.0, 0.0))[1]
            wait = min(2 * before, SILENT_MAX) if before else SILENT
            _silent[self.address] = time.monotonic() + wait, wait
            raise
        _silent.pop(self.address, None)
        return answer

    # ---- as of a folder ------------------------------------------------------------------------------------------------

    @property
    def origin(self) -> Address:
        return self.address

    def is_there(self) -> bool:
        try:
            self.ask({"op": "names"})
        except OSError:
            return False
        return True

    def names(self) -> list[str]:
        try:
            message = json.loads(self.ask({"op": "names"}))
        except ValueError:
            message = None
        if not isinstance(message, list):
            raise OSError(5, f"d{self.number} of {self.home.name} sent no list of names")
        return [str(name) for name in message]

    def text(self, name: str, question: object, made: Callable[[bytes], T | None]) -> T | None:
        stamp, found = manifest_cache.cached(self.origin, name, question) or ("", None)
        answer = self.ask({"op": "text", "name": name, "stamp": stamp})
        now, _, data = answer.partition(b"\n")
        if not now:
            return None
        if now.decode() == stamp and not data:
            return cast("T | None", found)
        return manifest_cache.keep(self.origin, name, question, now.decode(), data, made)

    def size(self, name: str) -> int:
        return int(self.ask({"op": "size", "name": name}))

    def read(self, name: str, into: memoryview, position: int) -> int:
        """As os.pread. Raises: OSError."""
        done = 0
        while done < len(into):
            low = position + done
            data = self.ask({"op": "bytes", "name": name, "low": low, "high": low + min(len(into) - done, BLOCK)})
            if not data:
                break
            into[done : done + len(data)] = data
            done += len(data)
        return done

    @contextmanager
    def locked(self, wait: float) -> Iterator[bool]:
        line = self._line()
        channel = line.taken()
        question = {"op": "lock", "wait": wait, "by": list(self.hosts.seats), "domain": self.number}
        try:
            mine = line.check_answer(line.asked(channel, question, _until(wait + PATIENCE))) == b"1"
            self._holds = channel if mine else None
            yield mine
        finally:
            self._holds = None
            end_connection(channel)  # this releases it
            channel.close()

    def put_commit(self, generation: int, text: bytes, job: Job) -> None:
        self.ask({"op": "commit", "generation": generation, "text": text.decode()})


def _until(seconds: float) -> Callable[[], None]:
    end = time.monotonic() + seconds

    def look() -> None:
        if time.monotonic() > end:
            raise TimeoutError

    return look
