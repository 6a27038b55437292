"""A machine that fails at the k-th call of a kind.

Every function by which Python reaches files is counted, and one fails.

Calls are counted where they are of paths below given folders, or of descriptors that lead there. Every caller is counted:
the runtime's seam to the disk, readers of headers, verbs that write texts, and the standard library on their behalf.

Not here: the jobs under it (jobs), and the law after it (law).
"""

from __future__ import annotations

import builtins
import errno
import io
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from attrs import define, field, frozen

from ucpl.runtime import linux

__all__ = ["ACTIONS", "KINDS", "Fault", "Layer"]

BY_PATH = {
    "stat": ("stat", "lstat"),
    "list": ("scandir", "listdir"),
    "rename": ("rename", "replace"),
    "folder": ("mkdir",),
    "remove": ("unlink", "remove", "rmdir"),
    "mode": ("chmod", "chown"),
    "room": ("statvfs",),
}
BY_DESCRIPTOR = {
    "read": ("read", "pread", "preadv"),
    "write": ("write", "pwrite"),
    "sync": ("fsync", "fdatasync"),
    "size": ("ftruncate",),
    "stat": ("fstat",),
    "advise": ("posix_fadvise",),
    "mode": ("fchmod", "fchown"),
    "close": ("close",),
}
OF_LINUX = {"size": "allocate", "rename": "rename_new", "swap": "exchange"}
KINDS = ("open", "stat", "list", "read", "write", "sync", "size", "rename", "swap", "folder", "remove", "mode", "room",
         "advise", "close")  # fmt: skip
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT
ACTIONS = ("eio", "enospc", "kill", "half")


@frozen
class Fault:
    """The `hit`-th call of a kind, from 1.

    Fails with an error, or the process dies there.

    half: a write that does a part of its work, and then the process dies; of other calls: dies right behind it.
    """

    kind: str
    hit: int
    action: str

    def __str__(self) -> str:
        return f"{self.kind}:{self.hit}:{self.action}"

    @staticmethod
    def parse(text: str) -> Fault:
        kind, hit, action = text.split(":")
        return Fault(kind, int(hit), action)


