"""A recording disk: logs calls, shortens reads and writes, simulates crashes.

`Recorder` executes each call and logs it below one folder. For every prefix of the log, `crash_states` gives
the trees that the disk may hold if the power fails at that moment:

    kept    every requested change is there
    lost    unsynced data are gone: bytes of files whose file, names in folders whose folder was not synced since
    bare    names are there, unsynced bytes are not (file systems order the two as they like)
    torn    as kept, but the last bytes of the last write are missing

`reordered_states` gives the trees of a disk that kept some unsynced changes and lost earlier ones.

`lay_out` writes a tree to a real disk. A `Survivor` continues on it and knows inodes by their earlier numbers.
"""

from __future__ import annotations

import errno
import os
import random
import stat
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

from attrs import evolve, field, frozen, mutable

from ucpl.runtime.disk import Disk

Inode = int
ROOT: Inode = 1  # the folder that is recorded


@frozen
class Event:
    """One call.

    `what` is one of write, size, sync, name (a new name in a folder), gone, move, swap.
    """

    what: str
    inode: Inode = 0  # of the file or folder that is written, sized, synced or named
    folder: Inode = 0  # in which a name changes
    name: str = ""
    other: tuple[Inode, str] = (0, "")  # the folder and name that it moves from, or is swapped with
    at: int = 0
    data: bytes = b""
    is_folder: bool = False

    def __str__(self) -> str:
        return f"{self.what} {self.inode or ''} {self.name} {self.at or ''} {len(self.data) or ''}".strip()


@mutable
class Tree:
    """Folders and files by inode."""

    folders: dict[Inode, dict[str, Inode]] = field(factory=lambda: {ROOT: {}})
    files: dict[Inode, bytearray] = field(factory=dict)

    def apply(self, e: Event) -> None:
        match e.what:
            case "write" if e.inode in self.files:
                data = self.files[e.inode]
                data.extend(bytes(max(0, e.at + len(e.data) - len(data))))
                data[e.at : e.at + len(e.data)] = e.data
            case "size" if e.inode in self.files:
                data = self.files[e.inode]
                data.extend(bytes(max(0, e.at - len(data))))
                del data[e.at :]
            case "name" if e.folder in self.folders:
                self.folders[e.folder][e.name] = e.inode
                if e.is_folder:
                    self.folders.setdefault(e.inode, {})
                else:
                    self.files.setdefault(e.inode, bytearray())
            case "gone" if e.folder in self.folders:
                self.folders[e.folder].pop(e.name, None)
            case "move":
                inode = self.folders.get(e.other[0], {}).pop(e.other[1], None)
                if inode is not None and e.folder in self.folders:
                    self.folders[e.folder][e.name] = inode
            case "swap":
                one, other = self.folders.get(e.folder, {}), self.folders.get(e.other[0], {})
                if e.name in one and e.other[1] in other:
                    one[e.name], other[e.other[1]] = other[e.other[1]], one[e.name]

    def lay_out(self, top: Path, inode: Inode = ROOT) -> dict[Inode, Inode]:
        """Write the tree below an empty folder.

        Returns: real inode -> its earlier inode.
        """
        known = {os.stat(top).st_ino: inode}
        for name, child in self.folders[inode].items():
            path = top / name
            if child in self.folders:
                path.mkdir()
                known |= self.lay_out(path, child)
            else:
                path.write_bytes(self.files[child])
                known[os.stat(path).st_ino] = child
        return known

    def key(self, inode: Inode = ROOT) -> object:
        """A key that distinguishes this tree from other trees."""
        found = []
        for name, child in sorted(self.folders[inode].items()):
            found.append((name, child, self.key(child) if child in self.folders else bytes(self.files[child])))
        return tuple(found)


