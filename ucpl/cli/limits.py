"""Limits of the process (cgroups, `ulimit`, affinity), and its signals."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import NoReturn

__all__ = ["memory_limit", "processors", "end_if_asked", "end_like_ctrl_c"]

OWN = Path("/proc/self/cgroup")
MOUNTS = Path("/proc/self/mountinfo")
_NONE = 1 << 60  # cgroup v1 writes a number of that size for no limit


def memory_limit() -> int | None:
    """Bytes that this process may use, the least limit; None without one.

    Above `memory.high` it is slowed until it stops. `memory.stat` also knows groups that a container does not see.
    """
    found = [
        *(_number(folder / name) for folder in _folders("") for name in ("memory.max", "memory.high")),
        *(_number(folder / "memory.limit_in_bytes") for folder in _folders("memory")),
        *(_hierarchical(folder / "memory.stat") for folder in _folders("memory")),
        _address_space(),
    ]
    return min((n for n in found if n is not None and n < _NONE), default=None)


def processors() -> int:
    """Processors that this process may use, at least 1.

    Affinity, and the container's quota rounded down.
    """
    found = [float(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)]
    for folder in _folders(""):
        quota, _, period = _text(folder / "cpu.max").partition(" ")
        if quota.isdigit() and period.strip().isdigit():
            found.append(int(quota) / max(1, int(period)))
    for folder in _folders("cpu"):
        allowed, each = _number(folder / "cpu.cfs_quota_us"), _number(folder / "cpu.cfs_period_us")
        if allowed is not None and each:
            found.append(allowed / each)
    return max(1, int(min(found)))


def _folders(controller: str) -> Iterator[Path]:
    """Folders with the limits of a controller, from the process's group up.

    "": those of cgroup v2.
    """
    for line in _text(OWN).splitlines():
        _, controllers, path = (line.split(":", 2) + ["", ""])[:3]
        if controller not in controllers.split(","):
            continue
        for root, top in _mounts(controller):
            # A container may see its own group as the top, and the path from the host's.
            own = Path(path).relative_to(root) if Path(path).is_relative_to(root) else Path()
            for part in (own, *own.parents) if ".." not in own.parts else (Path(),):
                yield top / part


def _mounts(controller: str) -> Iterator[tuple[str, Path]]:
    """Top group and place of each mount of a hierarchy."""
    for line in _text(MOUNTS).splitlines():
        mount, _, system = line.partition(" - ")
        place, kind = mount.split(), (system.split() + ["", "", ""])[:3]
        is_meant = kind[0] == "cgroup" and controller in kind[2].split(",") if controller else kind[0] == "cgroup2"
        if is_meant and len(place) > 4:
            yield place[3], Path(place[4])


def _number(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.isascii() and text.isdigit() else None


def _hierarchical(path: Path) -> int | None:
    found = dict(line.split(None, 1) for line in _text(path).splitlines() if " " in line)
    text = found.get("hierarchical_memory_limit", "")
    return int(text) if text.isascii() and text.isdigit() else None


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, ValueError):
        return ""


def _address_space() -> int | None:
    try:
        import resource
    except ImportError:  # no POSIX
        return None
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    return None if soft == resource.RLIM_INFINITY else soft


# ---- signals ---------------------------------------------------------------------------------------------------------


_ENDS = (signal.SIGTERM, signal.SIGHUP)
_asked: list[int] = []  # signals since the outermost `end_like_ctrl_c` began


@contextmanager
def end_like_ctrl_c() -> Iterator[None]:
    """Within, SIGTERM and SIGHUP raise KeyboardInterrupt.

    A handler that somebody set otherwise (nohup, a program's own) stays.
    """
    if threading.current_thread() is not threading.main_thread():  # which alone may say so
        yield
        return
    mine = [number for number in _ENDS if signal.getsignal(number) is signal.SIG_DFL]
    for number in mine:
        signal.signal(number, _end)
    try:
        yield
    finally:
        for number in mine:
            signal.signal(number, signal.SIG_DFL)
        if mine:
            _asked.clear()


def end_if_asked() -> None:
    """Raise KeyboardInterrupt again if a signal came in a finalizer.

    Python ignores exceptions there.
    """
    if _asked:
        raise KeyboardInterrupt


def _end(number: int, frame: FrameType | None) -> NoReturn:
    _asked.append(number)
    raise KeyboardInterrupt