@define(eq=False)
class Layer:
    """Counts calls below `tops`. `calls[kind]` are their names and paths, in order."""

    tops: tuple[Path, ...]
    fault: Fault | None = None
    calls: dict[str, list[str]] = field(factory=lambda: {kind: [] for kind in KINDS})
    order: list[str] = field(factory=list)  # of all kinds
    _lock: threading.Lock = field(factory=threading.Lock)
    _files: dict[int, str] = field(factory=dict)
    _real: dict[tuple[Any, str], Any] = field(factory=dict)

    @contextmanager
    def put_in(self) -> Iterator[None]:
        """Within, every call goes through it."""
        for kind, names in (*BY_PATH.items(), *BY_DESCRIPTOR.items()):
            for name in names:
                by = self._by_path if name in BY_PATH.get(kind, ()) else self._by_descriptor
                self._put(os, name, by(kind, name, getattr(os, name)))
        for kind, name in OF_LINUX.items():
            by = self._by_descriptor if kind == "size" else self._by_path
            self._put(linux, name, by(kind, name, getattr(linux, name)))
        self._put(os, "open", self._open(os.open))
        opened = self._opened(io.open)
        self._put(io, "open", opened)
        self._put(builtins, "open", opened)
        try:
            yield
        finally:
            for (owner, name), real in self._real.items():
                setattr(owner, name, real)

    def _put(self, owner: Any, name: str, mine: Any) -> None:
        self._real[owner, name] = getattr(owner, name)
        setattr(owner, name, mine)

    # ---- which calls -------------------------------------------------------------------------------------------------

    def _is_ours(self, path: str) -> bool:
        return any(path == str(top) or path.startswith(f"{top}/") for top in self.tops)

    def _path(self, what: Any, folder: int | None = None) -> str:
        if isinstance(what, int):
            return self._files.get(what, "")
        if folder is not None:
            return os.path.join(self._files.get(folder, ""), os.fsdecode(what))
        return os.path.abspath(os.fsdecode(what))

    def _by_path(self, kind: str, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Any = ".", *args: Any, **more: Any) -> Any:
            folder = more.get("dir_fd", more.get("src_dir_fd"))
            return self._through(kind, name, self._path(path, folder), lambda: real(path, *args, **more))

        return call

    def _by_descriptor(self, kind: str, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(fd: Any, *args: Any, **more: Any) -> Any:
            path = self._path(fd) if isinstance(fd, int) else ""
            if name == "close":
                self._files.pop(fd, None)
            half = (lambda: real(fd, memoryview(args[0])[: len(args[0]) // 2], *args[1:])) if kind == "write" else None
            return self._through(kind, name, path, lambda: real(fd, *args, **more), half)

        return call

    def _open(self, real: Callable[..., int]) -> Callable[..., int]:
        def call(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
            name = self._path(path, dir_fd)
            fd: int = self._through("open", "open", name, lambda: real(path, flags, mode, dir_fd=dir_fd))
            if self._is_ours(name):
                self._files[fd] = name
            return fd

        return call

    def _opened(self, real: Callable[..., Any]) -> Callable[..., Any]:
        """`open`: files whose reads and writes are seen, too."""
        layer = self

        class Seen(io.FileIO):
            def readinto(self, buffer: Any) -> Any:
                return layer._through(
                    "read", "read", layer._path(self.fileno()), lambda: super(Seen, self).readinto(buffer)
                )

            def readall(self) -> Any:
                return layer._through("read", "read", layer._path(self.fileno()), lambda: super(Seen, self).readall())

            def write(self, data: Any) -> Any:
                def half() -> Any:
                    return super(Seen, self).write(memoryview(data)[: len(data) // 2])

                path = layer._path(self.fileno())
                return layer._through("write", "write", path, lambda: super(Seen, self).write(data), half)

            def close(self) -> None:
                if not self.closed:
                    layer._files.pop(self.fileno(), None)
                super().close()

        def call(file: Any, mode: str = "r", buffering: int = -1, *args: Any, **more: Any) -> Any:
            name = self._path(file)
            if not self._is_ours(name):
                return real(file, mode, buffering, *args, **more)
            opener = more.pop("opener", None)
            raw = self._through("open", "open", name, lambda: Seen(file, mode.replace("b", "").replace("t", ""), opener=opener,
                                                                    closefd=more.pop("closefd", True)))  # fmt: skip
            self._files[raw.fileno()] = name
            if buffering == 0:
                return raw
            made = io.BufferedReader(raw) if mode[0] == "r" and "+" not in mode else io.BufferedWriter(raw)
            return made if "b" in mode else io.TextIOWrapper(made, *args, **more)

        return call

    # ---- their results ----------------------------------------------------------------------------------------------

    def _through(
        self, kind: str, name: str, path: str, call: Callable[[], Any], half: Callable[[], Any] | None = None
    ) -> Any:
        if not path or not self._is_ours(path):
            return call()
        with self._lock:
            self.calls[kind].append(f"{name} {path}")
            self.order.append(f"{name} {path}")
            fault = self.fault
            hit = fault is not None and fault.kind == kind and len(self.calls[kind]) == fault.hit
        if not hit or fault is None:
            return call()
        if fault.action in ("eio", "enospc"):
            number = errno.EIO if fault.action == "eio" else errno.ENOSPC
            if any(
                name in names for names in BY_DESCRIPTOR.values()
            ):  # a descriptor: nothing but its number is known of it
                raise OSError(number, os.strerror(number))
            raise OSError(number, os.strerror(number), path)
        if fault.action == "half":
            (half or call)()
        os.kill(os.getpid(), signal.SIGKILL)