class Recorder(Disk):
    """Logs the calls below `top`.

    Inodes are numbered in the order of their first use.
    """

    def __init__(self, top: Path, *, exchanges: bool = True) -> None:
        self.top = top
        self.events: list[Event] = []
        self.begin = Tree()
        self._numbers: dict[Inode, Inode] = {os.stat(top).st_ino: ROOT}
        self._count = ROOT
        self._fds: dict[int, tuple[Inode, bool]] = {}  # (inode, opened to append)
        self._ends: dict[Inode, int] = {}  # sizes of files, for appending
        self._lock = threading.RLock()
        self._exchanges = exchanges
        self._meet(top, self.begin)

    def _meet(self, folder: Path, tree: Tree) -> None:
        """Number the files that exist before the recording."""
        here = self._number(folder)
        for path in sorted(folder.iterdir()):
            inode = self._number(path)
            is_folder = path.is_dir()
            tree.apply(Event("name", inode, here, path.name, is_folder=is_folder))
            if is_folder:
                self._meet(path, tree)
            else:
                tree.files[inode][:] = path.read_bytes()
                self._ends[inode] = len(tree.files[inode])

    def _number(self, path: Path) -> Inode:
        real = os.stat(path).st_ino
        if real not in self._numbers:
            self._count += 1
            self._numbers[real] = self._count
        return self._numbers[real]

    def _inside(self, path: Path) -> bool:
        return self.top in path.parents or path == self.top

    def _log(self, event: Event) -> None:
        self.events.append(event)

    def mark(self, text: str) -> None:
        """A moment that a test asks about."""
        with self._lock:
            self._log(Event("mark", name=text))

    # ---- calls -------------------------------------------------------------------------------------------------------

    def open(self, path: Path, flags: int, mode: int = 0o666) -> int:
        with self._lock:
            new = not os.path.lexists(path)
            fd = super().open(path, flags, mode)
            if self._inside(path):
                status = os.fstat(fd)
                inode = self._number(path)
                self._fds[fd] = inode, bool(flags & os.O_APPEND)
                if new:
                    self._ends[inode] = 0
                    self._log(Event("name", inode, self._number(path.parent), path.name))
                elif flags & os.O_TRUNC and stat.S_ISREG(status.st_mode):
                    self._ends[inode] = 0
                    self._log(Event("size", inode))
            return fd

    def close(self, fd: int) -> None:
        with self._lock:
            self._fds.pop(fd, None)
            super().close(fd)

    def write(self, fd: int, view: memoryview, position: int | None) -> int:
        with self._lock:
            done = super().write(fd, view, position)
            if fd in self._fds:
                inode, _ = self._fds[fd]
                at = self._ends.get(inode, 0) if position is None else position
                self._ends[inode] = max(self._ends.get(inode, 0), at + done)
                self._log(Event("write", inode, at=at, data=bytes(view[:done])))
            return done

    def sync(self, fd: int, *, data_only: bool = False) -> None:
        with self._lock:
            super().sync(fd, data_only=data_only)
            if fd in self._fds:
                self._log(Event("sync", self._fds[fd][0]))

    def _sized(self, fd: int, size: int) -> None:
        if fd in self._fds:
            self._ends[self._fds[fd][0]] = size
            self._log(Event("size", self._fds[fd][0], at=size))

    def resize(self, fd: int, size: int) -> None:
        with self._lock:
            super().resize(fd, size)
            self._sized(fd, size)

    def clone(self, source: tuple[int, int], target: tuple[int, int], size: int) -> None:
        raise OSError(errno.EOPNOTSUPP, "what is shared is not recorded")

    def allocate(self, fd: int, size: int) -> None:
        with self._lock:
            super().allocate(fd, size)
            self._sized(fd, size)

    def _moved(self, source: Path, target: Path) -> None:
        other = (self._number(source.parent), source.name)
        self._log(Event("move", self._number(target), self._number(target.parent), target.name, other))

    def rename(self, source: Path, target: Path) -> None:
        with self._lock:
            super().rename(source, target)
            self._moved(source, target)

    def rename_new(self, source: Path, target: Path) -> None:
        with self._lock:
            super().rename_new(source, target)
            self._moved(source, target)

    def exchange(self, one: Path, other: Path) -> bool:
        with self._lock:
            if not self._exchanges or not super().exchange(one, other):
                return False
            there = (self._number(other.parent), other.name)
            self._log(Event("swap", 0, self._number(one.parent), one.name, there))
            return True

    def make_folder(self, path: Path, *, fresh: bool = False) -> None:
        with self._lock:
            new = not path.exists()
            super().make_folder(path, fresh=fresh)
            if new:
                self._log(Event("name", self._number(path), self._number(path.parent), path.name, is_folder=True))

    def remove(self, path: Path) -> None:
        with self._lock:
            inode, folder = self._number(path), self._number(path.parent)
            super().remove(path)
            self._forget(inode)
            self._log(Event("gone", inode, folder, path.name))

    def remove_tree(self, path: Path) -> None:
        """One name at a time, the deepest first, as rmtree does."""
        for child in sorted(path.iterdir()):
            if child.is_dir() and not child.is_symlink():
                self.remove_tree(child)
            else:
                self.remove(child)
        with self._lock:
            inode, folder = self._number(path), self._number(path.parent)
            path.rmdir()
            self._forget(inode)
            self._log(Event("gone", inode, folder, path.name))

    def _forget(self, inode: Inode) -> None:
        """The file system may give the number to another file."""
        self._numbers = {real: n for real, n in self._numbers.items() if n != inode}

    def identity(self, path: Path) -> tuple[int, int]:
        with self._lock:
            return (self._number(path), 0) if self._inside(path) else super().identity(path)


