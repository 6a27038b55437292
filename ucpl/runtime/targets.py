"""Target files: laid out, made, written, completed by CRCs, and read back.

They come from a skeleton, are made at full size, and are accessed by position.
"""

from __future__ import annotations

import errno
import mmap
import os
import stat
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import accumulate
from operator import itemgetter
from pathlib import Path, PurePosixPath
from typing import NoReturn, Protocol

from attrs import field

from ucpl.digests import crc32
from ucpl.errors import Label, fail
from ucpl.extents import StoredTensor, TensorRef, key_text, pieces_of
from ucpl.files.checkpoint import Archive, Skeleton, SkeletonFile
from ucpl.files.texts import is_inside
from ucpl.files.torch_files import TorchFilePlan, layout_archive, layout_torch_file
from ucpl.planning import CarriedBox
from ucpl.records import frozen
from ucpl.runtime.descriptors import Descriptors
from ucpl.runtime.disk import disk, forget, make_folders, read_upto, sync_data, write_all
from ucpl.runtime.failpoints import failpoint
from ucpl.runtime.rows import Place
from ucpl.runtime.tiles import Unit
from ucpl.runtime.worker_pool import Queue, run_through

__all__ = [
    "MANY", "NEAR", "SPAN", "FilePlan", "Parts", "TargetFile", "TargetFiles", "TargetPlan", "cannot_write", "clusters",
    "lay_out",
]  # fmt: skip

Parts = Sequence[tuple[int, bytes]]  # (byte position, bytes) of one file

NEAR = 4096  # bytes between two parts that are read and written at once: a call takes longer than copying them
SPAN = 1 << 16  # bytes of parts that are read or written at once
MANY = 16  # parts that are worth reading the bytes between them
_SYNCS = 8  # files that are synced at once: more gain nothing
_LARGE = 256 << 10  # bytes of a write that the disk is to begin with at once


class FilePlan(Protocol):
    """A file before its payload.

    `fixed`, the storages and the result of `finish` cover its bytes exactly once.
    """

    @property
    def size(self) -> int: ...
    @property
    def fixed(self) -> tuple[tuple[int, bytes], ...]: ...
    @property
    def storages(self) -> dict[str, tuple[int, int]]: ...
    def finish(self, crcs: Mapping[str, int]) -> tuple[tuple[int, bytes], ...]: ...


@frozen(eq=False)
class TargetFile:
    """One file.

    `path` is relative to the target's top, `plan` gives the layout of its bytes.
    """

    path: str
    plan: FilePlan


@frozen(eq=False)
class TargetPlan:
    """All files, with the places of planned and carried tensors.

    `places` are the plan's targets followed by the carried storages; `owners[t]` is the target whose bytes `t` shares
    (mostly t itself). Units are in order of file and position.
    """

    files: tuple[TargetFile, ...]
    places: tuple[Place, ...]
    carried: tuple[tuple[Place, CarriedBox], ...]  # place in the source, and its box, of the carried places' number
    owners: tuple[int, ...]
    units: tuple[Unit, ...]

    @property
    def size(self) -> int:
        return sum(f.plan.size for f in self.files)

    def bare(self) -> TargetPlan:
        """The files with their sizes alone."""
        return TargetPlan(tuple(TargetFile(f.path, _Whole(f.plan.size)) for f in self.files), (), (), (), ())


