"""Forbidden effects of an input, checked while it is read.

Time, memory, writing elsewhere, running a program that a file names.

An audit hook of the interpreter sees each file that is opened to be written and each program that is started, whoever asks.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from attrs import define, field

SECONDS_MAX = 20.0  # of the processor, in one input: other load of the machine is not counted
WAITING_MAX = 1800.0  # seconds by the clock, for an input that waits and does nothing
MEMORY_MAX = 256 << 10  # KiB that the peak may grow by in one input: the first ones import torch
RUNS = (
    "os.system",
    "os.exec",
    "os.posix_spawn",
    "os.fork",
    "os.spawn",
    "subprocess.Popen",
    "pickle.find_class",
    "pty.spawn",
)
SENDS = ("socket.connect", "socket.bind", "socket.getaddrinfo")
# Of each event: which of its arguments are paths that it changes, and which are the folders that these start from.
CHANGES = {
    "os.rename": ((0, 2), (1, 3)),
    "os.link": ((1, 3),),
    "os.symlink": ((1, 2),),
    "os.remove": ((0, 1),),
    "os.rmdir": ((0, 1),),
    "os.mkdir": ((0, 2),),
    "os.chmod": ((0, 2),),
}
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


class TooSlow(BaseException):
    """An input that takes longer than any should.

    No `except Exception` of a reader stops it.
    """


class Harm(BaseException):
    """Something that no reader of a file does."""


@define(eq=False)
class Guard:
    """The bounds of one input.

    A breach is raised where it happens, and once more at the end where that was caught.
    """

    folder: str  # where writing is allowed
    seconds_max: float = SECONDS_MAX
    memory_max: int = MEMORY_MAX
    waiting_max: float = WAITING_MAX
    harm: list[str] = field(factory=list)

    def sees(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event in RUNS or event in SENDS:
            self._breach(f"{event}{ascii(arguments)[:200]}")
        elif event in CHANGES:
            for path, start in CHANGES[event]:
                self._demand_inside(event, arguments[path], arguments[start] if start is not None else -1)
        elif event == "open" and isinstance(arguments[2], int) and arguments[2] & WRITING:
            follows = not arguments[2] & (os.O_NOFOLLOW | os.O_EXCL)
            self._demand_inside(event, arguments[0], follows=follows)

    def _demand_inside(self, event: str, path: Any, start: int = -1, *, follows: bool = False) -> None:
        if isinstance(path, int):  # an open file, which was asked about before
            return
        named = os.path.join(f"/proc/self/fd/{start}" if start >= 0 else "", os.fsdecode(path))
        real = os.path.realpath(named if follows else os.path.dirname(named) or ".")
        if named not in (os.devnull, self.folder) and not (real + "/").startswith(self.folder + "/"):
            self._breach(f"{event} of {ascii(named)[:200]}")

    def _breach(self, what: str) -> None:
        self.harm.append(what)
        raise Harm(what)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Raises: TooSlow, Harm; AssertionError where memory grew.

        Nothing is kept for a later process, which is outside: no tree of a text, no compiled module of ours.
        """
        global _GUARD
        kept = os.environ.get("UCPL_CACHE")
        os.environ["UCPL_CACHE"] = ""
        compiled, sys.dont_write_bytecode = sys.dont_write_bytecode, True
        self.harm.clear()
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        signal.setitimer(signal.ITIMER_PROF, self.seconds_max)
        signal.setitimer(signal.ITIMER_REAL, self.waiting_max)
        _GUARD = self
        try:
            yield
        finally:
            _GUARD = None
            signal.setitimer(signal.ITIMER_PROF, 0)
            signal.setitimer(signal.ITIMER_REAL, 0)
            sys.dont_write_bytecode = compiled
            os.environ.pop("UCPL_CACHE")
            os.environ.update({} if kept is None else {"UCPL_CACHE": kept})
            self._check(peak)

    def _check(self, peak: int) -> None:
        """Also where the input was refused."""
        if self.harm:
            raise Harm(self.harm[0])
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak
        assert grown <= self.memory_max, f"memory grew by {grown >> 10} MiB"


_GUARD: Guard | None = None
_HOOKED = False


def guard_of(folder: Path) -> Guard:
    """A guard for inputs below a folder.

    The hook stays with the process and asks for nothing between inputs.
    """
    global _HOOKED
    if not _HOOKED:
        sys.addaudithook(_hook)
        signal.signal(signal.SIGALRM, _alarm)
        signal.signal(signal.SIGPROF, _alarm)
        _HOOKED = True
    return Guard(os.path.realpath(folder))


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    if _GUARD is not None:
        _GUARD.sees(event, arguments)


def _alarm(*_: object) -> None:
    raise TooSlow