class Survivor(Disk):
    """The disk after a crash.

    Recorded files keep their earlier inode numbers.
    """

    def __init__(self, known: dict[Inode, Inode]) -> None:
        self.known = known

    def identity(self, path: Path) -> tuple[int, int]:
        real = os.stat(path).st_ino
        return self.known.get(real, real + (1 << 40)), 0


class Short(Disk):
    """Reads and writes at most `most` bytes per call."""

    def __init__(self, most: int) -> None:
        self.most = most

    def read(self, fd: int, views: Sequence[memoryview], position: int) -> int:
        left, some = self.most, []
        for view in views:
            some.append(view[:left])
            left -= len(some[-1])
            if not left:
                break
        return super().read(fd, some, position)

    def write(self, fd: int, view: memoryview, position: int | None) -> int:
        return super().write(fd, view[: self.most], position)


# ---- crashes ---------------------------------------------------------------------------------------------------------


@frozen(eq=False)
class Crash:
    """A tree that the disk may hold after the first `events` calls."""

    events: int
    mode: str
    tree: Tree
    marks: tuple[str, ...]  # moments that had passed

    def __str__(self) -> str:
        return f"after {self.events} calls, {self.mode}"


def crash_states(recorder: Recorder, modes: Sequence[str] = ("kept", "lost", "bare", "torn")) -> Iterator[Crash]:
    """Every prefix in every mode, each tree once."""
    seen: set[tuple[object, tuple[str, ...]]] = set()
    for n in range(len(recorder.events) + 1):
        some = recorder.events[:n]
        marks = tuple(e.name for e in some if e.what == "mark")
        for mode in modes:
            tree = Tree()
            _copy(recorder.begin, tree)
            for event in _surviving(some, mode):
                tree.apply(event)
            key = (tree.key(), marks)
            if key not in seen:
                seen.add(key)
                yield Crash(n, mode, tree, marks)


def _copy(source: Tree, target: Tree) -> None:
    target.folders = {i: dict(names) for i, names in source.folders.items()}
    target.files = {i: bytearray(data) for i, data in source.files.items()}


def _durable(events: Sequence[Event]) -> list[bool]:
    """Events that survive every loss of power.

    A sync of their file or folder follows them.
    """
    synced_after: dict[Inode, int] = {}
    for i, e in enumerate(events):
        if e.what == "sync":
            synced_after[e.inode] = i
    found = []
    for i, e in enumerate(events):
        homes = [e.inode] if e.what in ("write", "size") else [e.folder, e.other[0]] if e.what == "swap" else [e.folder]
        found.append(
            max(synced_after.get(home, -1) for home in homes) > i
        )  # a swap is one step: in both folders or in none
    return found


def _surviving(events: Sequence[Event], mode: str) -> Iterator[Event]:
    durable = _durable(events)
    for i, e in enumerate(events):
        if e.what in ("sync", "mark"):
            continue
        of_bytes = e.what in ("write", "size")
        if (mode == "lost" and not durable[i]) or (mode == "bare" and of_bytes and not durable[i]):
            continue
        if mode == "torn" and e.what == "write" and i == len(events) - 1:
            e = evolve(e, data=e.data[:-7])
        yield e


def reordered_states(recorder: Recorder, *, draws: int = 3, ones: bool = True, seed: int = 0) -> Iterator[Crash]:
    """Every prefix of the log, with some of its unsynced calls lost.

    Each prefix is tried without one unsynced call, with one alone (`ones`), and with some at random.
    """
    rng = random.Random(seed)
    seen: set[int] = set()
    for n in range(len(recorder.events) + 1):
        some = recorder.events[:n]
        durable = _durable(some)
        loose = [i for i, e in enumerate(some) if not durable[i] and e.what not in ("sync", "mark")]
        if len(loose) < 2:
            continue
        marks = tuple(e.name for e in some if e.what == "mark")
        kept = [("some", {i for i in loose if rng.random() < 0.5}) for _ in range(draws)]
        if ones:
            kept += [(f"without call {i}", set(loose) - {i}) for i in loose] + [
                (f"with call {i} alone", {i}) for i in loose
            ]
        for mode, chosen in kept:
            tree = Tree()
            _copy(recorder.begin, tree)
            for i, event in enumerate(some):
                if durable[i] or i in chosen:
                    tree.apply(event)
            key = hash((tree.key(), marks))
            if key not in seen:
                seen.add(key)
                yield Crash(n, mode, tree, marks)