def lay_out(skeleton: Skeleton, targets: Sequence[StoredTensor]) -> TargetPlan:
    """Fix every byte position of the target.

    Raises: UcplError E604, E507, and errors of the file formats (E440-E443).
    """
    files: list[TargetFile] = []
    places = [Place.of(t) for t in targets]
    carried: list[tuple[Place, CarriedBox]] = []
    owners = list(range(len(targets)))
    units: list[Unit] = []
    homes: set[int] = set()
    for i, entry in enumerate(skeleton.files):
        path = _inside(f"{skeleton.folder}/{entry.path}" if skeleton.folder and not entry.beside else entry.path)
        plan = _file_plan(entry)
        storages = plan.storages
        files.append(TargetFile(path, plan))
        filled: dict[str, int] = {}
        order = sorted(entry.storage_of, key=lambda t: (targets[t].shares is not None, t))
        for t in order:
            storage = entry.storage_of[t]
            homes.add(t)
            size = places[t].numel * places[t].itemsize
            start, room = storages.get(storage, (0, 0 if size == 0 else -1))
            if room != size:
                fail(
                    "E604",
                    f"{places[t].text} has {size} bytes, storage {storage} of {path} has {'none' if room < 0 else room}",
                    Label(path, where=key_text(places[t].key)),
                )
            if storage in filled:
                owners[t] = filled[storage]
                continue
            filled[storage] = t
            units.append(Unit(t, i, start, size, storage))
        for item in entry.carried:
            extent = item.extent
            t = len(places)
            target = Place(path, extent.key, "", extent.dtype, extent.shape)
            places.append(target)
            owners.append(t)
            for begin, one in pieces_of(extent):
                source = Place(one.file, one.key, "", one.dtype, one.shape, one)
                carried.append((source, CarriedBox.of(len(carried), t, begin, one.shape, extent.shape)))
            size = target.numel * target.itemsize
            start, room = storages.get(item.storage, (0, 0 if size == 0 else -1))
            if room != size or item.storage in filled:
                fail(
                    "E604",
                    f"carried {key_text(extent.key)} has {size} bytes, storage {item.storage} of {path} has {room}",
                    Label(path, where=key_text(extent.key)),
                )
            filled[item.storage] = t
            units.append(Unit(t, i, start, size, item.storage))
        for storage, (_, size) in storages.items():
            if size and storage not in filled:
                fail(
                    "E604",
                    f"nothing is written to storage {storage} of {path} ({size} bytes)",
                    Label(path, where=storage),
                )
    for t, tensor in enumerate(targets):
        if t not in homes and places[t].numel:
            fail("E604", f"{places[t].text} of {tensor.file} has no place in the target's files", Label(tensor.file))
    units.sort(key=lambda u: (u.file, u.start))
    names = [f.path for f in files] + [_inside(name) for name in skeleton.texts]
    if len(set(names)) != len(names):
        fail("E604", f"two files of the target have the name {next(n for n in names if names.count(n) > 1)}")
    return TargetPlan(tuple(files), tuple(places), tuple(carried), tuple(owners), tuple(units))


def _file_plan(entry: SkeletonFile) -> FilePlan:
    if entry.form == "whole":
        return _Whole(entry.value)
    if entry.form == "headed":
        return _Headed(*entry.value)
    if entry.form == "bytes":
        return _Known(entry.value)
    if entry.form == "archives":
        return _Archives.of(entry.value)
    if entry.form == "torch":
        name = PurePosixPath(entry.path).name
        return layout_torch_file(entry.value, name.rpartition(".")[0] or name)
    value: dict[str, TensorRef] = entry.value
    from ucpl.files.safetensors_files import layout_safetensors_file

    plan = layout_safetensors_file(
        [(name, ref.storage.dtype, ref.shape) for name, ref in value.items()], entry.metadata
    )
    return _ByStorage(plan, {name: ref.storage.name for name, ref in value.items()})


@frozen(eq=False)
class _Whole:
    """File that is carried as it is: one run of bytes."""

    size: int
    fixed: tuple[tuple[int, bytes], ...] = ()

    @cached_property
    def storages(self) -> dict[str, tuple[int, int]]:
        return {"0": (0, self.size)} if self.size else {}

    def finish(self, crcs: Mapping[str, int]) -> tuple[tuple[int, bytes], ...]:
        return ()


@frozen(eq=False)
class _Headed:
    """A file of known bytes, and one storage behind them."""

    head: bytes
    room: int

    @property
    def size(self) -> int:
        return len(self.head) + self.room

    @property
    def fixed(self) -> tuple[tuple[int, bytes], ...]:
        return ((0, self.head),)

    @cached_property
    def storages(self) -> dict[str, tuple[int, int]]:
        return {"0": (len(self.head), self.room)} if self.room else {}

    def finish(self, crcs: Mapping[str, int]) -> tuple[tuple[int, bytes], ...]:
        return ()


@frozen(eq=False)
class _Known:
    """A file whose bytes are all known."""

    data: bytes
    storages: dict[str, tuple[int, int]] = field(factory=dict)

    @property
    def size(self) -> int:
        return len(self.data)

    @property
    def fixed(self) -> tuple[tuple[int, bytes], ...]:
        return ((0, self.data),)

    def finish(self, crcs: Mapping[str, int]) -> tuple[tuple[int, bytes], ...]:
        return ()


