"""Serve files of a rank's own disk by range to other ranks.

Only files that were listed are served, and nothing but their bytes and their sizes and times. Ranks of one user on
one host use Unix sockets, where the kernel names the other process's user; ranks on several hosts use TLS, with keys.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from secrets import token_hex

from attrs import field

from ucpl.records import define
from ucpl.storage.authentication import Connector, Listener
from ucpl.storage.reading import identity_of
from ucpl.storage.wire import Question, QuestionClient, QuestionServer, Session

__all__ = ["BLOCK", "Peer", "FileServer", "host_mark", "own_host"]

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
