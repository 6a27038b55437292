"""Failpoints: places where a test lets the machine fail.

They are named and counted; one environment variable chooses them. `UCPL_FAIL_AT="tile-written:17:kill"` kills the
process at the 17th time that a tile was written, `"vault-*:3:kill"` at the third of all whose names begin so. Actions:
kill, interrupt, terminate, hangup, stop (each its signal), enospc and eio. Several, separated by commas. Without the
variable a failpoint costs one comparison.
"""

from __future__ import annotations

import errno
import os
import signal
import threading

from ucpl.records import define

__all__ = ["failpoint", "set_failpoints"]

_SIGNALS = {
    "kill": signal.SIGKILL,
    "stop": signal.SIGSTOP,
    "interrupt": signal.SIGINT,
    "terminate": signal.SIGTERM,
    "hangup": signal.SIGHUP,
}


@define
class _Trap:
    name: str
    hit: int
    action: str
    count: int = 0

    def is_at(self, name: str) -> bool:
        return name.startswith(self.name[:-1]) if self.name.endswith("*") else name == self.name


def _parse(text: str) -> tuple[_Trap, ...]:
    traps = []
    for part in filter(None, text.split(",")):
        name, hit, action = part.split(":")
        traps.append(_Trap(name, int(hit), action))
    return tuple(traps)


_lock = threading.Lock()
_traps: tuple[_Trap, ...] = _parse(os.environ.get("UCPL_FAIL_AT", ""))


def set_failpoints(text: str) -> None:
    """Set the traps of this process for a test."""
    global _traps
    _traps = _parse(text)


def failpoint(name: str) -> None:
    """Fail here if a trap is set.

    Raises: OSError for enospc and eio.
    """
    if not _traps:
        return
    for trap in _traps:
        if not trap.is_at(name):
            continue
        with _lock:
            trap.count += 1
            hit = trap.count == trap.hit
        if hit:
            _fire(trap.action)


def _fire(action: str) -> None:
    if (number := _SIGNALS.get(action)) is not None:
        os.kill(os.getpid(), number)
        return
    match action:
        case "enospc":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        case "eio":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        case _:
            raise ValueError(f"no such action at a failpoint: {action}")