@frozen(eq=False)
class _Archives:
    """Archives of torch.save, one behind the other."""

    plans: tuple[TorchFilePlan, ...]
    known: tuple[dict[str, bytes], ...]  # of each archive, storages whose bytes are known
    starts: tuple[int, ...]

    @classmethod
    def of(cls, archives: Sequence[Archive]) -> _Archives:
        plans = tuple(layout_archive(one.value) for one in archives)
        starts = tuple(accumulate((plan.size for plan in plans), initial=0))
        return cls(plans, tuple(one.known for one in archives), starts)

    @property
    def size(self) -> int:
        return self.starts[-1]

    @property
    def fixed(self) -> tuple[tuple[int, bytes], ...]:
        out: list[tuple[int, bytes]] = []
        for start, plan, known in zip(self.starts, self.plans, self.known, strict=False):
            mine = [*plan.fixed, *((plan.storages[name][0], data) for name, data in known.items())]
            out += [(start + at, data) for at, data in sorted(mine)]
        return tuple(out)

    @cached_property
    def storages(self) -> dict[str, tuple[int, int]]:
        return {
            f"{n}:{name}": (start + at, size)
            for n, (start, plan) in enumerate(zip(self.starts, self.plans, strict=False))
            for name, (at, size) in plan.storages.items()
            if name not in self.known[n]
        }

    def finish(self, crcs: Mapping[str, int]) -> tuple[tuple[int, bytes], ...]:
        out: list[tuple[int, bytes]] = []
        for n, (start, plan) in enumerate(zip(self.starts, self.plans, strict=False)):
            mine = {name: crcs[f"{n}:{name}"] for name in plan.storages if f"{n}:{name}" in crcs}
            mine |= {name: crc32(data) for name, data in self.known[n].items()}
            out += [(start + at, data) for at, data in plan.finish(mine)]
        return tuple(out)


@frozen(eq=False)
class _ByStorage:
    """Safetensors file whose tensors have the names of their storages.

    A skeleton calls them so, too.
    """

    plan: FilePlan
    storage_of: dict[str, str]

    @property
    def size(self) -> int:
        return self.plan.size

    @property
    def fixed(self) -> tuple[tuple[int, bytes], ...]:
        return self.plan.fixed

    @cached_property
    def storages(self) -> dict[str, tuple[int, int]]:
        return {self.storage_of[name]: place for name, place in self.plan.storages.items()}

    def finish(self, crcs: Mapping[str, int]) -> tuple[tuple[int, bytes], ...]:
        return self.plan.finish(crcs)


def _inside(path: str) -> str:
    parts = PurePosixPath(path).parts
    if not is_inside(path) or parts[0].casefold() == "ucpl":
        fail("E507", f"a file of the target would be {path!a}, outside of it or among ucpl's own", Label(path))
    return "/".join(parts)


def cannot_write(path: Path, error: OSError, *, resumable: bool = True) -> NoReturn:
    """Raises: UcplError E503, always."""
    fail(
        "E503",
        f"{path} cannot be written: {error.strerror or error}",
        Label(str(path)),
        remedy="" if resumable else "Remove the cause (space, permission, quota), or choose another target.",
    )


def _check_alone(status: os.stat_result, path: str, known: dict[tuple[int, int], str]) -> None:
    """Check that a file has one name, so writes change no other.

    known: files of the target by inode and device, to which it is added. Raises: OSError, UcplError E507.
    """
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "it is no regular file")
    other = known.setdefault((status.st_ino, status.st_dev), path)
    if other != path:
        what = f"{other} and {path} are one file on this file system, which takes their names for the same"
        fail(
            "E507", what, Label(path), remedy="choose another file system, or names that differ by more than their case"
        )
    if status.st_nlink > 1:
        raise OSError(errno.EMLINK, "it has a second name (a hard link), which would be written to as well")


def clusters(parts: Parts) -> Iterator[Parts]:
    """Divide parts into runs of neighbours, in the order of the file."""
    some: list[tuple[int, bytes]] = []
    begin = end = 0
    for part in sorted(parts, key=itemgetter(0)):
        position, stop = part[0], part[0] + len(part[1])
        if some and (position - end > NEAR or stop - begin > SPAN):
            yield some
            some = []
        if not some:
            begin = position
        some.append(part)
        end = stop
    if some:
        yield some


def _write_parts(fd: int, parts: Parts) -> int:
    """Write parts of a file, neighbours with the bytes between them.

    No other thread may write these bytes. Returns the bytes of the parts. Raises: OSError.
    """
    written = 0
    for some in clusters(parts):
        begin, end = some[0][0], some[-1][0] + len(some[-1][1])
        room = memoryview(bytearray(end - begin if len(some) >= MANY else 0))
        is_at_once = len(room) and read_upto(fd, room, begin) == len(room)
        for position, data in some:
            if is_at_once:
                room[position - begin : position - begin + len(data)] = data
            else:
                write_all(fd, data, position)
            written += len(data)
        if is_at_once:
            write_all(fd, room, begin)
    return written


class TargetFiles:
    """Files below one folder, written by position."""

    def __init__(self, root: Path, files: Sequence[TargetFile]) -> None:
        self.root = root
        self.files = tuple(files)
        self._open = Descriptors()
        self.forgets = True  # as far as was asked: pages can be dropped here

    def path(self, index: int) -> Path:
        return self.root / self.files[index].path

    def create(self, some: range | None = None) -> int:
        """Make files (of `some`) at full size; write their fixed bytes.

        It can be repeated. Returns the bytes written. Raises: UcplError E503.
        """
        written = 0
        known: dict[tuple[int, int], str] = {}
        for i in range(len(self.files)) if some is None else some:
            file, path = self.files[i], self.path(i)
            try:
                make_folders(self.root, path.parent)
                fd = disk().open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)
                try:
                    _check_alone(os.fstat(fd), file.path, known)
                    disk().allocate(fd, file.plan.size)
                    written += _write_parts(fd, file.plan.fixed)
                finally:
                    disk().close(fd)
            except OSError as error:
                cannot_write(path, error)
        return written

    def descriptor(self, index: int) -> int:
        fd = self._open.get(index)
        return self._open.keep(index, disk().open(self.path(index), os.O_RDWR)) if fd is None else fd

    def write(self, index: int, view: memoryview, position: int) -> None:
        """Raises: UcplError E503."""
        try:
            failpoint("target-write")
            write_all(self.descriptor(index), view, position)
            if len(view) >= _LARGE:  # the kernel waits for seconds, or for a share of memory, before it begins alone
                disk().start_writing(self.descriptor(index), position, len(view))
        except OSError as error:
            cannot_write(self.path(index), error)

    def write_parts(self, index: int, parts: Parts) -> int:
        """Write parts once all tiles are written.

        Returns their bytes. Raises: UcplError E503.
        """
        try:
            failpoint("target-write")
            return _write_parts(self.descriptor(index), parts) if parts else 0
        except OSError as error:
            cannot_write(self.path(index), error)

    def read(self, index: int, view: memoryview, position: int) -> int:
        """Fill a buffer from the file.

        Returns the number of bytes. Raises: UcplError E503.
        """
        try:
            return read_upto(self.descriptor(index), view, position)
        except OSError as error:
            cannot_write(self.path(index), error)

    def sync(self, indexes: Sequence[int], *, drop: bool = False, meanwhile: Callable[[], None] | None = None) -> None:
        """Make written bytes durable.

        `drop` then drops them from memory, so that reading comes from the disk. meanwhile: called from time to time.
        Several files at once: a sync waits for the file system's own journal and for the disk's cache, which all files
        share. Raises: UcplError E503.
        """
        queue = Queue(len(indexes))

        def work(stop: threading.Event) -> None:
            while not stop.is_set() and (i := queue.take()) is not None:
                self._sync(indexes[i], drop=drop)

        run_through(queue, work, _SYNCS, meanwhile)

    def _sync(self, index: int, *, drop: bool) -> None:
        try:
            fd = disk().open(self.path(index), os.O_RDONLY)
            try:
                failpoint("target-sync")
                if drop:
                    disk().sync(fd)
                    self.forgets &= forget(fd, 0, 0)
                else:
                    sync_data(fd)
            finally:
                disk().close(fd)
        except OSError as error:
            cannot_write(self.path(index), error)

    def forget(self, index: int, position: int, size: int) -> None:
        """Drop durable bytes, with all of their pages, from memory.

        They will be read from the disk. Raises: UcplError E503.
        """
        first = position // mmap.PAGESIZE * mmap.PAGESIZE
        end = -(-(position + size) // mmap.PAGESIZE) * mmap.PAGESIZE
        try:
            self.forgets &= forget(self.descriptor(index), first, end - first)
        except OSError as error:
            cannot_write(self.path(index), error)

    def close(self) -> None:
        """Close all descriptors. No other thread may be using one."""
        self._open.close()
